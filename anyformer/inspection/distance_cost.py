"""Cost of scores between content and distance (disentangled positions). Imports no torch."""

from dataclasses import replace

from anyformer.config import Attention, Disentangled
from anyformer.inspection.cost import Cost, linear


def distance_cost(a: Attention, scheme: Disentangled, d: int, b: int, t: int) -> Cost:
    """Return the cost of a layer's terms of distance between t tokens."""
    (k, k_v), h, g, n = a.widths(d), a.heads, a.groups, 2 * scheme.buckets
    terms = 2 if scheme.terms == "both" else 1
    if scheme.projections == "separate":
        queries, keys = scheme.terms != "content_to_position", scheme.terms != "position_to_content"
        projected = linear(d, k * (h * queries + g * keys), n, a.bias)
    else:  # the fused projection of the layer, with its values
        rows = {"separate": h * k + g * (k + k_v), "shared_qk": h * k + g * k_v, "shared_qkv": h * k}
        projected = replace(linear(d, rows[a.projections], n, bias=False), parameters=0)
    # projected vectors, and the bias that the scores are computed with
    saved = terms * n * h * k + b * h * t * t
    return replace(projected, saved=0) + Cost(flops=2 * b * t * terms * h * n * k, saved=saved)
