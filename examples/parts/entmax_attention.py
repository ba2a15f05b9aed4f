"""Attention by 1.5-entmax (Peters et al. 2019; Correia et al. 2019): weights that are exactly 0 for most keys.

    weights_j = max(z_j / 2 - τ, 0)²,  with the threshold τ at which they sum to 1

The threshold is found in the sorted scores: with the n largest of them, z / 2 has the mean m and the summed squared
deviation d, and τ = m - sqrt((1 - d) / n). The support is the largest n whose τ is not above the n-th of them.
"""

from typing import ClassVar, Literal

import torch
from torch.nn import functional as F

from anyformer.config import Attention
from anyformer.nn.api import MultiHeadAttention, densify, mask_scores, mix


class EntmaxAttention(Attention):
    """1.5-entmax(Q Kᵀ · scale + mask + bias) V: most weights are 0, at any distance (Correia et al. 2019)."""

    kind: Literal["entmax"] = "entmax"
    own_weights: ClassVar[bool] = True

    def build(self, width):
        return EntmaxAttentionModule(self, width)


class EntmaxAttentionModule(MultiHeadAttention):
    def weigh(self, q, k, lowered, scoring):
        dense = densify(lowered)
        weights = entmax(mask_scores(scoring.scores(q, k), dense))
        return (weights if dense.has_key is None else weights * dense.has_key).to(q.dtype)

    def attend(self, q, k, v, lowered, scoring):
        return mix(F.dropout(self.weigh(q, k, lowered, scoring), self.dropout, self.training), v)


def entmax(scores):
    """Return the 1.5-entmax over the last axis; -inf has no weight."""
    z = (scores - scores.amax(-1, keepdim=True)) / 2
    # more than 1 below the largest, a score has no weight: sums stay finite
    ordered = z.clamp(min=-2).sort(dim=-1, descending=True).values
    n = torch.arange(1, z.shape[-1] + 1, device=z.device)
    mean = ordered.cumsum(-1) / n
    deviation = n * (ordered.square().cumsum(-1) / n - mean.square())
    threshold = mean - ((1 - deviation) / n).clamp(min=1e-12).sqrt()
    support = (threshold <= ordered).sum(-1, keepdim=True)
    return (z - threshold.gather(-1, support - 1)).clamp(min=0).square()
