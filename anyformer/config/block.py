"""Blocks and stacks: sublayers, where their norms stand, and how often they repeat. Imports no torch."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from anyformer.config.feedforward import FeedForward, Plain
from anyformer.config.mixer import Attention, Mixer
from anyformer.config.norm import LayerNorm, NoNorm, Norm
from anyformer.config.position import NoPosition, Position
from anyformer.config.spec import BY_KIND, Flag, Probability, Size, Spec


class Sequential(Spec):
    """One sublayer after the other."""

    kind: Literal["sequential"] = "sequential"


class Parallel(Spec):
    """All sublayers read the same input and their outputs are summed; `shared_norm`: through one norm."""

    kind: Literal["parallel"] = "parallel"
    shared_norm: Flag = False


Order = Annotated[Sequential | Parallel, *BY_KIND]


class Block(Spec):
    """Sublayers and where their norms stand.

    pre x + F(N x) · post N(x + F x) · branch x + N(F x) · sandwich x + N₂(F(N₁ x))
    """

    mixer: Mixer
    cross: Attention | None = None  # reads the encoder's output
    feedforward: FeedForward = Plain()
    norm: Norm = LayerNorm()
    placement: Literal["pre", "post", "branch", "sandwich"] = "pre"
    order: Order = Sequential()
    dropout: Probability = 0.0  # on each sublayer's output


def _one_or_many(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


Blocks = Annotated[tuple[Block, ...], BeforeValidator(_one_or_many, json_schema_input_type=tuple[Block, ...] | Block)]


class Stack(Spec):
    """`prefix` blocks once, then `blocks` tiled to `depth`; with `share`, the tile's weights are reused (ALBERT)."""

    depth: Size
    blocks: Blocks
    prefix: Blocks = ()
    share: Flag = False
    position: Position = NoPosition()
    final_norm: Norm = NoNorm()
    dropout: Probability = 0.0  # on the output (T5)

    def unrolled(self) -> tuple[Block, ...]:
        """The block of each layer."""
        rest = self.depth - len(self.prefix)
        return self.prefix + tuple(self.blocks[i % len(self.blocks)] for i in range(rest))
