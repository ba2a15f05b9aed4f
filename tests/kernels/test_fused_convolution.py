"""The kernels of a short convolution equal the module, gradients included, in Triton's interpreter; `tests/gpu` runs
them on a GPU."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.fused_convolution import fused_convolution
from anyformer.nn.state_mixers.short_convolution import ShortConvolution

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


def both(width: int, bias: bool, resets: bool, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and gradients of the kernels and of the module, for a slice of a wider tensor."""
    torch.manual_seed(width)
    module = ShortConvolution(140, width, bias)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    whole = torch.randn(2, 45, 150).to(dtype).requires_grad_()
    runs = (torch.rand(2, 45) < 0.1).long().cumsum(dim=1) if resets else None
    slopes = torch.randn(2, 45, 140).to(dtype)
    x, tail = whole[:, :, :140], width - 1
    padded = None if runs is None else F.pad(runs, (tail, 0), value=-1)
    outputs = fused_convolution(x, module.weight, module.bias, runs), module(F.pad(x, (0, 0, tail, 0)), padded)
    found = [[y, *torch.autograd.grad(y, [whole, *module.parameters()], slopes)] for y in outputs]
    return found[0], found[1]


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the interpreter, about numpy
@pytest.mark.parametrize(("width", "bias", "resets"), [(1, False, False), (4, True, True), (3, False, True)])
def test_kernels_equal_the_module(width: int, bias: bool, resets: bool):
    for ours, theirs in zip(*both(width, bias, resets, torch.float32), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
