"""The greatest of many, by parts: what looking at all of them gives."""

import math

import pytest
import torch
from torch import Tensor

from anyformer.generation.top_k import max_argmax, max_by_parts, topk_by_rank, topk_logsumexp


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 3, 8, 17])
@pytest.mark.parametrize("v", [64, 65, 71, 200])
def test_as_of_all(v: int, k: int):
    x = numbers(5, v)
    found, places, total = topk_logsumexp(x, k, part=4)
    expected = x.topk(k)
    assert torch.equal(found, expected.values)
    assert torch.equal(places, expected.indices)
    torch.testing.assert_close(total, x.logsumexp(dim=1, keepdim=True))


def test_equal_numbers_come_once():
    x = numbers(5, 200).mul(2).round()
    found, places, _ = topk_logsumexp(x, 9, part=4)
    assert torch.equal(found, x.topk(9).values)
    assert torch.equal(found, x.gather(1, places))
    assert all(len(set(row)) == 9 for row in places.tolist())


@pytest.mark.parametrize("k", [1, 4, 8])
def test_by_rank_the_first_of_equals_is_first(k: int):
    x = numbers(50, 8).round()
    x[0], x[1, 3:] = -math.inf, -math.inf
    found, places = topk_by_rank(x, k)
    expected = x.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found, expected.values[:, :k])
    assert torch.equal(places, expected.indices[:, :k])


def test_fewer_than_asked_for():
    """The rest is -inf, and within the row."""
    x = torch.full((2, 71), -math.inf)
    x[:, 70] = 1.0
    found, places, total = topk_logsumexp(x, 8, part=4)
    assert found[:, 0].tolist() == [1.0, 1.0]
    assert bool(found[:, 1:].isneginf().all())
    assert int(places.max()) == 70
    assert total.flatten().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_distribution_shows(wrong: float):
    x = numbers(2, 200)
    x[1, 77] = wrong
    found, _, total = topk_logsumexp(x, 3, part=4)
    assert (found - total).isnan().any(dim=1).tolist() == [False, True]


@pytest.mark.parametrize("v", [1, 64, 71])
@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, -math.inf])
def test_the_greatest_by_parts(v: int, wrong: float | None):
    """The first of equals, too."""
    x = numbers(5, v).mul(2).round()
    if wrong is not None:
        x[1:3, v // 2 :] = wrong
    for found, expected in zip(max_by_parts(x, part=4), max_argmax(x), strict=True):
        assert torch.equal(found.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))
