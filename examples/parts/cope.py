"""Contextual positions (CoPE, Golovneva et al. 2024): distances that count only the tokens which the query lets count.

    g_ij = σ(s_ij),   p_ij = min(Σ_{j ≤ m ≤ i} g_im, positions),   score = s_ij + q_i·e(p_ij) · scale

s are the scaled scores of query i and key j; e of a fraction is interpolated between its neighbours in a learned table.
"""

from functools import partial
from typing import Literal

import torch
from torch import nn

from anyformer.config import Cost, Position, Relative, Size
from anyformer.nn.api import MultiHeadAttention, add_bias, densify, mask_scores


class CoPE(Position):
    """q_i·e(p_ij) added to scores, where p_ij sums the gates σ(s_im) from key j to query i (Golovneva et al. 2024)."""

    kind: Literal["cope"] = "cope"
    positions: Size = 64  # largest contextual distance: longer ones share its vector

    def attention(self):
        return partial(ContextualAttention, self)

    def relative(self, q, k, tables):  # the distances: keys are summed in their order
        return Relative(q.new_empty(0), q[:, :, None] - k[:, None, :])

    def cost(self, attention, width, b, t):
        h, (k, _), n = attention.heads, attention.widths(width), self.positions + 1
        return Cost(n * k, flops=2 * b * h * t * k * (t + n), saved=3 * b * h * t * t)


class ContextualAttention(MultiHeadAttention):
    def __init__(self, scheme, spec, width):
        super().__init__(spec, width)
        self.vectors = nn.Parameter(torch.empty(scheme.positions + 1, spec.widths(width)[0]))

    def mask(self, relation, q, k):
        gates = mask_scores(self.scoring.scores(q, k), densify(relation.lowered)).sigmoid()  # [b, h, t, s]
        order = relation.relative.rows[:, None].argsort(-1).expand_as(gates)  # the nearest key first
        far = gates.gather(-1, order).cumsum(-1).gather(-1, order.argsort(-1)).clamp(max=len(self.vectors) - 1)
        scores = self.scale * (q @ self.vectors.mT).to(far.dtype)  # [b, h, t, positions + 1]
        low, high = far.floor().long(), far.ceil().long()
        return add_bias(relation.lowered, scores.gather(-1, low).lerp(scores.gather(-1, high), far - low))

    def reset(self):
        super().reset()
        self.vectors.zero_()
