"""A paged KV cache equals a static one, for any model, chunks, rows and order of pages."""

import math
from itertools import pairwise

import torch
from hypothesis import given, strategies as st

from anyformer.attention.cache.paged import PagedCache, SourcePages
from anyformer.config import ModelConfig
from anyformer.generation.engine.sequence_pages import is_paged, new_pool
from anyformer.generation.step import step
from anyformer.nn.inputs import Inputs
from tests.strategies import build, close, models, seeds, tokens

paged = models(shapes=("decoder", "encoder-decoder"), mixers=("attention", "none"))
SIZE = 3


def tables(rows: int, length: int, seed: int, pages: int) -> torch.Tensor:
    """Distinct pages in random order, at least one slot more than tokens."""
    per_row = length // SIZE + 1
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed))[: rows * per_row] + 1
    return order.view(rows, per_row)


@given(paged, seeds, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans(), st.data())
@torch.no_grad()
def test_pages_equal_a_static_cache(
    config: ModelConfig, seed: int, lengths: list[int], int8: bool, data: st.DataObject
):
    model, rows = build(config, seed), len(lengths)
    longest, steps = max(lengths), 3
    assert is_paged(model)
    pool = new_pool(model, (40, 20), SIZE, int8)
    for layer in (*pool.layers, *pool.cross):  # a page that was never written must not matter
        for x in () if layer is None else layer.own():
            x.copy_(torch.randint_like(x, 100)) if x.dtype is torch.int8 else x.normal_()
            x[:, :, :SIZE] = 0
    table = tables(rows, longest + steps, seed, 40)
    given, source, seen = tokens(seed, rows, longest + steps), None, {}
    if model.encoder is not None:
        counts = torch.tensor(data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows)))
        segments = torch.where(torch.arange(5) < counts[:, None], 0, -1)
        seen = {"encoder_out": model.encode(tokens(seed + 9, rows, 5), segments=segments), "source": segments}
        source = SourcePages(tables(rows, 5, seed + 1, 20), counts)
    # each row alone with a static cache
    expected = []
    for row, length in enumerate(lengths):
        cache = model.new_cache(1, length + steps, kind="int8" if int8 else "static")
        if int8:  # rings of int8 are no subject here
            cache = type(cache)(1, length + steps, model.decoder.sizes, pool.layers[0].keys.numbers.device,
                                next(model.parameters()).dtype, "int8", slack=longest + steps)  # fmt: skip
        own = {name: x[row : row + 1] for name, x in seen.items()}
        expected.append(model.decode(given[row : row + 1, : length + steps], **own, cache=cache)[0])

    prefill = data.draw(st.lists(st.integers(1, longest), max_size=2))
    borders = sorted({0, *prefill, longest})
    found: list[list[torch.Tensor]] = [[] for _ in lengths]
    done, first = torch.zeros(rows, dtype=torch.long), True
    for a, b in pairwise(borders):
        present = torch.arange(a, b) < torch.tensor(lengths)[:, None]
        fresh = first and data.draw(st.booleans())
        cache = PagedCache(pool, table, done.clone(), source, 5 if first and source else None, fresh)
        layout = cache.next(b - a, present, longest)
        hidden = model.decode(Inputs(given[:, a:b], layout), **(seen if first else {}), cache=cache)
        first = False
        for row in range(rows):
            found[row].append(hidden[row, present[row]])
        done += present.sum(dim=1)
    for _ in range(steps):
        new = given.gather(1, done[:, None])
        cache = PagedCache(pool, table, done.clone(), source)
        hidden, _ = step(model, cache, new, None, longest + steps)
        for row in range(rows):
            found[row].append(hidden[row])
        done += 1
    for row in range(rows):
        close(torch.cat(found[row]), expected[row])
    for layer in pool.layers:
        for x in layer.own():
            assert not x[:, :, :SIZE].any(), "padding is written to page 0 as zeros"
            assert x.dtype is torch.int8 or math.isfinite(float(x.sum()))
