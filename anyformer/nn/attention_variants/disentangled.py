"""Disentangled attention (DeBERTa, He et al. 2021): scores between content and content, and content and distance."""

from functools import reduce

import torch
from torch import Tensor, nn

from anyformer.attention.lowered import Dense, Relation, add_bias
from anyformer.attention.scores import repeat_heads
from anyformer.config import Attention, Disentangled
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.linear import Linear, split_heads


class DisentangledAttention(MultiHeadAttention):
    """Self-attention with the scores (q_i·k_j + q_i·K(p_ij) + k_j·Q(p_ij)) · scale.

    p_ij is the vector of the distance between query i and key j. Every vector is projected once and compared with all
    queries and keys, [b, h, t, n]; each pair then reads the value of its distance. K and Q are the projections of the
    content (norms included), or `own`.
    """

    def __init__(self, scheme: Disentangled, spec: Attention, width: int):
        super().__init__(spec, width)
        self.scale /= scheme.divisor
        k, _ = spec.widths(width)
        self.to_position = scheme.terms != "position_to_content"
        self.to_content = scheme.terms != "content_to_position"
        parts = (spec.heads * k * self.to_content, spec.groups * k * self.to_position)
        separate = scheme.projections == "separate"
        self.own = Linear(width, tuple(part for part in parts if part), bias=spec.bias) if separate else None
        self.vector_dropout = nn.Dropout(scheme.dropout)

    def mask(self, relation: Relation, q: Tensor, k: Tensor) -> Dense:
        return add_bias(relation.lowered, reduce(torch.add, self.distance_terms(relation, q, k).values()) * self.scale)

    def distance_terms(self, relation: Relation, q: Tensor, k: Tensor) -> dict[str, Tensor]:
        """Return the terms between [b, h, t, k] queries, [b, g, s, k] keys and distances, [b, h, t, s], unscaled."""
        assert relation.relative is not None
        position_q, position_k = self._project_vectors(self.vector_dropout(relation.relative.vectors))
        (b, h, t, _), s, rows = q.shape, k.shape[2], relation.relative.rows[:, None]
        terms = {}
        if self.to_position:
            found = q @ repeat_heads(position_k, h).mT  # [b, h, t, n]
            terms["content-distance"] = found.gather(-1, rows.expand(b, h, t, s))
        if self.to_content:
            found = repeat_heads(k, h) @ position_q.mT  # [b, h, s, n]
            terms["distance-content"] = found.gather(-1, rows.mT.expand(b, h, s, t)).mT
        return terms

    def _project_vectors(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [1, h, n, k] and keys [1, g, n, k] of vectors [n, d]; those not needed may be empty."""
        if self.own is None:
            parts = self.qkv.split(vectors)
            q, k = (parts[i][None] for i in self.serves[:2])
            return self.normed_heads(self.q_norm, q, self.heads), self.normed_heads(self.k_norm, k, self.groups)
        parts, none = self.own.split(vectors), vectors.new_empty(1, 0, 0, 0)
        q = split_heads(parts[0][None], self.heads) if self.to_content else none
        return q, split_heads(parts[-1][None], self.groups) if self.to_position else none
