"""Cost of mixers with a matrix state: linear attention, the gated delta rule, Mamba-2. Imports no torch.

FLOPs are those of the recurrence by its definition, 2·k·v for each matmul of a token with a state: one writes and one
reads, and the delta rule reads once more before. The chunked form, which trains, computes more, by a factor that does
not depend on the length.
"""

from dataclasses import replace
from typing import assert_never

from anyformer.config import ChannelDecay, GatedDelta, LinearAttention, Mamba2
from anyformer.inspection.cost import Cost, linear, norm_cost

CHUNK = 128  # tokens: the larger of those of `kernels/chunked_recurrence.py`
SUM_COLUMNS = 8  # of a state with a normalizer: as `nn/state_mixers/linear_attention.py` stores it


def state_mixer_cost(mixer: LinearAttention | GatedDelta | Mamba2, d: int, b: int, t: int, caching: bool) -> Cost:
    """Return the cost of reading t tokens in each of b rows; the input of the mixer is counted elsewhere."""
    match mixer:
        case LinearAttention():
            cost = _linear_attention(mixer, d, b, t)
        case GatedDelta():
            cost = _gated_delta(mixer, d, b, t)
        case Mamba2():
            cost = _mamba2(mixer, d, b, t)
        case _:
            assert_never(mixer)
    return cost if caching else replace(cost, cached=0, states=0)


def _linear_attention(spec: LinearAttention, d: int, b: int, t: int) -> Cost:
    h, (k, k_v), rows = spec.heads, spec.widths(d), b * t
    columns = k_v + SUM_COLUMNS * (spec.normalizer == "sum")
    cost = _again(d, h * (2 * k + k_v * (1 + spec.gate)), rows)
    if isinstance(spec.decay, ChannelDecay):
        cost += _again(d, spec.decay.rank, rows) + linear(spec.decay.rank, h * k, rows, bias=True)
        cost += Cost(saved=rows * h * k)
    if spec.convolution:
        cost += _convolution(h * (2 * k + k_v), spec.convolution, b, t)
    cost += Cost(saved=rows * h * (2 * k + columns + 2 * k_v * spec.gate)) + norm_cost(spec.norm, k_v, rows * h)
    return cost + _recurrence(h, k, columns, b, t, matmuls=2) + linear(h * k_v, d, rows, bias=False)


def _gated_delta(spec: GatedDelta, d: int, b: int, t: int) -> Cost:
    h, g, (k, k_v), rows = spec.heads, spec.groups, spec.widths(d), b * t
    channels = 2 * g * k + h * k_v
    cost = _again(d, channels + h * k_v, rows) + _again(d, 2 * h, rows)
    cost += _convolution(channels, spec.convolution, b, t) + Cost(2 * h, saved=2 * rows * h)
    cost += Cost(saved=rows * (channels + 2 * h * k_v)) + norm_cost(spec.norm, k_v, rows * h)
    return cost + _recurrence(h, k, k_v, b, t, matmuls=3) + linear(h * k_v, d, rows, bias=False)


def _mamba2(spec: Mamba2, d: int, b: int, t: int) -> Cost:
    h, n, inner, rows = spec.heads, spec.state, spec.inner_width(d), b * t
    channels = inner + 2 * spec.groups * n
    cost = _again(d, inner + channels + h, rows) + _convolution(channels, spec.convolution, b, t, bias=True)
    cost += Cost(3 * h, saved=rows * (2 * h + channels + 2 * inner)) + norm_cost(spec.norm, inner, rows)
    return cost + _recurrence(h, n, inner // h, b, t, matmuls=2) + linear(inner, d, rows, bias=False)


def _again(inputs: int, outputs: int, rows: int) -> Cost:
    """Return the cost of a linear layer whose input is saved already."""
    return replace(linear(inputs, outputs, rows, bias=False), saved=0)


def _convolution(channels: int, width: int, b: int, t: int, bias: bool = False) -> Cost:
    """Return the cost of a short convolution, elementwise: no FLOPs by the rule; its input, and that of SiLU."""
    return Cost(channels * (width + bias), saved=2 * b * t * channels, cached=b * (width - 1) * channels)


def _recurrence(h: int, k: int, v: int, b: int, t: int, matmuls: int) -> Cost:
    """Return the cost of a recurrence; saved are its outputs and the state before each chunk."""
    chunks = -(-t // CHUNK)
    return Cost(flops=2 * matmuls * b * t * h * k * v, saved=b * h * v * (t + chunks * k), states=b * h * k * v)
