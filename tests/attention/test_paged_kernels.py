"""Kernels of a paged cache equal their definitions, in Triton's interpreter; `tests/gpu` runs them on a GPU."""

import os
from importlib.util import find_spec

import pytest
import torch

from anyformer.attention.attend import attend
from anyformer.attention.cache.paged import PagedSlots
from anyformer.attention.layout import Pages
from anyformer.attention.lowered import Dense, FewQueries
from anyformer.attention.scores import Scoring
from anyformer.config import Rotary
from anyformer.kernels.paged import rotate_heads, write_pages
from tests.attention.paging import to_pages

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


@pytest.mark.parametrize("size", [8, 64, 128])
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "slots", "widths"),
    [(2, 4, 2, 100, (16, 16)), (3, 4, 4, 300, (24, 40)), (1, 40, 1, 600, (64, 64)), (2, 8, 8, 1100, (64, 64))],
)
def test_whole_rows(rows: int, heads: int, groups: int, slots: int, widths: tuple[int, int], size: int):
    """Rows of several lengths, one of them empty; one part of the keys or several; lengths that are a column."""
    q, k = draw(rows, 1, heads, widths[0]).transpose(1, 2), draw(rows, groups, slots, widths[0])
    v = draw(rows, groups, slots, widths[1])
    lengths = torch.tensor([slots - 3, 0, 1])[:rows]
    keys, values, pages = to_pages(k, v, size)
    mask = (torch.arange(slots) < lengths[:, None])[:, None, None]
    has_key = mask.any(dim=-1, keepdim=True)
    dense = Dense(mask=mask | ~has_key, has_key=has_key, kernel="eager")
    exact = attend(*(x.double() for x in (q, k, v)), dense, Scoring(0.3))
    ours = attend(
        q, keys, values, FewQueries(pages=Pages(pages.table, size, lengths[:, None].repeat(1, 3)[:, 1])), Scoring(0.3)
    )
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "groups", "t", "widths"), [(3, 2, 1, (16, 16)), (2, 3, 5, (24, 40))])
def test_new_tokens(rows: int, groups: int, t: int, widths: tuple[int, int]):
    size, table = 4, torch.tensor([[5, 2, 1], [3, 4, 6], [7, 8, 9]])[:rows]
    is_token = torch.arange(t) < torch.tensor([t, t - 1, 1])[:rows, None]
    positions = torch.tensor([3, 0, 6])[:rows, None] + torch.arange(t)
    slots = PagedSlots.of(Pages(table, size, is_token.sum(dim=1)), positions, is_token)
    k, v = (draw(rows, t, groups, width).transpose(1, 2) for width in widths)
    expected, found = ([draw(1, groups, 40, width) for width in widths] for _ in range(2))
    for pool, new in zip(expected, (k, v), strict=True):
        slots.store(pool, new)
    write_pages((found[0], found[1]), (k, v), slots.at, slots.is_token)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.parametrize(("rows", "heads", "t", "width"), [(2, 3, 5, 16), (3, 4, 1, 24)])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per row"])
def test_rotated_heads(rows: int, heads: int, t: int, width: int, shared: bool):
    x = draw(rows, t, heads, width).transpose(1, 2)
    positions = torch.arange(t)[None] if shared else torch.arange(rows * t).view(rows, t)
    rotation = Rotary().prepare(positions, width)
    torch.testing.assert_close(rotate_heads(x, *rotation), Rotary().rotate(x, rotation))
