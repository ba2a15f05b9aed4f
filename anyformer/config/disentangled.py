"""Disentangled positions: scores between content and distance. Imports no torch."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from anyformer.config.cost import Cost, Matrix
from anyformer.config.norm import LayerNorm, NoNorm
from anyformer.config.position import Position
from anyformer.config.scheme import Heads, Relative, Tables
from anyformer.config.spec import BY_KIND, Fault, Probability

if TYPE_CHECKING:
    from torch import Tensor, nn


class Disentangled(Position):
    """Scores between content and distance, by a learned vector p of each bucket of distances (DeBERTa, He et al. 2021).

    s_ij = (q_i·k_j + q_i·K(p_ij) + k_j·Q(p_ij)) · scale / sqrt(3), where p_ij is the vector of the bucket of i - j

    Distances up to half of the buckets have one each; the others grow logarithmically up to `max_distance`. The table
    is shared by all layers of a stack.
    """

    kind: Literal["disentangled"] = "disentangled"
    # buckets of each direction: the table has 2 · buckets rows
    buckets: Annotated[int, Field(strict=True, ge=2, le=2**20)] = 256
    # distance of the last bucket, in tokens; None: every distance below `buckets` has its own
    max_distance: Annotated[int, Field(strict=True, ge=1, le=2**20)] | None = None
    # terms besides q·k: q·K(p) is content to position, k·Q(p) is position to content; the divisor is sqrt(1 + terms)
    terms: Literal["both", "content_to_position", "position_to_content"] = "both"
    projections: Literal["shared", "separate"] = "shared"  # K and Q: those of the layer's content, or their own
    norm: Annotated[NoNorm | LayerNorm, *BY_KIND] = LayerNorm(eps=1e-7)  # norm of the vectors
    dropout: Probability = 0.0  # on the vectors, in each layer

    @property
    def count(self) -> int:
        """The number of terms besides that of content and content."""
        return {"both": 2, "content_to_position": 1, "position_to_content": 1}[self.terms]

    @property
    def divisor(self) -> float:
        """Factor of the variance of a score, by which its scale is divided: the root of the number of its terms."""
        return math.sqrt(1 + self.count)

    def attention(self) -> "Callable[..., nn.Module]":
        from anyformer.nn.attention_variants.disentangled import DisentangledAttention

        return partial(DisentangledAttention, self)

    def matrices(self, attention: Heads, width: int) -> Iterator[Matrix]:
        if self.projections == "separate":
            k, _ = attention.widths(width)
            queries = attention.heads * k * (self.terms != "content_to_position")
            keys = attention.groups * k * (self.terms != "position_to_content")
            yield Matrix("own", width, queries + keys, rows=2 * self.buckets, bias=attention.bias)

    def cost(self, attention: Heads, width: int, b: int, t: int) -> Cost:
        h, (k, _), n, terms = attention.heads, attention.widths(width), 2 * self.buckets, self.count
        # projected vectors, and the bias that the scores are computed with
        cost = Cost(flops=2 * b * t * terms * h * n * k, saved=terms * n * h * k + b * h * t * t)
        if self.projections == "separate":
            return cost  # with `matrices`
        [projected] = attention.input_matrices(width)
        return cost + Cost(flops=2 * n * projected.inputs * projected.outputs)  # of the layer, with its values

    def faults(self, key_width: int) -> Iterator[Fault]:
        if self.max_distance is not None and self.max_distance <= (least := self.buckets // 2 + 1):
            yield Fault("max_distance", f"= {self.max_distance}: must be more than buckets / 2 + 1 = {least}, or none")

    def tables(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        norm = self.norm
        gain = {} if norm.is_none else {"norm_weight": (width,)}
        shift = {"norm_bias": (width,)} if isinstance(norm, LayerNorm) and norm.bias else {}
        return {"relative": (2 * self.buckets, width), **gain, **shift}

    def fill(self, name: str, table: "Tensor", std: float) -> None:
        if name == "relative":
            table.normal_(std=std)
        else:
            table.fill_(1.0 if name == "norm_weight" else 0.0)

    def bucket(self, distance: "Tensor") -> "Tensor":
        """The bucket of each distance q - k, below 0 for later keys."""
        import torch

        if self.max_distance is None:
            return distance
        exact = self.buckets // 2
        # in fp32 and in this order, as published: a bucket ends where the rounded quotient does
        growth = torch.log(distance.abs().clamp(min=exact) / exact)
        limit = torch.log(torch.tensor((self.max_distance - 1) / exact, device=distance.device))
        far = torch.ceil(growth / limit * (exact - 1)) + exact
        return torch.where(distance.abs() <= exact, distance, (far * distance.sign()).long())

    def relative(self, q: "Tensor", k: "Tensor", tables: Tables) -> Relative:
        from torch.nn.functional import layer_norm

        vectors = tables["relative"]
        if isinstance(self.norm, LayerNorm):
            shape = vectors.shape[-1:]
            vectors = layer_norm(vectors, shape, tables["norm_weight"], tables.get("norm_bias"), self.norm.eps)
        rows = self.bucket(q[:, :, None] - k[:, None, :]) + self.buckets
        return Relative(vectors, rows.clamp(0, 2 * self.buckets - 1))
