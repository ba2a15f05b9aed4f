"""The best continuations of beams by the kernel: those of the reference.

The kernel runs in Triton's interpreter (TRITON_INTERPRET=1); `tests/gpu/test_beam_candidates.py` runs it on a GPU.
"""

import math
import os
import random
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from anyformer.generation.top_k import top_candidates
from anyformer.kernels import beam_candidates
from anyformer.kernels.beam_candidates import can_find_candidates, find_candidates

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
Problem = tuple[Tensor, Tensor, Tensor, int]


def problem(n: int, width: int, vocab: int, count: int, seed: int = 0) -> Problem:
    """Beams of which some do not exist yet, and a search that has failed."""
    dice = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n * width, vocab, generator=dice)
    logits[0, vocab // 2 :] = -math.inf
    log_p = -torch.rand(n, width, generator=dice)
    log_p[-1, 1:] = -math.inf
    return logits, log_p, torch.arange(n) == 1, count


def compare(ours: tuple[Tensor, Tensor, Tensor], exact: tuple[Tensor, Tensor, Tensor]) -> None:
    torch.testing.assert_close(ours[0], exact[0])
    alive = ~exact[0].isneginf()
    assert torch.equal(ours[1][alive], exact[1][alive])
    assert torch.equal(ours[2], exact[2])


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, -math.inf])
def test_a_beam_without_a_distribution_ends_its_search(wrong: float | None):
    """By the reference; -inf alone is a banned token, in all places it leaves no distribution."""
    logits, log_p, failed, count = problem(3, 2, 40, 4)
    if wrong is not None:
        logits[5, 7 if wrong != -math.inf else slice(None)] = wrong
    scores, flat, fails = top_candidates(logits, log_p, failed, count)
    assert fails.tolist() == [False, True, wrong is not None]
    assert scores.isneginf().all(dim=1).tolist() == fails.tolist()
    beams, tokens = flat // 40, flat % 40
    expected = log_p[:, :, None] + logits.log_softmax(dim=-1).view(3, 2, 40)
    found = expected.flatten(1).gather(1, beams * 40 + tokens)
    torch.testing.assert_close(scores[~fails], found[~fails])


def test_only_where_it_can_run():
    """Not on a CPU, nor for more candidates than tokens."""
    assert not can_find_candidates(torch.zeros(4, 100), 2, 4)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which computes inf - inf in the interpreter
@pytest.mark.parametrize("seed", range(12))
def test_as_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch):
    """In random shapes, with and without a row that is no distribution."""
    dice = random.Random(seed)
    vocab = dice.randrange(12, 300)
    given = problem(dice.randrange(2, 5), dice.randrange(1, 7), vocab, dice.randrange(1, 13), seed)
    if seed % 4:  # the interpreter takes no group that is NaN altogether
        wrong, at = (math.nan, math.inf, -math.inf)[seed % 4 - 1], dice.randrange(vocab)
        given[0][-1, at : at + 1 if seed % 4 < 3 else None] = wrong
    monkeypatch.setattr(beam_candidates, "GROUP", dice.choice([4, 16, 64]))
    compare(find_candidates(*given), top_candidates(*given))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_of_equal_scores_the_first_is_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(beam_candidates, "GROUP", 16)
    found = find_candidates(torch.zeros(4, 50), torch.zeros(2, 2), torch.zeros(2, dtype=torch.bool), 20)
    assert found[1].tolist() == [list(range(20))] * 2
