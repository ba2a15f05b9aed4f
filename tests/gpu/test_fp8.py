"""Products in fp8 by the hardware: as the reference has them."""

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from anyformer.kernels.fp8 import E4M3, E5M2, launch, reference, to_fp8
from anyformer.kernels.private import choice_options, long_row_choices
from anyformer.nn.transforms import fp8

CUDA = torch.device("cuda")


@pytest.mark.skipif(not (torch.cuda.is_available() and fp8.is_supported(CUDA)), reason="a GPU without units for fp8")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(48, 64, 128), (100, 64, 128), (512, 2048, 8192), (512, 8192, 2048)])
def test_the_hardware_multiplies_as_the_reference(rows: int, k: int, n: int, biased: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    x, weight, dy = torch.randn(rows, k), torch.randn(n, k), torch.randn(rows, n)
    given = x, weight, *((torch.randn(n),) if biased else ())
    linear = torch.compile(fp8.linear) if compiled else fp8.linear

    def run(device: str) -> list[Tensor]:
        mine = [a.to(device, torch.bfloat16).requires_grad_() for a in given]
        y = (linear if device == "cuda" else fp8.linear)(*(mine if biased else [*mine, None]))
        slopes = torch.autograd.grad(y, mine, dy.to(device, torch.bfloat16))
        return [a.detach().float().cpu() for a in (y, *slopes)]

    for found, due in zip(run("cuda"), run("cpu"), strict=True):
        assert (found - due).norm() < 0.02 * due.norm()


@pytest.mark.skipif(not (torch.cuda.is_available() and fp8.is_supported(CUDA)), reason="a GPU without units for fp8")
@pytest.mark.parametrize("width", [1000, 3072, 8192])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_long_rows_are_cast_in_one_pass(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    x = (torch.randn(300, width) * torch.rand(300, 1)).to(CUDA, torch.bfloat16)
    cast = torch.compile(lambda x: to_fp8(2 * x, dtype), options=choice_options(long_row_choices))
    (found, scale), (code,) = run_and_get_code(cast, x)
    due, due_scale = to_fp8(2 * x, dtype)
    assert "triton_red_" not in code
    torch.testing.assert_close(scale, due_scale)
    assert ((found.float() - due.float()).abs() <= due.float().abs() / 8).all()  # at most one unit in the last place
    assert (found.view(torch.uint8) == due.view(torch.uint8)).float().mean() > 0.999


@pytest.mark.skipif(not (torch.cuda.is_available() and fp8.is_supported(CUDA)), reason="a GPU without units for fp8")
@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("columns", [64, 1000, 3072, 4096, 8192])
def test_gradients_of_activations_are_cast_and_summed_in_one_pass(columns: int, act: str) -> None:
    torch.manual_seed(0)
    slope, made = (torch.randn(200, columns, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    dy, narrow, scales, sums = launch(slope, made, act)
    due, due_narrow, due_scales, due_sums = reference(slope, made, act)
    torch.testing.assert_close(dy, due, atol=1e-5, rtol=0.01)
    torch.testing.assert_close(scales, due_scales, atol=0, rtol=0.01)
    torch.testing.assert_close(sums, due_sums, atol=1e-3, rtol=1e-3)
    assert (narrow.float() * scales - due_narrow.float() * due_scales).norm() < 0.05 * due.float().norm()
