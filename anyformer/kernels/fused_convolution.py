"""Short causal convolution with SiLU after it, by one Triton kernel forward and two backward, for eager steps on a GPU.

    y_t = silu(Σ_j w_j x_{t-j} + b), j < width, over the tokens of one run

The reference is `nn/state_mixers/short_convolution.py`: one pass over memory for each j, and several for its gradient.
The compiler fuses that form, so compiled steps keep it.
"""

from typing import Any

import torch
from torch import Tensor

from anyformer.kernels.private import functorch_is_active
from anyformer.kernels.runtime import HAS_TRITON

TOKENS, CHANNELS = 32, 128  # of a program


def can_fuse_convolution(x: Tensor) -> bool:
    """Return whether `fused_convolution` runs here: bf16 on a GPU, outside of the compiler."""
    usual = HAS_TRITON and x.is_cuda and x.dtype is torch.bfloat16
    return usual and not torch.compiler.is_compiling() and not functorch_is_active()


def fused_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, runs: Tensor | None) -> Tensor:
    """Return the convolution of x [b, t, c] by weight [c, width] and bias [c]; runs [b, t] separate texts."""
    x = x if x.stride(2) == 1 else x.contiguous()
    found: Tensor = _Convolution.apply(x, weight, bias, None if runs is None else runs.int().contiguous())
    return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, runs: Tensor | None) -> Tensor:
        from anyformer.kernels.triton_convolution import convolve

        out = x.new_empty(x.shape)
        grid, flags = _launch(x, weight, runs)
        spare = weight if bias is None else bias  # a tensor in the place of one that is not there
        convolve[grid](
            x, weight, spare, weight if runs is None else runs, out, x.shape[1], x.shape[2], *x.stride()[:2],
            **flags, BIASED=bias is not None,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, runs)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        from anyformer.kernels.triton_convolution import input_gradients, weight_gradients

        x, weight, bias, runs = ctx.saved_tensors
        (b, t, channels), width = x.shape, weight.shape[1]
        d_sum, d_x = x.new_empty(x.shape), x.new_empty(x.shape)
        grid, flags = _launch(x, weight, runs)
        partial = x.new_empty(b * grid[1], width + 1, channels, dtype=torch.float32)
        spare, segments = weight if bias is None else bias, weight if runs is None else runs
        weight_gradients[grid](
            x, weight, spare, segments, d_out.contiguous(), d_sum, partial, t, channels, *x.stride()[:2],
            **flags, BIASED=bias is not None,
        )  # fmt: skip
        input_gradients[grid](d_sum, weight, segments, d_x, t, channels, **flags)
        sums = partial.sum(dim=0)
        d_weight = sums[:width].T.to(weight.dtype)
        return d_x, d_weight, None if bias is None else sums[width].to(bias.dtype), None


def _launch(x: Tensor, weight: Tensor, runs: Tensor | None) -> tuple[tuple[int, int, int], dict[str, Any]]:
    b, t, channels = x.shape
    flags = {"WIDTH": weight.shape[1], "RUNS": runs is not None, "T": TOKENS, "C": CHANNELS}
    return (-(-channels // CHANNELS), -(-t // TOKENS), b), flags
