"""What a block is told beside its input: one tuple, made by the stack, the only second argument."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from anyformer.attention.layout import Layout, Relation
from anyformer.cache.kv_cache import LayerCache
from anyformer.cache.ring import SlotWriter
from anyformer.cache.segment_memory import Recall
from anyformer.nn.aux_outputs import AuxOutputs

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
    keys: Layout  # where what they may read stands: the same tokens, or the slots of a cache
    relation: Relation | None = None  # who sees whom in self-attention, and the positions' part in it
    cross: Relation | None = None  # the same towards the encoder's output
    memory: Tensor | None = None  # the encoder's output [b, s, d]
    cache: LayerCache | None = None
    at: SlotWriter | None = None  # where in the cache the tokens at hand go
    past: Recall | None = None  # what is kept of the segments before
    taps: Tap | None = None
    backend: str = "auto"
    notes: AuxOutputs | None = None  # takes what training is to know: terms of the loss, statistics of the batch
    begin: Tensor | None = None  # the state in which a recurrent layer would begin at each token, [b, t, h]
    states: list[Tensor] | None = None  # takes a recurrent layer's state after each token, [b, t, h]

    def within(self, scope: str) -> "Context":
        return self if self.taps is None else self._replace(taps=self.taps.within(scope))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values [b, g, t, k] behind those in a cache; all that can be read [b, g, s, k]."""
        if self.cache is None:
            return k, v
        assert self.at is not None
        return self.cache.append(k, v, self.at)

    def recall(self, x: Tensor) -> Tensor:
        """New tokens [b, t, d] behind those of the past."""
        return x if self.past is None else self.past.append(x)

    def remember(self, x: Tensor) -> Tensor:
        """New tokens [b, t, d] behind those in a cache or the past; all that can be read [b, s, d]."""
        x = self.recall(x)
        return self.append(x[:, None], x[:, None, :, :0])[0][:, 0]

    def asks(self, name: str) -> bool:
        return self.taps is not None and self.taps.asks(name)

    def tap(self, name: str, x: Tensor) -> Tensor:
        return x if self.taps is None else self.taps(name, x)
