"""GELU: torch's own values and slopes, however it is run."""

import pytest
import torch
from torch.nn import functional as F

from anyformer.kernels.gelu import Approximate, _Quick, gelu

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_quick_steps_give_the_same(approximate: Approximate, dtype: torch.dtype) -> None:
    """To what the type can tell."""
    x = WIDE.to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    grad = torch.randn(len(WIDE), generator=torch.Generator().manual_seed(0)).to(dtype)
    out, wanted = _Quick.apply(x, approximate), F.gelu(exact, approximate=approximate)
    (slope,), (right,) = torch.autograd.grad(out, x, grad), torch.autograd.grad(wanted, exact, grad.double())
    unit = torch.finfo(dtype).eps
    assert out.dtype == slope.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=unit, atol=2e-6)
    torch.testing.assert_close(slope.double(), right, rtol=2 * unit, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's compiler does
def test_quick_steps_compile() -> None:
    x = torch.randn(3, 5, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda y: _Quick.apply(y, "none"), backend="aot_eager", fullgraph=True)
    (one,), (other,) = (torch.autograd.grad(act(x).sum(), x) for act in (compiled, F.gelu))
    torch.testing.assert_close(one, other)
