"""Norms: over the last axis, each feature over a batch, or a squashing function in their place."""

import torch
from torch import Tensor, nn

from anyformer.attention.layout import Layout, real
from anyformer.config import HeadNormOver, TokenNorm
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.aux_outputs import AuxOutputs, TrackedModule, identity


class RootMeanSquare(nn.Module):
    """x / sqrt(E[x²] + eps) · (offset + γ), computed in fp32 (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float, offset: float, cast_first: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.offset, self.cast_first = eps, offset, cast_first

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.promote_types(x.dtype, torch.float32))  # [..., d]
        mean = y.square().sum(-1, keepdim=True) * (1 / y.shape[-1])  # `mean` itself takes three times as long on a CPU
        y = y * torch.rsqrt(mean + self.eps)
        # in low precision the two orders round differently, and public families differ
        weight = self.weight + self.offset if self.offset else self.weight
        return y.to(x.dtype) * weight if self.cast_first else (y * weight).to(x.dtype)

    def reset(self) -> None:
        nn.init.constant_(self.weight, 1 - self.offset)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}"


class ScaledTanh(nn.Module):
    """tanh(α x) · γ + β with one learned α (Zhu et al. 2025)."""

    def __init__(self, width: int, start: float):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))  # not a scalar, which FSDP2 cannot shard
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, torch.tanh(self.alpha * x), self.weight)

    def reset(self) -> None:
        nn.init.constant_(self.alpha, self.start)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, alpha={self.start}"


class HeadNorm(nn.Module):
    """A norm of each head's vector, centred or not, with separate γ and β for every head; computed in fp32."""

    def __init__(
        self, heads: int, width: int, eps: float, *, centred: bool, bias: bool, offset: float, cast_first: bool
    ):
        super().__init__()
        self.heads, self.eps, self.centred, self.offset, self.cast_first = heads, eps, centred, offset, cast_first
        self.weight = nn.Parameter(torch.empty(heads * width))
        self.bias = nn.Parameter(torch.empty(heads * width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = at_least_fp32(x)  # [b, h, t, k]
        if self.centred:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        weight = (self.weight + self.offset).unflatten(0, (self.heads, 1, -1))
        if self.cast_first:
            return y.to(x.dtype) * weight
        y = y * at_least_fp32(weight)
        return (y if self.bias is None else y + self.bias.unflatten(0, (self.heads, 1, -1))).to(x.dtype)

    def reset(self) -> None:
        nn.init.constant_(self.weight, 1 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.heads} heads, {self.weight.shape[0]}, eps={self.eps}"


class OverBatch(TrackedModule):
    """(x - E[x]) / sqrt(Var[x] + eps) · γ + β over the real tokens of a batch (Ioffe & Szegedy 2015).

    Training uses the statistics of this batch, on all processes together; evaluation uses the running ones. A step of
    several micro-batches normalises each by its own statistics, and updates the running ones once, by the mean and the
    unbiased variance of all its tokens: as a step of one merged batch does, with the same momentum.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int, eps: float, momentum: float):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.register_buffer("mean", torch.empty(width))
        self.register_buffer("variance", torch.empty(width))
        self.eps, self.momentum = eps, momentum

    def forward(self, x: Tensor, segments: Tensor | None, aux: AuxOutputs | None) -> Tensor:
        y = at_least_fp32(x)
        mean, variance = self._seen(y, segments, aux) if self.training else (self.mean, self.variance)  # [d]
        return ((y - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias).to(x.dtype)

    def _seen(self, y: Tensor, segments: Tensor | None, aux: AuxOutputs | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance over the real tokens; 0 for a batch without any."""
        is_real = y.new_ones(y.shape[:2]) > 0 if segments is None else real(segments).expand(y.shape[:2])
        is_real = is_real[..., None]
        reduce = identity if aux is None else aux.reduce
        count = reduce(is_real.sum().to(y.dtype))
        mean = reduce(y.where(is_real, 0).sum(dim=(0, 1))) / count.clamp(min=1)
        squares = reduce((y - mean).where(is_real, 0).square().sum(dim=(0, 1)))  # of deviations: no cancellation
        if aux is not None:
            unbiased = squares / (count - 1).clamp(min=1)
            aux.add(self, torch.cat((count * mean, count * unbiased, count[None])).detach())
        return mean, squares / count.clamp(min=1)

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """Combine moments by Chan et al. (1983): n₁ n₂ / n · (m₁ - m₂)² is the part between the batches."""
        (mean, variance), (mean2, variance2) = (self._moments(seen) for seen in (one, other))
        n, n2, count = one[-1], other[-1], one[-1] + other[-1]
        squares = variance * (n - 1).clamp(min=0) + variance2 * (n2 - 1).clamp(min=0)
        squares = squares + n * n2 / count.clamp(min=1) * (mean - mean2).square()
        total, unbiased = n * mean + n2 * mean2, squares / (count - 1).clamp(min=1)
        return torch.cat((total, count * unbiased, count[None]))

    def _moments(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and unbiased variance."""
        mean, variance = (seen[:-1] / seen[-1].clamp(min=1)).split(len(self.mean))
        return mean, variance

    def update_buffers(self, statistics: Tensor) -> None:
        width, count = len(self.mean), statistics[-1]
        rate = self.momentum * (count > 0).to(count.dtype)
        mean, variance = (statistics[:-1] / count.clamp(min=1)).to(self.mean.dtype).split(width)
        self.mean.lerp_(mean, rate)
        self.variance.lerp_(variance, rate)

    def reset(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        self.mean.zero_()
        self.variance.fill_(1)

    def extra_repr(self) -> str:
        return f"{len(self.mean)}, eps={self.eps}, momentum={self.momentum}"


def normed(norm: nn.Module, x: Tensor, layout: Layout, aux: AuxOutputs | None = None) -> Tensor:
    """Apply any norm to the tokens [b, t, d] of a layout."""
    if isinstance(norm, nn.Identity):
        return x  # not called: decode steps of small models are bound by call overhead
    return norm(x, layout.segments, aux) if isinstance(norm, OverBatch) else norm(x)


def build_head_norm(spec: TokenNorm, over: HeadNormOver, heads: int, width: int) -> nn.Module:
    """Return the module of a norm of queries or keys, of heads of this width."""
    if over == "head" or spec.is_none:
        return spec.build(width)
    return spec.build(heads * width) if over == "projection" else spec.build_each(heads, width)
