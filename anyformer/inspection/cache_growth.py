"""How the key/value cache grows while a model decodes."""

import torch
from torch import Tensor

from anyformer.cache.kv_cache import Cache, CacheKind
from anyformer.nn.model import Transformer


@torch.no_grad()
def cache_growth(
    model: Transformer, steps: int, source: Tensor | None = None, *, batch: int = 1, kind: CacheKind = "auto"
) -> list[int]:
    """Bytes of keys and values after each of so many tokens, of a cache that really reads them.

    With an encoder, `source` is what that reads; its keys are there from the first step. The numbers are those that
    `count` foretells for each length.
    """
    if model.decoder is None:
        raise ValueError("only a decoder has a cache")
    memory = None if source is None else model.encode(source)
    batch = batch if source is None else len(source)
    cache, grown = model.new_cache(batch, steps, kind=kind), []
    ids = torch.zeros(batch, 1, dtype=torch.long, device=next(model.parameters()).device)
    for step in range(steps):
        model.decode(ids, None if step else memory, cache=cache)
        grown.append(filled(cache))
    return grown


def filled(cache: Cache) -> int:
    """Bytes of the slots that were written; a ring is full when its slots are."""
    total = 0 if cache.states is None else cache.states.nbytes
    for layer in cache.layers:
        total += sum(x.nbytes for x in layer.cross or ())
        for x in (*layer.keys.tensors(), *layer.values.tensors()):  # [b, g, slots, k]
            total += x[:, :, : cache.taken].nbytes
    return total
