"""Norms and gates by one kernel equal torch's several, whatever the shape, and a row does not depend on others."""

import pytest
import torch
from torch.nn import functional as F

from anyformer.kernels.elementwise import can_gate, can_norm, rms_norm, silu_gate

SHAPES = [(1, 1, 64), (3, 5, 96), (2, 700, 768), (8, 1024, 2048), (1, 3, 8192), (7, 16384)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_norm(shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(*shape)).to("cuda", dtype), torch.randn(shape[-1]).to("cuda", dtype)
    assert can_norm(x, weight)
    found = rms_norm(x, weight, 1e-5)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    sums = 16 if dtype is torch.float32 else 3  # sums and roots of fp32 round too
    torch.testing.assert_close(found.double(), exact, atol=1e-7, rtol=sums * torch.finfo(dtype).eps)
    rows = x.flatten(0, -2)
    assert torch.equal(rms_norm(rows[-1:].contiguous(), weight, 1e-5), found.flatten(0, -2)[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_gate(shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    both = (3 * torch.randn(*shape[:-1], 2 * shape[-1])).to("cuda", dtype)
    gate, up = both.chunk(2, dim=-1)
    assert can_gate(gate, up)
    found = silu_gate(gate, up)
    exact = F.silu(gate.double()) * up.double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, atol=1e-7, rtol=(3 if dtype is torch.bfloat16 else 16) * eps)
    rows = both.flatten(0, -2)[-1:]
    assert torch.equal(silu_gate(*rows.chunk(2, dim=-1)), found.flatten(0, -2)[-1:])
