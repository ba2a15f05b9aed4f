"""Forgetting attention (FoX, Lin et al. 2025): softmax attention whose scores decay by gates computed from the text.

    f_t = σ(x_t W_f + b) for each head,   score_ij = q_i·k_j / sqrt(k) + Σ_{j < m ≤ i} log f_m

It needs no positions. A cache stores log f beside the key of each token.
"""

from typing import Literal

import torch
from torch.nn import functional as F

from anyformer.config import Causal, Cost, Matrix, Mixer, Size, Sizes, linear_costs, must_divide
from anyformer.nn.api import Linear, OutBranch, at_least_fp32, sees, split_heads

CAUSAL = Causal()  # a constant: torch.compile cannot trace the construction of a spec


class Forgetting(Mixer):
    """softmax(q kᵀ / sqrt(k) + Σ_{j < m ≤ i} log f_m) v with a forget gate f for each head (Lin et al. 2025)."""

    kind: Literal["forgetting"] = "forgetting"
    heads: Size  # number of heads

    def build(self, width):
        return ForgettingAttention(self, width)

    def stores(self, width):
        return Sizes(self.heads, width // self.heads + 1, width // self.heads)

    def matrices(self, width):
        yield Matrix("qkv", width, 3 * width)
        yield Matrix("forget", width, self.heads, bias=True)
        yield Matrix("out", width, width)

    def cost(self, width, b, t, side):
        saved = b * t * (4 * width + 2 * self.heads) + 2 * b * self.heads * t * t
        cached = self.stores(width).cached(b, t) * (side == "decoder")
        return linear_costs(self.matrices(width), b * t) + Cost(flops=4 * b * t * t * width, saved=saved, cached=cached)

    def faults(self, width, side, has_encoder):
        if width % self.heads:
            yield must_divide("heads", self.heads, width, "another number of heads")


class ForgettingAttention(OutBranch):
    def __init__(self, spec, width):
        super().__init__()
        self.heads, self.scale = spec.heads, (width // spec.heads) ** -0.5
        self.qkv, self.forget = Linear(width, (width,) * 3, bias=False), Linear(width, spec.heads)
        self.out = Linear(width, width, bias=False)

    def forward(self, x, ctx):
        read = ctx.with_memory(x)
        q, k, v = (split_heads(part, self.heads) for part in self.qkv.split(read))  # [b, h, t, k]
        k, v = ctx.append(torch.cat((k, F.logsigmoid(split_heads(self.forget(read), self.heads))), dim=-1), v)
        seen = sees(CAUSAL, ctx.layout, ctx.keys)[:, None]  # [b, 1, t, s]
        logs = at_least_fp32(k[:, :, None, :, -1]).where(seen, 0.0)  # [b, h, t, s]
        decay = logs.flip(-1).cumsum(-1).flip(-1) - logs  # of all tokens after the key
        scores = (q[:, :, -x.shape[1] :] @ k[..., :-1].mT * self.scale + decay).masked_fill(~seen, -torch.inf)
        out = ctx.tap("weights", scores.softmax(-1)).to(v.dtype) @ v
        return self.out(out.transpose(1, 2).flatten(2))
