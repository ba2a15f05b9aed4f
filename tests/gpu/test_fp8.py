"""Products in fp8 by the hardware: as the reference has them."""

import pytest
import torch
from torch import Tensor

from anyformer.transforms import fp8

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
