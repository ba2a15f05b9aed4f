"""Blocks and stacks: sublayers, the placement of their norms, how they repeat, and the rules of a stack as a whole.

Imports no torch.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from anyformer.config.attention import Attention
from anyformer.config.families import Side as Side
from anyformer.config.feedforward import FeedForward, Plain
from anyformer.config.mixer import Mixer
from anyformer.config.norm import LayerNorm, Norm
from anyformer.config.position import Position
from anyformer.config.spec import BY_KIND, Count, Fault, Flag, Probability, Size, Spec

MAX_DEPTH = 2_000  # layers of a stack; the deepest published Transformers have 1,000


class Sequential(Spec):
    """One sublayer after the other."""

    kind: Literal["sequential"] = "sequential"


class Parallel(Spec):
    """All sublayers read the same input and their outputs are summed; `shared_norm`: through one norm."""

    kind: Literal["parallel"] = "parallel"
    shared_norm: Flag = False  # one norm for all sublayers, rather than one for each


Order = Annotated[Sequential | Parallel, *BY_KIND]


class Block(Spec):
    """Sublayers and the placement of their norms.

    pre x + F(N x) · post N(x + F x) · branch x + N(F x) · sandwich x + N₂(F(N₁ x)); without `residual`, no x +.
    """

    mixer: Mixer  # the sublayer through which tokens read each other
    cross: Attention | None = None  # cross-attention to the encoder's output; None: none
    feedforward: FeedForward = Plain()  # the sublayer that transforms each token on its own
    norm: Norm = LayerNorm()  # norm of every sublayer
    placement: Literal["pre", "post", "branch", "sandwich"] = "pre"  # where the norms are
    order: Order = Sequential()  # sublayers one after the other, or in parallel
    residual: Flag = True  # adds the input of a sublayer to its output
    dropout: Probability = 0.0  # on each sublayer's output

    @property
    def is_parallel(self) -> bool:
        """True if all sublayers read the same input."""
        return isinstance(self.order, Parallel)

    @property
    def shares_norm(self) -> bool:
        """True if parallel sublayers read their input through one norm."""
        return isinstance(self.order, Parallel) and self.order.shared_norm

    @property
    def attention(self) -> Attention | None:
        """The mixer, if it is softmax attention; else None."""
        return self.mixer if isinstance(self.mixer, Attention) else None

    def attentions(self) -> Iterator[tuple[str, Attention]]:
        """Yield the softmax attentions by their names in the block: mixer, cross."""
        if self.attention is not None:
            yield "mixer", self.attention
        if self.cross is not None:
            yield "cross", self.cross

    def on(self, side: Side, position: Position) -> "Block":
        """Return the block with what its mixer leaves to the side, causality, and to the stack, positions."""
        return self.model_copy(update={"mixer": self.mixer.on(side).with_position(position)})


def _one_or_many(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


Blocks = Annotated[tuple[Block, ...], BeforeValidator(_one_or_many, json_schema_input_type=tuple[Block, ...] | Block)]


class Pooling(Spec):
    """Stages of layers, each over sequences `factor` times as short as those before it (Funnel-Transformer 2020).

    A window is `factor` neighbouring positions of one segment, which are pooled to one vector for the next stage.
    After the last stage, every token gets the vector of its window plus its output of the first stage; `tail` layers
    follow.
    """

    stages: tuple[Size, ...]  # layers of each stage; the first stage reads all tokens
    factor: Size = 2  # tokens of a window, which are pooled to one
    how: Literal["mean", "max"] = "mean"  # how a window is pooled
    tail: Count = 0  # layers after the last stage, over all tokens

    @property
    def levels(self) -> tuple[int, ...]:
        """Number of poolings before each layer."""
        return (*(level for level, layers in enumerate(self.stages) for _ in range(layers)), *[0] * self.tail)


class Layers(NamedTuple):
    """Layers of one block that read sequences of the same pooling stage."""

    block: Block
    level: int  # how many times their tokens have been pooled
    first: int  # the number of the first one
    times: int  # how many there are
    own: int  # blocks with their own weights; with `share` the others reuse them


class Stack(Spec):
    """`prefix` blocks once, then `blocks` tiled to `depth`; with `share`, the tile's weights are reused (ALBERT)."""

    depth: Annotated[int, Field(strict=True, ge=1, le=MAX_DEPTH)]  # number of layers, `prefix` included
    blocks: Blocks  # one block, or several that repeat until `depth` is reached
    prefix: Blocks = ()  # blocks of the first layers, each used once
    share: Flag = False  # repeated blocks use the same weights (ALBERT)
    position: Position = Position.none()  # position scheme
    final_norm: Norm = Norm.none()  # norm after the last layer
    dropout: Probability = 0.0  # on the output (T5)
    memory: Count = 0  # tokens before a segment that it still reads, without gradients (Transformer-XL 2019)
    pooling: Pooling | None = None  # shorter sequences in deeper layers; None: every layer reads all tokens
    # a layer reads a x + b x₀: x₀ is the embedding, a and b are learned and begin with 1 and 0
    embedding_skip: Flag = False
    # the output of layer i, times a learned weight, is added to the input of the i-th layer from the end
    unet_skips: Flag = False

    def unrolled(self) -> tuple[Block, ...]:
        """Return the block of each layer."""
        rest = self.depth - len(self.prefix)
        return self.prefix + tuple(self.blocks[i % len(self.blocks)] for i in range(rest))

    @property
    def runs(self) -> tuple[int, ...]:
        """Index of the block whose weights each layer uses: its own, or with `share` that of the tile."""
        head, tile = len(self.prefix), len(self.blocks)
        return tuple(i if i < head or not self.share else head + (i - head) % tile for i in range(self.depth))

    def distinct(self) -> list["Layers"]:
        """Return the layers grouped by block and pooling level, in the order of the first of each group."""
        found: dict[tuple[int, int], list[int]] = {}
        head, tile = len(self.prefix), len(self.blocks)
        for i, level in enumerate(self.levels):
            place = i if i < head else head + (i - head) % tile
            first, count, own = found.get((place, level), (i, 0, 0))
            found[place, level] = [first, count + 1, own + (not self.share or i < head + tile)]
        blocks = (*self.prefix, *self.blocks)
        return [Layers(blocks[place], level, *group) for (place, level), group in found.items()]

    @property
    def levels(self) -> tuple[int, ...]:
        """Number of poolings before each layer."""
        return self.pooling.levels if self.pooling else (0,) * self.depth

    @property
    def ends(self) -> list[tuple[int, str]]:
        """Limits on the number of positions with their causes, smallest first; empty if there is no limit."""
        blocks = (*self.prefix, *self.blocks)
        readers = (*(block.mixer for block in blocks), *(block.cross for block in blocks if block.cross))
        found = [end for reader in readers for end in reader.ends]
        if self.position.limit is not None:
            found.append((self.position.limit, f"{self.position.kind} positions"))
        return sorted(found)

    @property
    def limit(self) -> int | None:
        """Maximum number of positions, or None if there is no limit."""
        return self.ends[0][0] if self.ends else None


# -- rules of a stack as a whole: segment memory, pooling, global tokens and skips -------------------------------------


def stack_faults(stack: Stack, side: Side, has_encoder: bool, width: int) -> Iterator[Fault]:
    """Yield the faults of a stack's `memory`, `pooling` and global tokens; `has_encoder`: the model has one."""
    yield from _memory(stack, side, has_encoder, width)
    yield from _pooling(stack, side)
    yield from _global_projections(stack, side)


def _memory(stack: Stack, side: Side, has_encoder: bool, width: int) -> Iterator[Fault]:
    """Yield faults of `memory`: positions must be unlimited, and all layers must keep tokens."""
    if not stack.memory:
        return
    mixers = [block.mixer for block in (*stack.prefix, *stack.blocks)]
    ends, what = stack.ends, f"= {stack.memory}:"
    if side == "encoder" or has_encoder:
        yield Fault("memory", f"{what} only a decoder without an encoder reads a text in segments; leave it out")
    elif stack.position.embeds():
        within = "rotary, alibi or t5"
        yield Fault("memory", f"{what} {stack.position.kind} positions are absolute; choose one of distances: {within}")
    elif ends:
        yield Fault(
            "memory", f"{what} positions continue from segment to segment, and there are {ends[0][0]} {ends[0][1]}"
        )
    elif any(mixer.has_state for mixer in mixers):
        yield Fault("memory", f"{what} it keeps tokens for attention, and a recurrent layer has a state; leave one out")
    elif kinds := [mixer.kind for mixer in mixers if mixer.stores(width) is None]:
        yield Fault("memory", f"{what} it keeps tokens, and '{kinds[0]}' layers store nothing; leave one out")
    elif all(mixer.is_none for mixer in mixers):
        yield Fault("memory", f"{what} no layer reads other tokens")


def _pooling(stack: Stack, side: Side) -> Iterator[Fault]:
    pooling = stack.pooling
    if not pooling:
        return
    if side == "decoder":
        yield Fault("pooling", "a window would show later tokens: only an encoder pools")
    if len(pooling.stages) < 2:
        yield Fault("pooling.stages", f"= {list(pooling.stages)}: pooling is between stages, so there are two or more")
    if (layers := sum(pooling.stages) + pooling.tail) != stack.depth:
        yield Fault("depth", f"= {stack.depth}: the stages and the tail of `pooling` are {layers} layers")


def _global_projections(stack: Stack, side: Side) -> Iterator[Fault]:
    """Yield faults of separate projections of global tokens: a cache has no room for their keys and values."""
    for name, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
        for i, block in enumerate(blocks):
            mixer, path = block.attention, f"{name}.{i}.mixer.global_projections"
            if block.cross and block.cross.global_projections:
                yield Fault(f"{name}.{i}.cross.global_projections", "= True: across there are no global tokens")
            if mixer is None or not mixer.global_projections:
                continue
            if side == "decoder":
                yield Fault(path, "= True: only an encoder has separate projections of global tokens")
            elif (scheme := mixer.position or stack.position).reads_content():
                yield Fault(path, f"= True: {scheme.kind} positions compare distances with one kind of query and key")


def skip_faults(stack: Stack, width: int) -> Iterator[Fault]:
    """Yield faults of connections that skip layers: of outputs, embeddings and values."""
    for name in ("embedding_skip", "unet_skips"):
        if getattr(stack, name) and stack.pooling:
            yield Fault(name, "= True: layers of a pooled stack read sequences of other lengths: leave pooling out")
    if stack.unet_skips and stack.depth < 2:
        yield Fault("unet_skips", f"= True: needs two layers or more, and depth = {stack.depth}")
    sizes = set[tuple[int, int]]()
    for name, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
        for i, block in enumerate(blocks):
            path, mixer = f"{name}.{i}.mixer.value_residual", block.attention
            if block.cross and block.cross.value_residual:
                yield Fault(f"{name}.{i}.cross.value_residual", "= True: values across are those of the encoder")
            if mixer is None or not mixer.value_residual:
                continue
            if stack.pooling:
                yield Fault(path, "= True: layers of a pooled stack have values of other lengths: leave pooling out")
            elif mixer.latent:
                yield Fault(path, "= True: latent attention stores no values: leave compress out")
            else:
                sizes.add((mixer.groups, mixer.widths(width)[1]))
            if len(sizes) > 1:
                yield Fault(path, "= True: all layers that have it need the same kv_heads and value_width")
                return
