"""Products of training in fp8 (Micikevicius et al. 2022): e4m3 in the forward pass, e5m2 for gradients.

    y = x Wᵀ      dx = dy W      dW = dyᵀ x

What is multiplied is first brought to the range of its type, x ≈ s · x₈ with s = max|x| / max of the type. One scale
for each row of a product's factors, so that the largest number of a batch rounds its own row only, and so that what
makes a row (a norm, an activation) can write it in fp8 in the same pass; dW, which would need another scale for each
column, stays in the precision that it came in. Sums are the hardware's fast ones: factors of 3 or 4 digits are coarser.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from anyformer.kernels.runtime import Runtime
from anyformer.nn.experts import SigmoidRouter, SoftmaxRouter
from anyformer.nn.linear import Fused, Linear
from anyformer.nn.lora import AdaptedFused, AdaptedLinear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEP = 16  # of sizes that the hardware multiplies
TINY = 1e-12  # below it numbers are as good as zero
CAPABLE = (8, 9)  # the first compute capability with such units


def narrow(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [m, k] in fp8, and the scale of each row, [m, 1]."""
    scale = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=TINY) / torch.finfo(dtype).max
    return (x.float() * scale.reciprocal()).to(dtype), scale


def multiply(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a [m, k] times b [n, k], each with its scales, and a bias [n], as [m, n]."""
    (x, by), (y, beside) = a, b
    if x.is_cuda:
        return torch._scaled_mm(x, y.t(), by, beside.t(), bias, out_dtype=dtype, use_fast_accum=True)
    z = (x.float() @ y.float().t()) * by * beside.t()
    return (z if bias is None else z + bias).to(dtype)


@torch.library.custom_op("anyformer::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """xᵀ as a matrix of its own. The compiler does not see how: by itself it would store fp8 across rows, byte by byte,
    which Triton gets wrong at times (triton-lang/triton#11111)."""
    return x.t().contiguous()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])


class Product(torch.autograd.Function):
    """x [m, k] times weight [n, k], and a bias [n], as [m, n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return multiply(narrow(x, E4M3), narrow(weight, E4M3), x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = multiply(narrow(dy.contiguous(), E5M2), narrow(turned(weight), E4M3), x.dtype)
        return dx, dy.t() @ x, dy.sum(0) if ctx.biased else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `F.linear`, in the precision of autocast where that is on."""
    at = Runtime.of(x, training=True)
    with torch.autocast(at.device, enabled=False):
        given = x.to(at.dtype).flatten(0, -2), weight.to(at.dtype), None if bias is None else bias.to(at.dtype)
        return cast(Tensor, Product.apply(*given)).unflatten(0, x.shape[:-1])


class Float8Linear(Linear):
    """A linear layer that learns by products in fp8; outside training it is as any other."""

    def __init__(self, plain: nn.Linear):
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) if self.training else super().forward(x)


class Float8Fused(Fused):
    """Several linear maps of one input in one such product."""

    def __init__(self, plain: Fused):
        with torch.device("meta"):
            super().__init__(plain.in_features, plain.parts, bias=plain.bias is not None)
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        y = linear(x, self.weight, self.bias) if self.training else Linear.forward(self, x)
        return y.split(self.parts, dim=-1)


def learn_in_fp8(stacks: nn.Module) -> list[str]:
    """Replace all linear layers whose sizes are multiples of 16 by fp8 ones, and return their names.

    Routers stay, because they choose by small differences, and so do layers with an adapter: see `unconverted`.
    """
    modules = dict(stacks.named_modules())
    routers = {id(m.linear) for m in modules.values() if isinstance(m, (SoftmaxRouter, SigmoidRouter))}
    found = []
    for name, module in modules.items():
        if type(module) not in (Linear, Fused) or id(module) in routers:
            continue
        assert isinstance(module, nn.Linear)
        if module.in_features % STEP or module.out_features % STEP:
            continue
        stacks.set_submodule(name, Float8Fused(module) if isinstance(module, Fused) else Float8Linear(module))
        found.append(name)
    return found


def unconverted(stacks: nn.Module) -> dict[str, int]:
    """Count the linear layers that `learn_in_fp8` left, by reason; routers and stacked experts are not counted."""
    modules = list(stacks.modules())
    found = {
        "with an adapter": sum(isinstance(module, (AdaptedLinear, AdaptedFused)) for module in modules),
        f"with a size that is not a multiple of {STEP}": sum(type(module) in (Linear, Fused) for module in modules),
    }
    return {why: count for why, count in found.items() if count}


def able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABLE
