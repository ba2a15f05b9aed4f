"""Matmul of 4-bit weights and 8-bit tokens on Arm CPUs, by KleidiAI through torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.private import has_4bit_matmul, matmul_4bit, pack_4bit_weight
from anyformer.nn.linear import WeightFormat
from anyformer.nn.transforms.rounding import Rounded, pack_nibbles

ROW_MULTIPLE = 32  # the kernel reads rows of such lengths


def is_supported(weight: Tensor) -> bool:
    """Return whether torch has the kernel and the weight is one that it takes."""
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and has_4bit_matmul()


class ArmKernelFormat(WeightFormat):
    """Weights and bias as the kernel reads them; each token is rounded to 8 bits.

    Weights of 8 bits are two of 4: q = 16 a + b, and a row of the result is the sum of two.
    """

    packed: Tensor

    def __init__(self, rounded: Rounded, bias: Tensor | None):
        super().__init__()
        self.bits, self.out, self.width = rounded.bits, rounded.q.shape[0], rounded.width
        q, scale = rounded.q, rounded.scale
        if rounded.bits == 8:
            high = (q + 8).div(16, rounding_mode="floor").to(torch.int8)
            q, scale = torch.cat((high, q - 16 * high)), torch.cat((16 * scale, scale))
            bias = None if bias is None else torch.cat((bias, torch.zeros_like(bias)))
        q = q.flatten(1)
        q = F.pad(q, (0, -q.shape[1] % ROW_MULTIPLE))
        self.padding = q.shape[1] - rounded.width
        self.sizes = (q.shape[1] // scale.shape[1], q.shape[1], q.shape[0])  # of a group, of a row, of the matrix
        if scale.shape[1] == 1:
            scale = scale.float()  # the kernel's type for rows of one group
        packed = pack_4bit_weight(pack_nibbles(q), scale.contiguous(), bias, self.sizes)
        self.register_buffer("packed", packed)
        self.kernel = matmul_4bit()

    def matmul(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        # the kernel takes some 50 microseconds for one token: every step here counts
        rows = x.reshape(-1, self.width).float()
        y: Tensor = self.kernel(F.pad(rows, (0, self.padding)) if self.padding else rows, self.packed, *self.sizes)
        if self.bits == 8:
            y = y[:, : self.out] + y[:, self.out :]
        return y.view(*x.shape[:-1], self.out).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.out} x {self.width}, bits={self.bits}"
