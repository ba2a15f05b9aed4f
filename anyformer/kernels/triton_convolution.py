"""Triton kernels of the short causal convolution with SiLU after it, of each channel over a few tokens."""

import triton
import triton.language as tl


@triton.jit
def read_shifted(x, runs, b, token, channel, shift: tl.constexpr, t, channels, stride_b, stride_t, RUNS: tl.constexpr):
    """Load the tokens that are `shift` places earlier, 0 outside the row and in another run."""
    source = token - shift
    there = (source >= 0) & (source < t) & (token < t)
    if RUNS:
        own = tl.load(runs + b * t + token, mask=there, other=0)
        there = there & (tl.load(runs + b * t + source, mask=there, other=0) == own)
    at = b * stride_b + source.to(tl.int64)[:, None] * stride_t + channel[None]
    return tl.load(x + at, mask=there[:, None] & (channel < channels)[None], other=0.0).to(tl.float32)


@triton.jit
def read_weight(weight, channel, tap: tl.constexpr, channels, WIDTH: tl.constexpr):
    return tl.load(weight + channel * WIDTH + tap, mask=channel < channels, other=0.0).to(tl.float32)[None]


@triton.jit
def sum_taps(
    x, weight, bias, runs, b, token, channel, t, channels, stride_b, stride_t,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, RUNS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return the convolution [T, C] before the activation."""
    total = tl.zeros([T, C], tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None]
    for tap in tl.static_range(WIDTH):
        shifted = read_shifted(x, runs, b, token, channel, WIDTH - 1 - tap, t, channels, stride_b, stride_t, RUNS)
        total += shifted * read_weight(weight, channel, tap, channels, WIDTH)
    return total


@triton.jit
def convolve(
    x, weight, bias, runs, out, t, channels, stride_b, stride_t,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, RUNS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    token, channel = tl.program_id(1) * T + tl.arange(0, T), tl.program_id(0) * C + tl.arange(0, C)
    y = sum_taps(x, weight, bias, runs, b, token, channel, t, channels, stride_b, stride_t, WIDTH, BIASED, RUNS, T, C)
    y = y * tl.sigmoid(y)
    at = (b * t + token)[:, None] * channels + channel[None]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=(token < t)[:, None] & (channel < channels)[None])


@triton.jit
def weight_gradients(
    x, weight, bias, runs, d_out, d_sum, partial, t, channels, stride_b, stride_t,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, RUNS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the gradient before the activation, and its sums with each shifted input over T tokens; last the bias."""
    b = tl.program_id(2).to(tl.int64)
    token, channel = tl.program_id(1) * T + tl.arange(0, T), tl.program_id(0) * C + tl.arange(0, C)
    y = sum_taps(x, weight, bias, runs, b, token, channel, t, channels, stride_b, stride_t, WIDTH, BIASED, RUNS, T, C)
    at = (b * t + token)[:, None] * channels + channel[None]
    there = (token < t)[:, None] & (channel < channels)[None]
    share = tl.sigmoid(y)
    d = tl.load(d_out + at, mask=there, other=0.0).to(tl.float32) * share * (1 + y * (1 - share))
    tl.store(d_sum + at, d.to(d_sum.dtype.element_ty), mask=there)
    block = (b * tl.num_programs(1) + tl.program_id(1)) * (WIDTH + 1)
    for tap in tl.static_range(WIDTH):
        shifted = read_shifted(x, runs, b, token, channel, WIDTH - 1 - tap, t, channels, stride_b, stride_t, RUNS)
        tl.store(partial + (block + tap) * channels + channel, tl.sum(d * shifted, 0), mask=channel < channels)
    tl.store(partial + (block + WIDTH) * channels + channel, tl.sum(d, 0), mask=channel < channels)


@triton.jit
def input_gradients(
    d_sum, weight, runs, d_x, t, channels,
    WIDTH: tl.constexpr, RUNS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the inputs: the convolution in the other direction."""
    b = tl.program_id(2).to(tl.int64)
    token, channel = tl.program_id(1) * T + tl.arange(0, T), tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([T, C], tl.float32)
    for tap in tl.static_range(WIDTH):
        later = read_shifted(d_sum, runs, b, token, channel, tap + 1 - WIDTH, t, channels, t * channels, channels, RUNS)
        total += later * read_weight(weight, channel, tap, channels, WIDTH)
    at = (b * t + token)[:, None] * channels + channel[None]
    tl.store(d_x + at, total.to(d_x.dtype.element_ty), mask=(token < t)[:, None] & (channel < channels)[None])
