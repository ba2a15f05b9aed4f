"""The second argument of every block and sublayer: masks, caches and taps of the layer at hand, made by the stack."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from anyformer.attention.cache.layer_cache import LayerCache
from anyformer.attention.cache.paged import PagedLayer
from anyformer.attention.cache.ring import FirstTokens, SlotWriter
from anyformer.attention.cache.segment_memory import LayerMemory
from anyformer.attention.cache.states import StateCache
from anyformer.attention.layout import Layout
from anyformer.attention.lowered import Relation
from anyformer.nn.aux_outputs import AuxOutputs

TapFunction = Callable[[str, Tensor], Tensor]


class Tap(NamedTuple):
    """Function that reads activations by name and may return others in their place.

    `wants` avoids computing unneeded activations (attention weights are recomputed on demand).
    """

    function: TapFunction
    wants: Callable[[str], bool] = lambda name: True
    scope: str = ""

    def scoped(self, scope: str) -> "Tap":
        return self._replace(scope=f"{self.scope}{scope}.")

    def selects(self, name: str) -> bool:
        return self.wants(self.scope + name)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        return self.function(self.scope + name, x) if self.selects(name) else x


class PassOptions(NamedTuple):
    """Options of one forward pass, the same for all layers."""

    backend: str = "auto"
    taps: Tap | None = None
    aux: AuxOutputs | None = None  # None in evaluation and with a cache
    recompute: bool = False  # activations in the backward pass, one block at a time, in place of storing them

    def scoped(self, scope: str) -> "PassOptions":
        return self if self.taps is None else self._replace(taps=self.taps.scoped(scope))


class CacheWriter(NamedTuple):
    """The cache of one layer, and the slots of the tokens at hand."""

    layer: LayerCache | StateCache | PagedLayer
    write_at: SlotWriter


class StateSink:
    """Receives the states of a recurrent layer after each token, [b, t, h]. Not a list: FSDP copies those."""

    states: Tensor | None = None


class RecurrentOptions(NamedTuple):
    """Where a recurrent layer starts, where its states go, and how it runs."""

    initial: Tensor | None = None  # its state for a segment that starts at each token, [b, t, h]; None: zeros
    sink: StateSink | None = None
    backend: str = "auto"  # eager: by the definition


class Crossing(NamedTuple):
    """The input of cross-attention."""

    relation: Relation
    encoder_out: Tensor | None = None  # [b, s, d]; None once a cache holds its keys and values


class Context(NamedTuple):
    """Everything that a sublayer may need besides its input."""

    layout: Layout  # of the tokens at hand
    keys: Layout  # of the tokens that they may read: the same ones, or those in a cache or the segment memory
    relation: Relation | None = None  # mask and positions of self-attention
    cross: Crossing | None = None  # the same of cross-attention, and the encoder's output
    cache: CacheWriter | None = None
    memory: LayerMemory | None = None  # segment memory (Transformer-XL)
    recurrent: RecurrentOptions = RecurrentOptions()
    taps: Tap | None = None
    aux: AuxOutputs | None = None

    @property
    def reads_own_tokens(self) -> bool:
        """True if the tokens at hand read each other only: without a cache, or as the first ones that it holds."""
        return self.cache is None or isinstance(self.cache.write_at, FirstTokens)

    def scoped(self, scope: str) -> "Context":
        """Return the context of a part, whose taps have names that start with `scope`."""
        return self if self.taps is None else self._replace(taps=self.taps.scoped(scope))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [b, g, t, k] in the cache, if any; return all that can be read [b, g, s, k].

        If the kernel finds them by a table, return all that is stored: [b, g, slots, k], or pools [1, g, slots, k].
        """
        if self.cache is None:
            return k, v
        layer, writer = self.cache
        assert not isinstance(layer, StateCache), "a recurrent mixer writes its state itself"
        return layer.append(k, v, writer)

    def read_cross(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of cross-attention from the cache [b, g, s, k], or the pools of their pages."""
        assert self.cache is not None
        assert self.cross is not None
        return self.cache.layer.read_cross(self.cross.relation.reads_in_place)

    def with_memory(self, x: Tensor) -> Tensor:
        """Return the tokens of the segment memory, then new ones [b, t, d]."""
        return x if self.memory is None else self.memory.append(x)

    def with_history(self, x: Tensor) -> Tensor:
        """Return all tokens that new ones [b, t, d] can read, [b, s, d]: earlier ones, from the cache or the segment
        memory, then new ones; or whole rows, if these are a part of them."""
        if self.layout.whole is not None:
            return self.layout.whole.gather(x, 1)
        x = self.with_memory(x)
        return self.append(x[:, None], x[:, None, :, :0])[0][:, 0]

    def tap(self, name: str, x: Tensor) -> Tensor:
        return x if self.taps is None else self.taps(name, x)
