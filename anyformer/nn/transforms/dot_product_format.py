"""Weights of 8 or 4 bits for CPUs with dot products, multiplied by `kernels/dot_product.py`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels import dot_product
from anyformer.nn.linear import WeightFormat
from anyformer.nn.transforms.rounding import Bits, Rounded


def is_supported(weight: Tensor, bits: Bits) -> bool:
    """Return whether the kernel runs here and takes such weights."""
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and dot_product.is_available(bits)


class DotProductFormat(WeightFormat):
    """Weights, scales and bias as the kernel reads them; each token is rounded to 8 bits."""

    packed: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, rounded: Rounded, bias: Tensor | None):
        super().__init__()
        self.bits, self.out, self.width = rounded.bits, rounded.q.shape[0], rounded.width
        more = (0, -self.out % dot_product.BLOCK)
        scale = F.pad(rounded.scale[:, 0].float(), more) if self.bits == 8 else dot_product.pack_scale(rounded.scale)
        self.register_buffer("packed", dot_product.pack(rounded.q.flatten(1), self.bits))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else F.pad(bias.float(), more))

    def matmul(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, self.width).float()
        y: Tensor = dot_product.dot_product_linear(rows, self.packed, self.scale, self.bias)
        y = y if y.shape[1] == self.out else y[:, : self.out]
        return y.reshape(*x.shape[:-1], self.out).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.out} x {self.width}, bits={self.bits}"
