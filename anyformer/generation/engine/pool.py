"""The pool of a model's paged KV cache: which models have one, its sizes and its number of pages."""

import torch

from anyformer.attention.cache.paged import Pool
from anyformer.config.cost import Sizes
from anyformer.generation.engine.interface import Limits
from anyformer.kernels.runtime import Runtime
from anyformer.nn.model import Transformer

CPU_POOL_TOKENS = 65536  # of a model on the CPU, where free memory is not measured


def is_paged(model: Transformer) -> bool:
    """Return whether the state of a model is keys and values of tokens, in pages."""
    decoder = model.config.decoder
    if decoder is None or decoder.memory:
        return False
    blocks = decoder.unrolled()
    stored = all(block.mixer.stores(model.config.width) is not None for block in blocks)
    return stored and all(block.attention or block.mixer.is_none for block in blocks)


def new_pool(model: Transformer, pages: tuple[int, int], page_size: int, int8: bool = False) -> Pool:
    """Return an empty pool of pages for tokens and for sources, page 0 of each included."""
    assert model.decoder is not None
    weight = next(model.parameters())
    dtype = Runtime.of(weight, training=False).dtype
    return Pool(_own_sizes(model), _cross_sizes(model), pages, page_size, weight.device, dtype, int8)


def count_pages(model: Transformer, limits: Limits) -> tuple[int, int]:
    """Return the number of pages for tokens and for sources by limits; 0 for sources without an encoder."""
    assert model.decoder is not None
    sides = (_own_sizes(model), [size for size in _cross_sizes(model) if size is not None])
    weight = next(model.parameters())
    wide = Runtime.of(weight, training=False).dtype.itemsize
    own, cross = (
        sum(size.groups * (size.key_width + size.value_width) for size in side) * wide * limits.page_size
        for side in sides
    )
    own = own // (2 if limits.int8 and wide == 2 else 1)
    if limits.pages is not None:
        pages = limits.pages
    elif weight.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(weight.device)
        pages = int(free * limits.memory) // max(own + cross, 1)
    else:
        pages = CPU_POOL_TOKENS // limits.page_size
    return pages + 1, pages + 1 if cross else 0


def _own_sizes(model: Transformer) -> list[Sizes]:
    assert model.decoder is not None
    return [size for size in model.decoder.sizes if isinstance(size, Sizes)]  # all of a model that is paged


def _cross_sizes(model: Transformer) -> list[Sizes | None]:
    decoder, width = model.config.decoder, model.config.width
    assert decoder is not None
    crosses = (block.cross for block in decoder.unrolled())
    return [None if spec is None else Sizes(spec.groups, *spec.widths(width)) for spec in crosses]
