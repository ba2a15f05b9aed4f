"""Rotary positions and their scalings by their formulae."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.config import LinearScaling, Llama3Scaling, LongRopeScaling, NTKScaling, Rotary, YarnScaling
from anyformer.config.position import RotaryScheme
from tests.nn.positions import random, turn
from tests.strategies import close, seeds

scalings = st.sampled_from(
    [
        {},
        {"fraction": 0.5},
        {"scaling": LinearScaling(factor=3.0)},
        {"scaling": NTKScaling(factor=3.0)},
        {"scaling": YarnScaling(factor=4.0, original_length=16)},
        {"scaling": Llama3Scaling(factor=4.0, original_length=16)},
        {"scaling": LongRopeScaling(factors=(1.0, 1.5, 2.0, 3.0), attention_factor=1.25)},
    ]
)


@given(seeds, st.sampled_from([4, 8, 12]), st.sampled_from([1.0, 0.5]), st.integers(0, 300))
def test_rotary(seed: int, width: int, fraction: float, place: int):
    """Pair (x_i, x_{i + r/2}) as a complex number times exp(i · p · theta^(-2i/r)); past r nothing turns."""
    scheme, x = Rotary(theta=100.0, fraction=fraction), random(seed, 1, 2, 1, width)
    turning = int(width * fraction)
    half = turning // 2
    out = turn(scheme, x, [place])
    assert torch.equal(out[..., turning:], x[..., turning:])
    for i in range(half):
        pair = torch.complex(x[..., i], x[..., i + half])
        turned = pair * torch.polar(torch.ones(1).double(), torch.tensor(place * 100.0 ** (-2 * i / turning)).double())
        close(out[..., i], turned.real, 1e-4)
        close(out[..., i + half], turned.imag, 1e-4)


@given(seeds, scalings, st.integers(0, 60), st.integers(0, 60), st.integers(0, 200))
def test_rotary_scores_depend_on_the_distance_alone(seed: int, options: dict, m: int, n: int, shift: int):
    scheme, q, k = Rotary(theta=100.0, **options), random(seed, 1, 1, 1, 8), random(seed + 1, 1, 1, 1, 8)

    def score(m: int, n: int) -> Tensor:
        return (turn(scheme, q, [m]) * turn(scheme, k, [n])).sum()

    close(score(m, n), score(m + shift, n + shift), 3e-4)
    if m != n:
        assert abs(float(score(m, n) - score(m, m))) > 1e-6  # and it does depend on it


@given(seeds, scalings, st.integers(0, 1000))
def test_rotary_keeps_lengths(seed: int, options: dict, place: int):
    """A rotation, except for the factor of queries and keys: YaRN's is 0.1 ln(factor) + 1, LongRoPE's a field."""
    scheme, x = Rotary(**options), random(seed, 1, 2, 3, 8)
    temper = 0.1 * math.log(4.0) + 1 if isinstance(scheme.scaling, YarnScaling) else 1.0
    temper = scheme.scaling.attention_factor if isinstance(scheme.scaling, LongRopeScaling) else temper
    close(turn(scheme, x, [place] * 3).norm(dim=-1), temper * x.norm(dim=-1), 1e-6)
    close(turn(scheme, x, [0] * 3), temper * x, 1e-6)


def test_rotary_angles_far_out():
    """fp32 angles are good to a hundredth of a turn at position 100,000; in bf16 input they do not degrade."""
    scheme, places = Rotary(), torch.tensor([[100_000, 100_001]])
    rotation = scheme.prepare(places, 64)
    assert rotation.cos.dtype is torch.float32
    exact = places.double()[..., None] * 10_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert (rotation.cos[:, 0, :, 32:] - exact.cos()).abs().max() < 0.02
    assert (rotation.sin[:, 0, :, 32:] - exact.sin()).abs().max() < 0.02
    x = random(0, 1, 2, 2, 64).to(torch.bfloat16)
    low, high = scheme.rotate(x, rotation), scheme.rotate(x.double(), rotation)
    assert low.dtype is torch.bfloat16
    torch.testing.assert_close(low.double(), high, rtol=2**-8, atol=1e-6)  # one rounding, at the end


def angles(scheme: Rotary, place: int, width: int) -> Tensor:
    """Of each pair at a position small enough for no wave to have turned half."""
    rotation = scheme.prepare(torch.tensor([[place]]), width)
    return torch.atan2(rotation.sin, rotation.cos)[..., width // 2 :].flatten().double()


def test_linear_scaling_divides_positions():
    close(angles(Rotary(scaling=LinearScaling(factor=3.0)), 3, 16), angles(Rotary(), 1, 16), 1e-6)


def test_ntk_scaling_keeps_the_fastest_wave_and_stretches_the_slowest_by_the_factor():
    ratio = angles(Rotary(), 1, 16) / angles(Rotary(scaling=NTKScaling(factor=3.0)), 1, 16)
    assert float(ratio[0]) == pytest.approx(1.0, rel=1e-5)
    assert float(ratio[-1]) == pytest.approx(3.0, rel=1e-5)
    assert (ratio.diff() > 0).all()


@pytest.mark.parametrize("kind", [YarnScaling, Llama3Scaling])
def test_ramps_keep_fast_waves_and_stretch_slow_ones(kind):
    """Waves that turn often in the original context stay, those that hardly turn are stretched, none is outside."""
    scaled = Rotary(scaling=kind(factor=4.0, original_length=1024))
    plain, ratio = angles(Rotary(), 1, 64), angles(Rotary(), 1, 64) / angles(scaled, 1, 64)
    turns = 1024 * plain / (2 * math.pi)
    close(ratio[turns > 40], torch.ones_like(ratio[turns > 40]), 1e-5)
    close(ratio[turns < 0.5], torch.full_like(ratio[turns < 0.5], 4.0), 1e-5)
    assert (ratio.diff() > -1e-5).all()
    assert ((ratio > 1.01) & (ratio < 3.99)).any()  # there is a ramp


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(factor=1.0),
        NTKScaling(factor=1.0),
        YarnScaling(factor=1.0, original_length=64),
        Llama3Scaling(factor=1.0, original_length=64),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_a_factor_of_one_scales_nothing(scaling):
    close(
        turn(Rotary(scaling=scaling), random(0, 1, 1, 3, 8), [3, 50, 7]),
        turn(Rotary(), random(0, 1, 1, 3, 8), [3, 50, 7]),
        1e-4,
    )


@given(scalings, st.sampled_from([(1, 1), (2, 5)]))
def test_a_further_token_computes_no_frequencies(options: dict, shape: tuple[int, int]):
    """They are stored on a CPU, with equal bits, and a table of one is for no other scheme or width."""
    scheme, positions = Rotary(theta=77.0, **options), torch.randint(0, 50, shape)
    with torch.inference_mode():
        first = scheme.prepare(positions, 8)
    with mock.patch.object(RotaryScheme, "frequencies", side_effect=AssertionError):
        again = scheme.prepare(positions, 8)
    frequencies, temper = scheme.frequencies(scheme.rotated(8), positions.device)
    angles = positions[:, None, :, None] * frequencies
    assert torch.equal(again.cos, torch.cat((angles, angles), dim=-1).cos() * temper)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    x = torch.randn(shape[0], 2, shape[1], 8, requires_grad=True)
    scheme.rotate(x, again).sum().backward()  # what was stored in inference mode serves training
    if not options:
        assert not torch.equal(Rotary(theta=7.0).prepare(positions + 1, 8).cos, scheme.prepare(positions + 1, 8).cos)
        assert scheme.prepare(positions, 4).cos.shape[-1] == 4
