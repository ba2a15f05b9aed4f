"""Dropout by a hash: as many are dropped as asked, everywhere alike, and by each seed others."""

import pytest
import torch

from anyformer.nn.dropout import kept

SEEDS = [torch.tensor(seed, dtype=torch.int32) for seed in (0, 1, 2**31 - 2, 12345)]


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", SEEDS, ids=int)
def test_a_share_is_dropped_in_all_rows_and_columns(p: float, seed: torch.Tensor) -> None:
    stays = kept(torch.empty(512, 512), p, seed).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(stays.mean() - (1 - p)) < 5 * deviation / 512
    for dim in (0, 1):
        assert (stays.mean(dim) - (1 - p)).abs().max() < 5 * deviation / 512**0.5


def test_neighbours_and_seeds_have_nothing_in_common() -> None:
    masks = [kept(torch.empty(512, 512), 0.5, seed).double() * 2 - 1 for seed in SEEDS]
    pairs = [(a, b) for i, a in enumerate(masks) for b in masks[:i]]
    shifted = [(m, m.flatten().roll(n).view(512, 512)) for m in masks for n in (1, 2, 64, 512, 1024)]
    for a, b in pairs + shifted:
        assert abs((a * b).mean()) < 5 / 512


def test_the_same_seed_drops_the_same() -> None:
    x = torch.empty(3, 5, 7)
    assert torch.equal(kept(x, 0.3, SEEDS[3]), kept(x, 0.3, SEEDS[3]))
