"""Snapshot of one row of a KV cache, to start a row of another cache of the same model."""

from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.attention.cache.kv_cache import Cache
from anyformer.attention.cache.layer_cache import LayerCache
from anyformer.attention.cache.states import StateCache
from anyformer.attention.layout import real
from anyformer.config.cost import StateSizes


class Snapshot(NamedTuple):
    """First tokens of one text: for each layer, what it stores of the newest of them, in order."""

    length: int
    # [g, tokens, k]; fewer tokens than `length` if a ring has overwritten some. Of a recurrent layer: state and inputs
    layers: tuple[tuple[Tensor, ...], ...]

    def fits(self, cache: Cache, length: int) -> int:
        """Return how many of its first `length` tokens a row of the cache can continue from.

        That is all of them, or none if the cache stores another data type, a ring has overwritten tokens that a layer
        needs, or a layer has the state after other tokens.
        """
        length = min(length, self.length)
        if self.form != tuple(tuple(x.dtype for x in _stored(layer)) for layer in cache.layers):
            return 0
        for size, stored in zip(cache.sizes, self.layers, strict=True):
            if isinstance(size, StateSizes):
                if length < self.length:
                    return 0
                continue
            lost = self.length - (stored[0].shape[1] if stored else self.length)
            needed = 0 if size.reach not in cache.rings else max(0, length - size.reach)
            if lost > needed:
                return 0
        return length

    @property
    def form(self) -> tuple[tuple[torch.dtype, ...], ...]:
        """Data types of the stored tensors of each layer."""
        return tuple(tuple(x.dtype for x in stored) for stored in self.layers)

    def nbytes(self) -> int:
        return sum(x.nbytes for stored in self.layers for x in stored)


def snapshot(cache: Cache, row: int) -> Snapshot:
    """Copy one row of a cache, which must hold one text from its start."""
    assert cache.origins is None, "a row is in one piece only if rows are not shared"
    slots = real(cache.segments[row]).nonzero()[:, 0]
    layers = []
    for size, layer in zip(cache.sizes, cache.layers, strict=True):
        if isinstance(layer, StateCache):
            layers.append(tuple(x[row].clone() for x in _stored(layer)))
            continue
        at = slots
        if size.reach in cache.rings:
            ring = cache.rings[size.reach]
            count = int(ring.count[row])
            at = torch.arange(max(int(ring.lost[row]), 0), count, device=slots.device) % ring.size
        layers.append(tuple(x[row][:, at] for x in _stored(layer)))
    return Snapshot(len(slots), tuple(layers))


def adopt(cache: Cache, row: int, known: Snapshot, length: int) -> None:
    """Write the first `length` tokens of a snapshot that `fits` to an empty row, as if it had read them."""
    index = torch.arange(length, device=cache.length.device)
    for size, layer, stored in zip(cache.sizes, cache.layers, known.layers, strict=True):
        if isinstance(layer, StateCache):
            for mine, theirs in zip(_stored(layer), stored, strict=True):
                mine[row].copy_(theirs)
            layer.segments[row], layer.runs[row], layer.removable[row] = 0, 0, 0
            continue
        first = known.length - (stored[0].shape[1] if stored else known.length)
        begin, at = first, index
        if size.reach in cache.rings:
            ring = cache.rings[size.reach]
            begin = max(first, length - ring.size)
            at = index[begin:] % ring.size
        for mine, theirs in zip(_stored(layer), stored, strict=True):
            mine[row][:, at] = theirs[:, begin - first : length - first]
    for ring in cache.rings.values():
        newest = index[max(0, length - ring.size) :]
        ring.positions[row, newest % ring.size] = newest
        ring.segments[row, newest % ring.size] = 0
        ring.count[row] = length
        ring.lost[row] = max(0, length - ring.size)
    cache.positions[row, :length] = index
    cache.segments[row, :length] = 0
    cache.following[row] = length


def _stored(layer: LayerCache | StateCache) -> tuple[Tensor, ...]:
    """Return what a layer stores of tokens [b, g, slots, k]; of a recurrent layer the newest state and inputs."""
    if isinstance(layer, StateCache):
        return layer.states[:, -1], layer.inputs[:, layer.slack :]
    return layer.own()
