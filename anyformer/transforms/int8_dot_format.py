"""Weights of 8 bits for CPUs with dot products, multiplied by `kernels/int8_dot.py`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels import int8_dot
from anyformer.nn.linear import WeightFormat
from anyformer.transforms.rounding import Rounded


def is_supported(weight: Tensor) -> bool:
    """Whether the kernel runs here and the weight is one that it takes."""
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and int8_dot.is_available()


class Int8DotFormat(WeightFormat):
    """Weights, scales and bias as the kernel reads them; each token is rounded to 8 bits."""

    packed: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, rounded: Rounded, bias: Tensor | None):
        super().__init__()
        assert rounded.bits == 8
        self.out, self.width = rounded.q.shape[0], rounded.width
        more = (0, -self.out % int8_dot.BLOCK)
        self.register_buffer("packed", int8_dot.pack(rounded.q.flatten(1)))
        self.register_buffer("scale", F.pad(rounded.scale[:, 0].float(), more))
        self.register_buffer("bias", None if bias is None else F.pad(bias.float(), more))

    def matmul(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, self.width).float()
        y: Tensor = int8_dot.int8_dot_linear(rows, self.packed, self.scale, self.bias)
        y = y if y.shape[1] == self.out else y[:, : self.out]
        return y.reshape(*x.shape[:-1], self.out).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.out} x {self.width}, bits=8"
