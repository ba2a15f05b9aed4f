"""Kernels of a paged cache on a GPU equal their definitions, and give the same bits in every call."""

import pytest
import torch

from anyformer.attention.attend import attend
from anyformer.attention.cache.paged import PagedSlots
from anyformer.attention.layout import Pages
from anyformer.attention.lowered import Dense, FewQueries
from anyformer.attention.scores import Scoring
from anyformer.config import RMSNorm, Rotary
from anyformer.kernels.paged import rotate_heads, write_pages
from tests.attention.paging import to_pages

HALF = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "slots", "width"),
    [(16, 4, 4, 100, 64), (16, 4, 2, 100, 64), (3, 8, 8, 3000, 64), (3, 32, 8, 3000, 128), (200, 8, 8, 300, 64)],
)
@torch.no_grad()
def test_whole_rows(rows: int, heads: int, groups: int, slots: int, width: int, size: int):
    torch.manual_seed(0)
    q = torch.randn(rows, 1, heads, width, **HALF).transpose(1, 2)
    k, v = (torch.randn(rows, groups, slots, width, **HALF) for _ in range(2))
    lengths = torch.randint(0, slots, (rows,), device="cuda")
    keys, values, pages = to_pages(k, v, size)
    mask = (torch.arange(slots, device="cuda") < lengths[:, None])[:, None, None]
    has_key = mask.any(dim=-1, keepdim=True)
    exact = attend(
        q.float(), k.float(), v.float(), Dense(mask=mask | ~has_key, has_key=has_key, kernel="eager"), Scoring(0.1)
    )
    lowered = FewQueries(pages=Pages(pages.table, size, lengths[:, None].repeat(1, 3)[:, 1]))
    ours = attend(q, keys, values, lowered, Scoring(0.1))
    torch.testing.assert_close(ours.float(), exact, atol=0.02, rtol=0.02)
    for _ in range(20):
        assert torch.equal(attend(q, keys, values, lowered, Scoring(0.1)), ours)


@torch.no_grad()
def test_new_tokens_and_rotations():
    torch.manual_seed(0)
    rows, groups, t, width, size = 5, 3, 4, 64, 16
    table = (1 + torch.randperm(10, device="cuda")).view(rows, 2)
    is_token = torch.arange(t, device="cuda") < torch.tensor([4, 3, 1, 0, 2], device="cuda")[:, None]
    positions = torch.tensor([0, 14, 20, 3, 15], device="cuda")[:, None] + torch.arange(t, device="cuda")
    slots = PagedSlots.of(Pages(table, size, is_token.sum(dim=1)), positions, is_token)
    k, v = (torch.randn(rows, t, groups, width, **HALF).transpose(1, 2) for _ in range(2))
    pools = [torch.zeros(1, groups, 11 * size, width, **HALF) for _ in range(4)]
    slots.store(pools[0], k)
    slots.store(pools[1], v)
    write_pages((pools[2], pools[3]), (k, v), slots.at, slots.is_token)
    assert torch.equal(pools[0], pools[2])
    assert torch.equal(pools[1], pools[3])
    rotation = Rotary().prepare(positions, width)
    torch.testing.assert_close(rotate_heads(k, *rotation), Rotary().rotate(k, rotation), atol=0.02, rtol=0.01)


@pytest.mark.parametrize("cast", ["before_scale", "after_scale"])
def test_root_mean_square(cast: str):
    norm = RMSNorm(cast=cast).build(256).to(**HALF)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 3, 256, **HALF)
    with torch.no_grad():
        ours = norm(x)
    torch.testing.assert_close(ours, norm(x).detach(), atol=0.02, rtol=0.02)
