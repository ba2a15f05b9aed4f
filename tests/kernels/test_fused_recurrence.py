"""Kernels of linear recurrences equal the loop over tokens, gradients included, in Triton's interpreter; `tests/gpu`
runs them on a GPU."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F

from anyformer.kernels.fused_recurrence import recur_fused
from anyformer.kernels.linear_recurrence import Recurrence, recur
from tests.kernels.test_linear_recurrence import with_gradients

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the interpreter, about numpy
]
KINDS = ("none", "head", "delta", "ungated delta")


def inputs(kind: str, sizes: tuple[int, ...], resets: bool, dtype: torch.dtype = torch.float32) -> Recurrence:
    """Return random inputs; sizes are b, g, h, t, k and v."""
    b, g, h, t, k, v = sizes
    torch.manual_seed(sum(sizes))
    q, keys, values = (torch.randn(b, t, n, w).to(dtype).transpose(1, 2) for n, w in ((g, k), (g, k), (h, v)))
    log_decay, rate = -torch.rand(b, h, t), torch.rand(b, h, t)
    keys = F.normalize(keys.float(), dim=-1).to(dtype)
    runs = (torch.rand(b, t) < 0.05).long().cumsum(dim=1) if resets else None
    return Recurrence(
        q, keys, values, log_decay if kind in ("head", "delta") else None, rate if "delta" in kind else None, runs
    )


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 1, 2, 70, 16, 24), (1, 2, 2, 128, 20, 8), (1, 1, 1, 5, 3, 130)])
def test_kernels_equal_the_loop(kind: str, sizes: tuple[int, ...], resets: bool):
    x = inputs(kind, sizes, resets)
    state = torch.randn(sizes[0], sizes[2], sizes[4], sizes[5])
    expected, found = with_gradients(recur, x, state), with_gradients(recur_fused, x, state)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 2e-4 * max(1.0, float(other.detach().abs().max()))
