"""Short causal convolution, one kernel for each channel: what linear recurrences read before their state."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShortConvolution(nn.Module):
    """silu(Σ_j w_j x_{t-j} + b), j < width, over the tokens of one segment."""

    def __init__(self, channels: int, width: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))  # the newest token last
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    @property
    def tail(self) -> int:
        """Number of tokens before the one at hand that it reads."""
        return self.weight.shape[1] - 1

    def forward(self, x: Tensor, runs: Tensor | None) -> Tensor:
        """[b, tail + t, c] to [b, t, c]; a token reads those of the same run [b, tail + t]."""
        length, weight = x.shape[1] - self.tail, self.weight.to(x.dtype)
        y = x[:, self.tail :] * weight[:, -1]
        for j in range(self.tail):
            read = x[:, j : j + length]
            if runs is not None:
                read = read * (runs[:, j : j + length] == runs[:, self.tail :])[..., None]
            y = torch.addcmul(y, read, weight[:, j])
        return F.silu(y if self.bias is None else y + self.bias.to(x.dtype))

    def reset(self) -> None:
        """Draw the weights as torch does for a convolution of one channel."""
        self.weight.uniform_(-(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            self.bias.zero_()
