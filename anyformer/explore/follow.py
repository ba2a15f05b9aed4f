"""View `follow`: one output of the model as sums, from parts of the model down to single dimensions.

    positions    of a head that pools tokens: the share of each position
    parts        embeddings, sublayers and heads (`logit_terms.py`)
    tokens       of one head: weight · ⟨v, u⟩ of each token; of a feed-forward: the same over its neurons
    dimensions   of one token: ⟨v, u⟩ and q · k as sums over dimensions

Every answer has `value`, the number of the step before, and `total`, the sum of its terms: equal up to rounding.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer.attention.layout import make_layout
from anyformer.attention.scores import soft_cap
from anyformer.config import ConfigError, Fault
from anyformer.explore.outputs import chosen, outputs, position
from anyformer.explore.path_place import attention_row
from anyformer.explore.requests import StrictInt, TextRequest
from anyformer.explore.trace import Trace, last_side, trace_reading
from anyformer.explore.vectors import rounded
from anyformer.explore.view import SavedText, TextView
from anyformer.nn.context import Context
from anyformer.nn.feedforward import GatedFFN, PlainFFN
from anyformer.nn.inspection.frozen import freeze, freeze_head, pull
from anyformer.nn.inspection.logit_terms import LogitTerms, split_logit
from anyformer.nn.inspection.residual_stream import layer_stream
from anyformer.nn.inspection.taps import recording

TOP_NEURONS = 24


class FollowRequest(TextRequest):
    """The terms of one output: by `level` a sum over positions, parts of the model, tokens (or neurons), or dimensions.

    `output` is a token id or the number of a label; -1 is the most probable. `place` is a position of a head that pools
    tokens, `part` a head of an attention layer (`decoder.0.mixer.3`) or a sublayer, `key` a token. The default of each
    has the largest term. Heads in `without` are disabled for the same tokens; with `off`, a model may answer others.
    """

    level: Literal["positions", "parts", "tokens", "dimensions"]
    at: StrictInt = -1
    output: StrictInt = -1
    place: StrictInt = -1
    part: str = ""
    key: StrictInt = -1
    without: tuple[str, ...] = ()


class FollowView(TextView):
    """The terms of one number."""

    kind: Literal["follow"] = "follow"
    request = FollowRequest

    @torch.no_grad()
    def answer(self, trace: Trace, request: FollowRequest) -> dict[str, Any]:
        at = position(trace, request.at)
        if request.without:
            trace = trace_reading(trace.run, trace.reading, sorted({*request.off, *request.without}))
        output = chosen(trace, at, request.output)
        found: dict[str, Any] = {"at": at, "output": list(output)}
        side = last_side(trace.run)
        direction = freeze_head(trace.run.model, trace.activations[f"{side}.final"][0], output.id, at)
        pooled, place = len(direction.positions) > 1, None
        if pooled:
            hidden = trace.activations[f"{side}.final"][0, direction.positions].double()
            shares = dict(zip(direction.positions, (direction.u * hidden).sum(dim=1).tolist(), strict=True))
            place = request.place
            if place not in shares:
                place = max(shares, key=lambda key: abs(shares[key]))
            found |= {"place": place}
            if request.level == "positions":
                return found | {
                    "value": output.value,
                    "terms": [[key, share] for key, share in shares.items()],
                    "constant": direction.constant,
                    "total": sum(shares.values()) + direction.constant,
                }
        elif request.level == "positions":
            raise ConfigError([Fault("level", "= 'positions': the head of this run reads one position")])
        model, layout = trace.run.model, trace.layout(side)
        terms = split_logit(model, trace.activations, layout, output.id, at, trace.off, place)
        if request.level == "parts":
            value = output.value if place is None else shares[place]
            return (
                found
                | {"pooled": pooled, "value": value, "outputs": [list(one) for one in outputs(trace, at)]}
                | _parts(terms)
            )
        part = request.part or _largest(terms)
        found |= {"part": part}
        name, _, head = part.rpartition(".")
        row = place if place is not None else terms.positions[0]
        if head.isdecimal() and name in terms.heads and int(head) < len(terms.heads[name]):
            found |= {"value": terms.heads[name][int(head)]}
            return found | _head_terms(trace, terms, name, int(head), row, request)
        if part in terms.terms:
            return found | {"value": terms.terms[part]} | _neurons(trace, terms, part, row)
        raise ConfigError([Fault("part", f"= '{part}': there is no such head or sublayer")])

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        """Yield the path of the most probable output back along its largest terms."""
        for stage in saved.outline["follow"]:
            level = stage.partition(".")[2]
            request = {"level": level, "at": -1, "output": -1, "place": -1}
            if level in ("tokens", "dimensions"):
                request["part"] = ""
            if level == "dimensions":
                request["key"] = -1
            if level != "check":
                yield request


def _parts(terms: LogitTerms) -> dict[str, Any]:
    rows = [
        {"name": name, "value": value, "heads": terms.heads.get(name), "bias": terms.biases.get(name)}
        for name, value in terms.terms.items()
    ]
    return {"terms": rows, "constant": terms.constant, "total": terms.total, "part": _largest(terms)}


def _largest(terms: LogitTerms) -> str:
    """Return the head with the largest term; without attention, the sublayer."""
    heads = {f"{name}.{i}": abs(x) for name, row in terms.heads.items() for i, x in enumerate(row)}
    sizes = heads or {name: abs(x) for name, x in terms.terms.items()}
    return max(sizes, key=lambda name: sizes[name])


def _head_terms(
    trace: Trace, terms: LogitTerms, name: str, head: int, query: int, request: FollowRequest
) -> dict[str, Any]:
    row = attention_row(trace, name, head, query)
    u = terms.directions[name][head, 0].cpu()
    off = head in trace.off.get(name, ())
    gains = row.values @ u
    shares = row.weights * gains * (0.0 if off else 1.0)
    _, columns = trace.labels(name)
    key = request.key if 0 <= request.key < len(columns) else int(shares.abs().argmax())
    found = {"keys": columns, "query": query, "key": key, "off": off}
    if request.level == "tokens":
        return found | {
            "weights": rounded(row.weights),
            "gains": rounded(gains),
            "terms": rounded(shares),
            "total": float(shares.sum()),
        }
    scale, normalizer, cap, *_ = row.scoring
    dots, visible = row.q * row.keys[key] * scale, bool(row.visible[key])
    return found | {
        "value": float(shares[key]),
        "weight": float(row.weights[key]),
        "gain": float(gains[key]),
        "v": rounded(row.values[key]),
        "u": rounded(u),
        "terms": rounded(row.values[key] * u),
        "total": float(gains[key]) * float(row.weights[key]) * (0.0 if off else 1.0),
        "q": rounded(row.q),
        "k": rounded(row.keys[key]),
        "scale": scale,
        "scored": rounded(dots),
        "dot": float(dots.sum()),
        "cap": cap,
        "capped": float(dots.sum() if cap is None else soft_cap(dots.sum(), cap)),
        "bias": None if row.bias is None else float(row.bias[key]),
        "score": float(row.scores[key]) if visible else None,
        "normalizer": normalizer,
        "sink": row.sink,
        "sum": _log_sum(row.scores, row.sink) if normalizer == "softmax" and visible else None,
    }


def _log_sum(scores: Tensor, sink: float | None) -> float:
    """Return log Σ exp(score), by which the softmax divides."""
    return float((scores if sink is None else torch.cat((scores, scores.new_tensor([sink])))).logsumexp(0))


def _neurons(trace: Trace, terms: LogitTerms, part: str, row: int) -> dict[str, Any]:
    """Return the neurons of a plain or gated feed-forward; no terms for other parts, which are one step."""
    nothing: dict[str, Any] = {"neurons": None, "total": terms.terms[part]}
    if not part.endswith(".feedforward"):
        return nothing
    side, layer = last_side(trace.run), int(part.split(".")[1])
    stream = layer_stream(trace.run.model, side, trace.activations, layer, [row], trace.layout(side))
    step = next(one for one in stream.steps if one.name == part)
    inner = step.sublayer.inner
    if not isinstance(inner, PlainFFN | GatedFFN):
        return nothing
    layout, (taps, seen) = make_layout(1, 1, step.read.device), recording()
    inner(step.read[None], Context(layout, layout, taps=taps))
    hidden, weight = seen["hidden"][0, 0].double(), inner.down.dense(0).double()
    bias = torch.zeros_like(weight[:, 0]) if inner.down.bias is None else inner.down.bias.double()
    out = (weight @ hidden + bias)[None]
    u, constant = pull(freeze(step.sublayer.norm_branch, out), out, terms.streams[part])
    shares = hidden * (u[0] @ weight)
    constant += float(u[0] @ bias)
    top = shares.abs().topk(min(TOP_NEURONS, len(shares))).indices.tolist()
    rest = float(shares.sum()) - sum(float(shares[i]) for i in top)
    return {
        "neurons": [[i, float(hidden[i]), float(shares[i])] for i in top],
        "count": len(shares),
        "rest": rest,
        "constant": constant,
        "total": float(shares.sum()) + constant,
    }
