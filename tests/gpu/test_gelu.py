"""GELU as a GPU's compiled kernels have it: torch's values and slopes, to what half precision can tell."""

import pytest
import torch
from torch.nn import functional as F

from anyformer.kernels.gelu import Approximate, gelu


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled_values_and_slopes(dtype: torch.dtype, approximate: Approximate) -> None:
    torch.compiler.reset()
    x = torch.linspace(-20, 20, 1 << 16, device="cuda").to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    grad = torch.randn(len(x), device="cuda").to(dtype)
    out = torch.compile(gelu, fullgraph=True)(x, approximate)
    wanted = F.gelu(exact, approximate=approximate)
    (slope,), (right,) = torch.autograd.grad(out, x, grad), torch.autograd.grad(wanted, exact, grad.double())
    unit = max(torch.finfo(dtype).eps, 2e-6)
    torch.testing.assert_close(out.double(), wanted, rtol=unit, atol=2e-6)
    torch.testing.assert_close(slope.double(), right, rtol=2 * unit, atol=1e-5)
