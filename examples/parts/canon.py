"""Canon layers (Allen-Zhu 2025): a short causal convolution of each channel, whose output is added to its input.

    y_t = x_t + Σ_j w_j ⊙ x_{t-j},  0 ≤ j < width

As a mixer it is a layer of its own, before one of attention:

    blocks = [{mixer = "canon", feedforward = "none", norm = "none"}, {mixer = {heads = 8}, ...}]
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from anyformer.config import Convolution, Flag, Size
from anyformer.nn.api import ConvolutionMixer


class Canon(Convolution):
    """Σ_j w_j ⊙ x_{t-j}: a convolution that mixes no channels (Allen-Zhu 2025)."""

    kind: Literal["canon"] = "canon"
    width: Size = 4  # number of tokens that it reads
    bias: Flag = False  # a bias per channel

    def build(self, width):
        return CanonMixer(self, width)

    def cost(self, width, b, t, side):
        cost = super().cost(width, b, t, side)
        return replace(cost, parameters=width * (self.width + self.bias), flops=2 * b * t * width * self.width)


class CanonMixer(ConvolutionMixer):
    def __init__(self, spec, width):
        super().__init__(spec, width)
        self.conv = nn.Conv1d(width, width, spec.width, dilation=spec.dilation, bias=spec.bias, groups=width)

    def combine(self, near):
        y = torch.einsum("btdk,dk->btd", near, self.conv.weight[:, 0])
        return y if self.conv.bias is None else y + self.conv.bias
