"""GELU: torch's own values and slopes, however it is run."""

import pytest
import torch
from torch.nn import functional as F

from anyformer.nn.gelu import Approximate, gelu

WIDE = torch.cat((torch.linspace(-40, 40, 2001), torch.tensor([0.0, -0.0, 1e-30, 1e4, -1e4])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_values_and_slopes_are_those_of_torch(approximate: Approximate, dtype: torch.dtype) -> None:
    ours, theirs = (WIDE.to(dtype).clone().requires_grad_() for _ in range(2))
    out, exact = gelu(ours, approximate), F.gelu(theirs, approximate=approximate)
    assert out.equal(exact)
    grad = torch.randn_like(exact)
    out.backward(grad)
    exact.backward(grad)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_its_slope_has_a_slope() -> None:
    x = torch.randn(9, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(gelu, x)
    assert torch.autograd.gradgradcheck(gelu, x)


def test_it_compiles_and_maps() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    compiled = torch.compile(gelu, backend="aot_eager", fullgraph=True)
    (one,), (other,) = (torch.autograd.grad(act(x).sum(), x) for act in (compiled, F.gelu))
    torch.testing.assert_close(one, other)
    slopes = torch.func.vmap(torch.func.grad(lambda row: gelu(row).sum()))(x.detach())
    torch.testing.assert_close(slopes, other)
