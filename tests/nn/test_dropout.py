"""Dropout by a hash, or by few bits: as many are dropped as asked, everywhere alike, and by each seed others."""

from typing import Any

import pytest
import torch

from anyformer.kernels.dropout import MIN_ELEMENTS, Dropout, hashed_dropout, keep_mask, noise
from tests.narrow import kept

SEEDS = [torch.tensor(seed, dtype=torch.int32) for seed in (0, 1, 2**31 - 2, 12345)]


def few_bits(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(int(seed))
    return noise(x, p) > 0


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", SEEDS, ids=int)
@pytest.mark.parametrize("mask_of", [keep_mask, few_bits])
def test_a_share_is_dropped_in_all_rows_and_columns(p: float, seed: torch.Tensor, mask_of: Any) -> None:
    stays = mask_of(torch.empty(512, 512), p, seed).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(stays.mean() - (1 - p)) < 5 * deviation / 512
    for dim in (0, 1):
        assert (stays.mean(dim) - (1 - p)).abs().max() < 5 * deviation / 512**0.5


@pytest.mark.parametrize("mask_of", [keep_mask, few_bits])
def test_neighbours_and_seeds_have_nothing_in_common(mask_of: Any) -> None:
    masks = [mask_of(torch.empty(512, 512), 0.5, seed).double() * 2 - 1 for seed in SEEDS]
    pairs = [(a, b) for i, a in enumerate(masks) for b in masks[:i]]
    shifted = [(m, m.flatten().roll(n).view(512, 512)) for m in masks for n in (1, 2, 64, 512, 1024)]
    for a, b in pairs + shifted:
        assert abs((a * b).mean()) < 5 / 512


@pytest.mark.parametrize("mask_of", [keep_mask, few_bits])
def test_the_same_seed_drops_the_same(mask_of: Any) -> None:
    x = torch.empty(3, 5, 7)
    assert torch.equal(mask_of(x, 0.3, SEEDS[3]), mask_of(x, 0.3, SEEDS[3]))


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_drops_what_was_dropped_and_no_mask_is_kept(compiled: bool) -> None:
    torch.compiler.reset()

    def run(x: torch.Tensor) -> torch.Tensor:
        return hashed_dropout(x.sin(), 0.3, SEEDS[3]).cos()

    way = torch.compile(run, backend="aot_eager_decomp_partition") if compiled else run
    x = torch.randn(40, 3, 50, requires_grad=True)
    mask = keep_mask(x, 0.3, SEEDS[3])
    due = torch.where(mask, x.sin() / 0.7, 0.0).cos()
    found = way(x)
    torch.testing.assert_close(found, due)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (found, due)]
    torch.testing.assert_close(*slopes)
    if compiled:
        assert kept(way, 40, 3, 50, device="cpu") < 4.5  # x alone


def test_a_hash_drops_under_functional_transforms() -> None:
    x = torch.randn(4, 30)
    slopes = torch.func.vmap(torch.func.grad(lambda row: hashed_dropout(row, 0.5, SEEDS[3]).sum()))(x)
    assert slopes.equal(keep_mask(x[0], 0.5, SEEDS[3]).expand(4, -1) * 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "count", [3, MIN_ELEMENTS - 1, MIN_ELEMENTS, MIN_ELEMENTS + 1, MIN_ELEMENTS + 2, MIN_ELEMENTS + 3]
)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_what_stays_grows_by_what_is_dropped(p: float, count: int, dtype: torch.dtype) -> None:
    x = torch.ones(count, dtype=dtype, requires_grad=True)
    out = Dropout(p)(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    due = x.new_tensor(1 / (1 - p) if p < 1 else 0.0)
    assert slope.equal(out)
    torch.testing.assert_close(
        out[out != 0], due.expand(int((out != 0).sum())), rtol=1e-2 if dtype.itemsize < 4 else 1e-4, atol=0
    )
    assert (out != 0).all() == (p == 0)
    assert Dropout(p).eval()(x) is x


def test_a_batch_that_is_mapped_drops_in_each_row_what_it_will() -> None:
    x = torch.ones(4, MIN_ELEMENTS)
    out = torch.func.vmap(Dropout(0.5), randomness="different")(x)
    assert not out[0].equal(out[1])
    assert 0.4 < (out == 0).float().mean() < 0.6
