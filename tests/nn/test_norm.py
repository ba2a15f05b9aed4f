"""Norms by their formulae."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

from anyformer.config import LayerNorm, NoNorm, RMSNorm
from anyformer.nn.norm import build_norm
from tests.strategies import seeds

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
widths = st.integers(1, 9)
epsilons = st.sampled_from([1e-12, 1e-5, 0.1])


def filled(spec, width: int, seed: int):
    """The norm with random weights in float64."""
    norm = build_norm(spec, width).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return norm, generator


@given(shapes, widths, epsilons, st.booleans(), seeds)
def test_layer_norm(shape: tuple[int, ...], width: int, eps: float, bias: bool, seed: int):
    """(x - E[x]) / sqrt(Var[x] + eps) · γ + β, the variance biased, over the last axis."""
    norm, generator = filled(LayerNorm(eps=eps, bias=bias), width, seed)
    x = torch.randn(*shape, width, generator=generator, dtype=torch.float64) * 3 + 1
    centred = x - x.mean(-1, keepdim=True)
    formula = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    if bias:
        formula = formula + norm.bias
    assert sum(p.numel() for p in norm.parameters()) == width * (1 + bias)
    torch.testing.assert_close(norm(x), formula, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (width,), norm.weight, norm.bias, eps), rtol=1e-12, atol=1e-12)


@given(shapes, widths, epsilons, st.sampled_from([0.0, 1.0, -0.5]), st.booleans(), seeds)
def test_rms_norm(shape: tuple[int, ...], width: int, eps: float, offset: float, late: bool, seed: int):
    """x / sqrt(E[x²] + eps) · (offset + γ); where it casts is all the same in full precision."""
    cast = "after_scale" if late else "before_scale"
    norm, generator = filled(RMSNorm(eps=eps, offset=offset, cast=cast), width, seed)
    x = torch.randn(*shape, width, generator=generator, dtype=torch.float64) * 3 + 1
    formula = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + norm.weight)
    assert sum(p.numel() for p in norm.parameters()) == width
    torch.testing.assert_close(norm(x), formula, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (width,), offset + norm.weight, eps), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cast", ["before_scale", "after_scale"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_order_of_casting_in_low_precision(cast: str, offset: float):
    """bf16 in, bf16 out, fp32 between; the result returns to bf16 before γ, or after it."""
    norm = build_norm(RMSNorm(offset=offset, cast=cast), 64)
    norm.weight.data = torch.randn(64).to(torch.bfloat16)
    x = (torch.randn(32, 64) * 5).to(torch.bfloat16)
    wide = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gain = norm.weight + offset  # rounded to bf16, as it stands in the checkpoint
    orders = {"before_scale": wide.to(torch.bfloat16) * gain, "after_scale": (wide * gain.float()).to(torch.bfloat16)}
    assert not torch.equal(*orders.values())
    assert norm(x).dtype is torch.bfloat16
    torch.testing.assert_close(norm(x), orders[cast], rtol=0, atol=0)


def test_fp32_inside_keeps_large_values_finite():
    """Squares overflow fp16 from 256 on: the mean of squares is taken in fp32."""
    norm = build_norm(RMSNorm(), 8)
    norm.weight.data = torch.ones(8, dtype=torch.float16)
    assert torch.equal(norm(torch.full((1, 8), 3e4, dtype=torch.float16)), torch.ones(1, 8, dtype=torch.float16))


def test_none_is_the_identity():
    norm, x = build_norm(NoNorm(), 5), torch.randn(2, 3, 5)
    assert norm(x) is x
    assert not list(norm.parameters())
