"""Bytes of the key/value cache while a model decodes, measured."""

import torch
from torch import Tensor

from anyformer.attention.cache.kv_cache import Cache, CacheKind
from anyformer.attention.cache.states import StateCache
from anyformer.nn.model import Transformer


@torch.no_grad()
def cache_growth(
    model: Transformer, steps: int, source: Tensor | None = None, *, batch: int = 1, kind: CacheKind = "auto"
) -> list[int]:
    """Return the bytes of keys and values after each of `steps` tokens, from a real cache.

    `source` is the input of the encoder, if there is one; its keys are in the cache from the first step. The result
    equals the prediction of `count` for each length.
    """
    if model.decoder is None:
        raise ValueError("only a decoder has a cache")
    encoder_out = None if source is None else model.encode(source)
    batch = batch if source is None else len(source)
    cache, grown = model.new_cache(batch, steps, kind=kind), []
    ids = torch.zeros(batch, 1, dtype=torch.long, device=next(model.parameters()).device)
    for step in range(steps):
        model.decode(ids, None if step else encoder_out, cache=cache)
        grown.append(used_bytes(cache))
    return grown


def used_bytes(cache: Cache) -> int:
    """Return the bytes of all slots that have been written."""
    total = 0 if cache.states is None else cache.states.nbytes
    for layer in cache.layers:
        total += sum(x.nbytes for x in layer.cross or ())
        if isinstance(layer, StateCache):
            total += layer.states.nbytes + layer.inputs.nbytes
            continue
        for x in layer.own():  # [b, g, slots, k]
            total += x[:, :, : cache.taken].nbytes
    return total
