"""View `rotation`: what rotary positions do to one query and one key, pair by pair, and their score by distance."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer.attention.scores import soft_cap
from anyformer.config import ConfigError, Fault, Rotation
from anyformer.config.position import RotaryScheme
from anyformer.explore.requests import NeuronRequest
from anyformer.explore.trace import Trace
from anyformer.explore.vectors import rounded
from anyformer.explore.view import SavedText, TextView
from anyformer.explore.views import check_pair
from anyformer.nn.attention_variants.latent import LatentAttention

MAX_PAIRS = 8  # pairs of dimensions that are shown, from the fastest to the slowest
MIN_REACH, CURVE_POINTS = 32, 97  # of the curves


class RotationView(TextView):
    """Pairs of dimensions of q and k before and after the rotation, and the score by distance.

    `scores` are those of this query and this key at other distances; `envelope` is the same for equal vectors
    with equal values, relative to distance 0 (see `position_curves`).
    """

    kind: Literal["rotation"] = "rotation"
    request = NeuronRequest

    @torch.no_grad()
    def answer(self, trace: Trace, request: NeuronRequest) -> dict[str, Any]:
        name = trace.name(request.kind, request.layer, request.head)
        check_pair(trace, name, request)
        relation, attention = trace.relation(name), trace.attention(name)
        scheme = relation.scheme
        if relation.rotation is None or not isinstance(scheme, RotaryScheme):
            raise ConfigError([Fault("layer", f"= {request.layer}: {name} has no rotary positions")])
        q = trace.activations[f"{name}.q"][0, request.head, request.query].double().cpu()
        k = trace.keys(name)[request.head, request.key].double().cpu()
        content, key_width = attention.latent.parts if isinstance(attention, LatentAttention) else (0, len(q))
        width = relation.rotation.cos.shape[-1]
        turned = [x[content : content + width] for x in (q, k)]
        here = [_pairs(relation.rotation, at) for at in (request.query, request.key)]
        plain = [_unrotate(x, *pairs) for x, pairs in zip(turned, here, strict=True)]
        apart = None if (places := trace.positions(name)) is None else int(places[request.query] - places[request.key])
        distances = _distances(apart, len(trace.labels(name)[1]))
        cos, sin = _pairs(scheme.prepare(torch.tensor([distances]), key_width))
        first = _pairs(scheme.prepare(torch.zeros(1, 1, dtype=torch.long), key_width), 0)
        dots = _rotate(plain[0], cos, sin) @ _rotate(plain[1], *first)
        rest, half = float(q @ k - turned[0] @ turned[1]), width // 2
        scores, ones = (dots + rest) * attention.scale, torch.ones(width, dtype=torch.float64)
        one = _pairs(scheme.prepare(torch.ones(1, 1, dtype=torch.long), key_width), 0)
        angles = torch.atan2(one[1], one[0])
        return {
            "theta": scheme.theta,
            "pairs": half,
            "dimensions": len(q),
            "distance": apart,
            "shown": [
                {"pair": i, "dims": [content + i, content + i + half], "turn": float(angles[i])}
                | {side: rounded(x[[i, i + half]]) for side, x in zip(("q", "k"), plain, strict=True)}
                | {f"{side}_turned": rounded(x[[i, i + half]]) for side, x in zip(("q", "k"), turned, strict=True)}
                for i in _spread(half)
            ],
            "before": float(plain[0] @ plain[1]) + rest,
            "dot": float(q @ k),
            "distances": distances,
            "scores": rounded(scores if attention.cap is None else soft_cap(scores, attention.cap)),
            "envelope": rounded(_rotate(ones, cos, sin) @ _rotate(ones, *first) / width),
        }

    def clicked(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        for place in saved.layers:
            if saved.ask("matrix", {**place, "head": 0, "what": "bias"})["position"].startswith("rotary"):
                yield from saved.pairs(place)


def _spread(count: int) -> list[int]:
    """Return at most `MAX_PAIRS` pairs, evenly spaced, with the first and the last."""
    if count <= MAX_PAIRS:
        return list(range(count))
    return [round(i * (count - 1) / (MAX_PAIRS - 1)) for i in range(MAX_PAIRS)]


def _distances(apart: int | None, tokens: int) -> list[int]:
    """Return the distances of the curves, among them 0 and that of the pair."""
    own = apart or 0
    reach = max(MIN_REACH, abs(own), tokens - 1)
    low = -reach if own < 0 else 0
    every = math.ceil((reach - low) / (CURVE_POINTS - 1))
    return sorted({*range(low, reach + 1, every), reach, 0, own})


def _pairs(rotation: Rotation, at: int | slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each pair at a position, with the factor of the scaling."""
    half = rotation.cos.shape[-1] // 2
    return rotation.cos[0, 0, at, :half].double().cpu(), rotation.sin[0, 0, at, half:].double().cpu()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [width] by angles [..., pairs]: halves (a, b) become (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo `_rotate` at one position, with its factor."""
    a, b = x.chunk(2)
    size = cos.square() + sin.square()
    return torch.cat(((a * cos + b * sin) / size, (b * cos - a * sin) / size))
