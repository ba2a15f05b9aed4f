"""Products in fp8 by the hardware: as the reference has them."""

import pytest
import torch
from torch import Tensor

from anyformer.nn import fp8

CUDA = torch.device("cuda")


@pytest.mark.skipif(not (torch.cuda.is_available() and fp8.able(CUDA)), reason="a GPU without units for fp8")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [48, 100])
def test_the_hardware_multiplies_as_the_reference(rows: int, biased: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    x, weight, dy = torch.randn(rows, 64), torch.randn(128, 64), torch.randn(rows, 128)
    given = x, weight, *((torch.randn(128),) if biased else ())
    linear = torch.compile(fp8.linear) if compiled else fp8.linear

    def run(device: str) -> list[Tensor]:
        mine = [a.to(device, torch.bfloat16).requires_grad_() for a in given]
        y = (linear if device == "cuda" else fp8.linear)(*(mine if biased else [*mine, None]))
        slopes = torch.autograd.grad(y, mine, dy.to(device, torch.bfloat16))
        return [a.detach().float().cpu() for a in (y, *slopes)]

    for found, due in zip(run("cuda"), run("cpu"), strict=True):
        assert (found - due).norm() < 0.02 * due.norm()
