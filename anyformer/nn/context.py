"""What a block is told beside its input: one tuple, made by the stack, the only second argument."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from anyformer.nn.cache import LayerCache
from anyformer.nn.mask import Layout, Relation

TapFunction = Callable[[str, Tensor], Tensor]


class Tap(NamedTuple):
    """Shows activations by name to a function that may return others in their place.

    `wants` spares the work of making what nobody asked for (attention weights are recomputed on demand).
    """

    function: TapFunction
    wants: Callable[[str], bool] = lambda name: True
    scope: str = ""

    def within(self, scope: str) -> "Tap":
        return self._replace(scope=f"{self.scope}{scope}.")

    def asks(self, name: str) -> bool:
        return self.wants(self.scope + name)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        return self.function(self.scope + name, x) if self.asks(name) else x


class Context(NamedTuple):
    """Everything a sublayer may need; of the layer at hand, not of the whole model."""

    layout: Layout  # where the tokens at hand stand
    keys: Layout  # where what they may read stands: the same tokens, or all slots of a cache
    relation: Relation | None = None  # who sees whom in self-attention, and the positions' part in it
    cross: Relation | None = None  # the same towards the encoder's output
    memory: Tensor | None = None  # the encoder's output [b, s, d]
    cache: LayerCache | None = None
    at: Tensor | None = None  # the cache slots of the tokens at hand, int [t]
    taps: Tap | None = None
    backend: str = "auto"
    losses: list[Tensor] | None = None  # takes what is to be added to the loss, such as the balance of experts

    def within(self, scope: str) -> "Context":
        return self if self.taps is None else self._replace(taps=self.taps.within(scope))

    def asks(self, name: str) -> bool:
        return self.taps is not None and self.taps.asks(name)

    def tap(self, name: str, x: Tensor) -> Tensor:
        return x if self.taps is None else self.taps(name, x)
