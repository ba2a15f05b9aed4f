"""Views of attention and logits, from a trace (`trace.py`) and a request (`requests.py`).

Undefined numbers are null. Tokens are plain text, as `tokenizer.token` returns them, without invisible characters.
Rows of maps are queries; in "bias" and "scores" a masked cell is -1e30.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import ConfigError, Fault, Side
from anyformer.config.spec import Count
from anyformer.explore.formulas import is_inverse_root
from anyformer.explore.outputs import logits_after
from anyformer.explore.requests import KindRequest, LayerRequest, NeuronRequest, NextRequest
from anyformer.explore.trace import Trace, initial_position, last_side, predicts_tokens
from anyformer.explore.vectors import as_base64, finite, small_size
from anyformer.explore.view import SavedText, TextView
from anyformer.nn.inspection.head_patterns import HeadStatistics, head_statistics
from anyformer.nn.inspection.sublayers import attentions_by_kind, stacks_of
from anyformer.runs.run import Run

MAX_LINKS, MIN_WEIGHT = 6, 0.01  # of a query
TOP_LOGITS, TOP_LENS = 200, 5  # most probable tokens of the output, and of each layer
TEMPERATURES = tuple(round(0.05 * n, 2) for n in range(1, 61))
HIDDEN = -1e30


class AttentionView(TextView):
    """A view of attention weights."""

    group = "attention"

    def fits(self, run: Run) -> bool:
        return any(attentions_by_kind(run.model).values())


class HeadsView(AttentionView):
    """The heads of a layer, with their links [query, key, weight]; of each query the strongest key, and its weight."""

    kind: Literal["heads"] = "heads"
    request = LayerRequest
    place, key = 1, "2"

    def answer(self, trace: Trace, request: LayerRequest) -> dict[str, Any]:
        name = trace.name(request.kind, request.layer)
        weights, (rows, columns) = trace.weights(name), trace.labels(name)
        statistics = statistics_of(trace, name, weights)
        (names,) = statistics.names()
        return {
            "rows": rows,
            "columns": columns,
            "heads": list(range(len(weights))),
            "links": [_links(head) for head in weights],
            "strongest": weights.argmax(dim=-1).tolist(),
            "highest": [[round(x, 6) for x in head] for head in weights.amax(dim=-1).tolist()],
            "names": names,
            "entropy": [finite(x) for x in statistics.entropy[0]],
            "distance": [finite(x) for x in statistics.distance[0]],
        }

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        yield from saved.layers


class ModelView(AttentionView):
    """Maps {layer.head: base64 of bytes} of all layers of a kind; a peak is the largest weight of a map, 255 in it."""

    kind: Literal["model"] = "model"
    request = KindRequest
    place, key = 2, "3"

    def answer(self, trace: Trace, request: KindRequest) -> dict[str, Any]:
        layers = trace.attentions.get(request.kind) or {0: trace.name(request.kind, 0)}  # which raises
        sizes, maps, peaks, names = {}, {}, {}, {}
        for layer, name in layers.items():
            weights = trace.weights(name)
            size = small_size(weights)
            small = F.adaptive_max_pool2d(weights[None], size)[0]  # the maximum keeps thin diagonals visible
            (patterns,) = statistics_of(trace, name, weights).names()
            sizes[str(layer)] = list(size)
            for head, small_map in enumerate(small):
                peak = float(small_map.max())
                scaled = small_map / peak if peak > 0 else small_map
                maps[f"{layer}.{head}"] = as_base64((scaled.clamp(0, 1) * 255).round().to(torch.uint8))
                peaks[f"{layer}.{head}"] = peak
                names[f"{layer}.{head}"] = patterns[head]
        return {"layers": list(layers), "sizes": sizes, "maps": maps, "peaks": peaks, "names": names}

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        yield from ({"kind": kind} for kind in saved.about["kinds"])


class MatrixRequest(LayerRequest):
    head: Count
    what: Literal["weights", "mask", "bias", "scores"] = "weights"


class MatrixView(AttentionView):
    """The numbers of one head, as base64 of float32; None if it has none of the kind."""

    kind: Literal["matrix"] = "matrix"
    request = MatrixRequest
    place, key = 3, "4"

    def answer(self, trace: Trace, request: MatrixRequest) -> dict[str, Any]:
        name = trace.name(request.kind, request.layer, request.head)
        rows, columns = trace.labels(name)
        values: Tensor | None
        match request.what:
            case "weights":
                values = trace.weights(name)[request.head]
            case "mask":
                values = trace.visible(name).float()
            case "bias":
                bias = trace.bias(name)
                values = None if bias is None else bias[request.head].clamp(min=HIDDEN)
            case "scores":
                values = trace.scores(name)[request.head].clamp(min=HIDDEN)
        return {
            "rows": rows,
            "columns": columns,
            "shape": [len(rows), len(columns)],
            "what": request.what,
            "normalizer": trace.attention(name).normalizer,
            "position": trace.position(name),
            "values": None if values is None else as_base64(values.float()),
        }

    def clicked(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        for what, place in product(("weights", "scores", "mask", "bias"), saved.layers):
            yield from ({**place, "head": head, "what": what} for head in range(saved.heads(place)))


class NeuronView(AttentionView):
    """A query and a key, and all terms of their score; `root` is the width k where the scale is 1/√k."""

    kind: Literal["neuron"] = "neuron"
    request = NeuronRequest
    place, key = 4, "5"

    def answer(self, trace: Trace, request: NeuronRequest) -> dict[str, Any]:
        name = trace.name(request.kind, request.layer, request.head)
        check_pair(trace, name, request)
        attention = trace.attention(name)
        q = trace.activations[f"{name}.q"][0, request.head, request.query].float().cpu()
        k = trace.keys(name)[request.head, request.key].float().cpu()
        bias, at = trace.bias(name), (request.head, request.query, request.key)
        product = q * k
        row = trace.weights(name)[request.head, request.query]
        return {
            "q": q.tolist(),
            "k": k.tolist(),
            "product": product.tolist(),
            "dot": float(product.sum()),
            "scale": attention.scale,
            "root": len(q) if is_inverse_root(attention.scale, len(q)) else None,
            "cap": attention.cap,
            "bias": None if bias is None else finite(bias[at]),
            "sink": None if attention.sinks is None else float(attention.sinks[request.head].detach()),
            "score": finite(trace.scores(name)[at]),
            "weight": float(row[request.key]),
            "visible": bool(trace.visible(name)[request.query, request.key]),
            "normalizer": attention.normalizer,
            "position": trace.position(name),
            "row": row.tolist(),
        }

    def clicked(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        for place in saved.layers:
            yield from saved.pairs(place)


def check_pair(trace: Trace, name: str, request: NeuronRequest) -> None:
    """Raise if an attention layer has no such query or key."""
    for end, labels in zip(("query", "key"), trace.labels(name), strict=True):
        if (at := getattr(request, end)) >= len(labels):
            raise ConfigError([Fault(end, f"= {at}: there are {len(labels)} of them, from 0")])


class NextView(TextView):
    """The prediction at one position: logits, the rest of them by temperature, and after each layer."""

    kind: Literal["next"] = "next"
    request = NextRequest
    group, place, key = "prediction", 1, "6"

    @torch.no_grad()
    def answer(self, trace: Trace, request: NextRequest) -> dict[str, Any]:
        run, side = trace.run, last_side(trace.run)
        if not predicts_tokens(run):
            raise ConfigError([Fault("run", f"its head {run.config.head.kind} does not predict tokens")])
        if request.kind not in (None, side):
            raise ConfigError([Fault("kind", f"= '{request.kind}': the {side} predicts tokens")])
        tokens = trace.reading.tokens[side]
        if not -len(tokens) <= request.at < len(tokens):
            raise ConfigError([Fault("at", f"= {request.at}: there are {len(tokens)} tokens, from 0")])
        at = initial_position(trace) if request.at == -1 else request.at % len(tokens)
        layers, depth = logits_by_layer(trace, at), run.config.stacks[side].depth
        best = layers[-1].topk(min(TOP_LOGITS, layers.shape[-1]))
        others = layers[-1].scatter(0, best.indices, -torch.inf)
        others = others[others > -torch.inf]
        rest = {
            "count": len(others),
            "temperatures": TEMPERATURES,
            "lse": [float((others.double() / t).logsumexp(0)) for t in TEMPERATURES],
        }
        follows = tokens[at + 1] if at + 1 < len(tokens) and side == "decoder" else None
        return {
            "at": at,
            "token": tokens[at],
            "actual": follows,
            "logits": _token_values(trace, best.indices, best.values),
            "ids": best.indices.tolist(),
            "rest": rest if len(others) else None,
            "lens": [_lens(trace, layer, logits) for layer, logits in enumerate(layers, depth - len(layers))],
        }

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        yield from ({"at": at, "kind": saved.side} for at in (-1, *range(len(saved.tokens))))


def logits_by_layer(trace: Trace, at: int) -> Tensor:
    """Return the logit lens at one position, [1 + layers, v]; of an encoder that pools tokens the last row alone."""
    stack = stacks_of(trace.run.model)[last_side(trace.run)]
    last = len(stack.runs) - 1
    layers = range(-1, last + 1) if stack.pooling is None else [last]  # pooled ones have fewer tokens
    return torch.cat([logits_after(trace, layer, at, at + 1) for layer in layers])


# -- helpers ----------------------------------------------------------------------------------------------------------


def statistics_of(trace: Trace, name: str, weights: Tensor) -> HeadStatistics:
    """Return the statistics of the heads of one attention layer."""
    cross, side = name.endswith("cross"), cast(Side, name.split(".")[0])
    ids = trace.reading.distinct_ids(side)
    same = None if cross or weights.shape[-1] != ids.shape[1] else ids
    return head_statistics(weights[None, None], same, cross=cross)


def _links(weights: Tensor) -> list[list[float]]:
    """Return [query, key, weight] of a map [t, s], in descending order of weight."""
    best = weights.topk(min(MAX_LINKS, weights.shape[1]))
    queries = torch.arange(len(weights))[:, None].expand_as(best.indices)
    strong = best.values >= MIN_WEIGHT
    order = best.values[strong].argsort(descending=True, stable=True)
    columns = queries[strong][order], best.indices[strong][order], best.values[strong][order]
    queries_, keys, values = (column.tolist() for column in columns)
    return [[query, key, round(value, 4)] for query, key, value in zip(queries_, keys, values, strict=True)]


def _lens(trace: Trace, layer: int, logits: Tensor) -> dict[str, Any]:
    p = logits.softmax(dim=-1)
    best = p.topk(min(TOP_LENS, len(p)))
    return {
        "layer": layer,
        "top": _token_values(trace, best.indices, best.values),
        "entropy": float(torch.special.entr(p).sum()),
    }


def _token_values(trace: Trace, ids: Tensor, values: Tensor) -> list[list[Any]]:
    token = trace.run.tokenizer.token
    return [[token(id), finite(value)] for id, value in zip(ids.tolist(), values, strict=True)]
