"""Stages of the path inside a layer (one head, other mixers, the feed-forward, the residual stream) and in the head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.attention.layout import make_layout
from anyformer.explore.formulas import (
    POOLED,
    add_formula,
    feedforward_formula,
    head_formula,
    is_inverse_root,
    mix_formula,
    norm_formula,
    out_formula,
    qkv_formula,
    scores_formula,
    softmax_formula,
)
from anyformer.explore.outputs import outputs, separate_labels
from anyformer.explore.path_place import PathPlace
from anyformer.explore.trace import Trace, last_side, predicts_tokens
from anyformer.explore.vectors import gap, kind_of, pixels, rounded
from anyformer.nn.attention_variants.global_tokens import GlobalTokenAttention
from anyformer.nn.block import ParallelBlock
from anyformer.nn.context import Context
from anyformer.nn.heads import EmbeddingHead, PooledHead, SpanHead, TokenHead, VocabularyHead, pool
from anyformer.nn.inspection.logit_terms import gated_heads, output_matrix
from anyformer.nn.inspection.residual_stream import StreamStep
from anyformer.nn.inspection.taps import recording
from anyformer.nn.norm import normed

TOP_VALUES, TOP_NEURONS = 5, 12


def _norm_before(place: PathPlace) -> nn.Module:
    """Return the norm between the stream and the mixer."""
    first = place.block.norm_in if isinstance(place.block, ParallelBlock) else nn.Identity()
    return place.mixer.sublayer.norm_in if isinstance(first, nn.Identity) else first


def norm_stage(norm: nn.Module, before: Tensor, result: Tensor) -> dict[str, Any]:
    """Return the numbers of a norm of one vector."""
    x = before.double()
    return {
        "norm": kind_of(norm),
        "formula": norm_formula(norm),
        "before": rounded(x),
        "mean": float(x.mean()),
        "deviation": float(x.std(correction=0)),
        "size": float(x.square().mean().sqrt()),
        "result": rounded(result),
    }


def _qkv(place: PathPlace) -> dict[str, Any]:
    row, trace = place.attention, place.trace
    attention = trace.attention(place.mixer.name)
    own = place.kind == "cross"
    key = int(row.weights.argmax()) if own else place.row
    _, columns = trace.labels(place.mixer.name)
    rotates = not own and trace.relation(place.mixer.name).rotation is not None
    twice = isinstance(attention, GlobalTokenAttention) and len(row.q) > attention.qkv.parts[0] // attention.heads
    return {
        "formula": qkv_formula(attention, rotates, not bool(row.q[: len(row.q) // 2].any()) if twice else None),
        "read": rounded(place.mixer.read[0]),
        "before": kind_of(_norm_before(place)),
        "q": rounded(row.q),
        "k": rounded(row.keys[key]),
        "v": rounded(row.values[key]),
        "key": [key, columns[key]] if own else None,
        "scheme": trace.position(place.mixer.name),
        "normed": attention.norms,
        "heads": attention.heads,
        "groups": attention.groups,
    }


def _keys(place: PathPlace) -> dict[str, Any]:
    _, columns = place.trace.labels(place.mixer.name)
    return {"keys": columns, "head": place.head, "off": place.is_off}


def _scores(place: PathPlace) -> dict[str, Any]:
    row, attention = place.attention, place.trace.attention(place.mixer.name)
    return _keys(place) | {
        "formula": scores_formula(attention, row.bias is not None, len(row.q)),
        "dots": rounded(row.dots),
        "scale": attention.scale,
        "root": len(row.q) if is_inverse_root(attention.scale, len(row.q)) else None,
        "cap": attention.cap,
        "bias": None if row.bias is None else rounded(row.bias),
        "scheme": place.trace.position(place.mixer.name),
        "scores": rounded(row.unmasked),
        "visible": row.visible.int().tolist(),
    }


def _mask(place: PathPlace) -> dict[str, Any]:
    visible = place.trace.visible(place.mixer.name)
    map, size = pixels(visible)
    return (
        _keys(place)
        | {"visible": place.attention.visible.int().tolist(), "map": map, "size": size, "row": place.row}
        | {"queries": len(visible)}
    )


def _softmax(place: PathPlace) -> dict[str, Any]:
    row = place.attention
    model = place.trace.weights(place.mixer.name)[place.head, place.row]
    return _keys(place) | {
        "formula": softmax_formula(place.trace.attention(place.mixer.name), place.head),
        "scores": [None if not seen else x for seen, x in zip(row.visible.tolist(), rounded(row.scores), strict=True)],
        "weights": rounded(row.weights),
        "sink": row.sink,
        "normalizer": row.scoring.normalizer,
        "check": gap(row.weights, model),
    }


def _values(place: PathPlace) -> dict[str, Any]:
    row = place.attention
    order = row.weights.argsort(descending=True).tolist()
    best = [key for key in order[:TOP_VALUES] if float(row.weights[key]) > 0]
    rest = row.output - row.weights[best] @ row.values[best]
    model = place.trace.activations[f"{place.mixer.name}.heads"][0, place.head, place.row]
    return _keys(place) | {
        "formula": ["o = Σ_s w_s v_s"],
        "terms": [[key, float(row.weights[key]), rounded(row.values[key])] for key in best],
        "rest": {"count": sum(1 for key in order if float(row.weights[key]) > 0) - len(best), "vector": rounded(rest)},
        "result": rounded(row.output),
        "check": gap(row.output, model),
    }


def _out(place: PathPlace) -> dict[str, Any]:
    trace, name = place.trace, place.mixer.name
    attention = trace.attention(name)
    heads = gated_heads(trace.activations, name, [place.row], trace.off.get(name, ()))[:, 0]  # [h, k_v]
    weight, bias = output_matrix(attention.out, heads.numel())
    parts = torch.einsum("dhk,hk->hd", weight.unflatten(1, (attention.heads, -1)), heads)
    total, norm = parts.sum(dim=0) + bias, place.mixer.sublayer.norm_branch
    return {
        "formula": out_formula(attention, norm),
        "head": place.head,
        "output": rounded(heads[place.head]),
        "gated": attention.gate is not None,
        "own": rounded(parts[place.head]),
        "lengths": rounded(parts.norm(dim=1)),
        "off": sorted(trace.off.get(name, ())),
        "norm": kind_of(norm),
        "result": rounded(place.mixer.added[0]),
        "check": gap(_normed(norm, total), place.mixer.added[0]),
    }


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the norm of a vector [d]."""
    return normed(norm, x.float()[None, None], make_layout(1, 1, x.device))[0, 0]


def _mix(place: PathPlace) -> dict[str, Any]:
    spec, step = place.spec.mixer, place.mixer
    formula = mix_formula(spec, place.side)
    return {
        "formula": formula,
        "what": spec.describe(),
        "read": rounded(step.read[0]),
        "result": rounded(step.added[0]),
    }


def _add_after(place: PathPlace, step: StreamStep) -> dict[str, Any]:
    stream = place.stream
    steps = stream.steps if stream.parallel else [step]
    norm = stream.norm if stream.parallel else step.sublayer.norm_sum
    before = steps[0].before[0]
    added = torch.stack([one.added[0].double() for one in steps])
    total = added.sum(dim=0) + (before.double() if stream.residual else 0)
    return {
        "formula": add_formula(place.block, step.name.split(".")[-1]),
        "before": rounded(before) if stream.residual else None,
        "added": [[one.name.split(".")[-1], rounded(one.added[0])] for one in steps],
        "total": rounded(total),
        "norm": kind_of(norm),
        "result": rounded(steps[-1].after[0]),
        "check": gap(_normed(norm, total), steps[-1].after[0]),
    }


def _feedforward(place: PathPlace) -> dict[str, Any]:
    step, (taps, seen) = place.step(".feedforward"), recording()
    layout = make_layout(1, 1, step.read.device)
    inner = step.sublayer.inner(step.read[None], Context(layout, layout, taps=taps))[0, 0]
    spec = place.spec.feedforward
    found: dict[str, Any] = {"hidden": None, "router": None}
    if "hidden" in seen:
        hidden = seen["hidden"][0, 0].double()
        top = hidden.abs().topk(min(TOP_NEURONS, len(hidden))).indices.tolist()
        active = float((hidden.abs() > 1e-6).double().mean())
        found["hidden"] = {"count": len(hidden), "active": active, "top": [[i, float(hidden[i])] for i in top]}
    if "router" in seen:
        weights = seen["router"][0, 0].double()
        found["router"] = [[i, float(weights[i])] for i in weights.nonzero()[:, 0].tolist()]
    norm = step.sublayer.norm_branch
    return found | {
        "gated": spec.hidden_network is not None and spec.hidden_network.gates > 0,
        "formula": feedforward_formula(spec, norm),
        "what": spec.describe(),
        "read": rounded(step.read[0]),
        "normed": kind_of(step.sublayer.norm_in),
        "norm": kind_of(norm),
        "result": rounded(step.added[0]),
        "check": gap(_normed(norm, inner), step.added[0]),
    }


LAYER_STAGES: dict[str, Callable[[PathPlace], dict[str, Any]]] = {
    "norm": lambda place: norm_stage(_norm_before(place), place.mixer.before[0], place.mixer.read[0]),
    "qkv": _qkv,
    "scores": _scores,
    "mask": _mask,
    "softmax": _softmax,
    "values": _values,
    "out": _out,
    "mix": _mix,
    "add": lambda place: _add_after(place, place.stream.steps[-1] if place.stream.parallel else place.mixer),
    "ff": _feedforward,
    "ffadd": lambda place: _add_after(place, place.step(".feedforward")),
}


TOP_LOGITS = 8


def _hidden(trace: Trace, at: int) -> Tensor:
    """Return the hidden state that the head reads, or the pooled one."""
    final, head = trace.activations[f"{last_side(trace.run)}.final"], trace.run.model.head
    if isinstance(head, PooledHead):
        return pool(final, trace.layout(last_side(trace.run)), head.how)[0]
    return final[0, at]


def _pool(trace: Trace, at: int) -> dict[str, Any]:
    head = trace.run.model.head
    assert isinstance(head, PooledHead)
    tokens = trace.reading.tokens[last_side(trace.run)]
    own = trace.activations[f"{last_side(trace.run)}.final"][0, at]
    return {
        "formula": [POOLED[head.how]],
        "how": head.how,
        "count": len(tokens),
        "own": rounded(own),
        "result": rounded(_hidden(trace, at)),
    }


def _logits(trace: Trace, at: int) -> dict[str, Any]:
    """Return the largest outputs, and the best of them as hidden · row + bias."""
    model, head, x = trace.run.model, trace.run.model.head, _hidden(trace, at)
    best = outputs(trace, at)
    found: dict[str, Any] = {
        "formula": head_formula(head, trace.run.config.head),
        "tops": [[one.id, one.name, one.value] for one in best[:TOP_LOGITS]],
        "hidden": rounded(x),
        "row": None,
        "transform": False,
        "cap": None,
        "bias": 0.0,
    }
    row, bias, read = None, None, x
    match head:
        case VocabularyHead():
            read, bias, found["cap"] = head._hidden(x), head.bias, head.cap
            table = head.table if head.table is not None else model.table(model.target or model.source)
            row = None if head.format is not None or table is None else table[best[0].id]
            found["transform"] = not isinstance(head.transform, nn.Identity) or head.scale != 1
        case TokenHead() | SpanHead():
            read, row, bias = head.transform(x), head.linear.weight[best[0].id], head.linear.bias
            found["transform"] = not isinstance(head.transform, nn.Identity)
        case PooledHead() if isinstance(head.last, nn.Sequential):
            last = next(part for part in head.last if isinstance(part, nn.Linear))
            read, row, bias = head.transform(x), last.weight[best[0].id], last.bias
            found["transform"] = not isinstance(head.transform, nn.Identity)
        case EmbeddingHead():
            read = head.project(head.layers(head.transform(x)))
            found["transform"] = not torch.equal(read, x)
            result = head.last(read)
            scaled = not isinstance(head.last, nn.Identity)
            check = gap(result, trace.output[0])
            return found | {"read": rounded(read), "result": rounded(result), "scaled": scaled, "check": check}
        case _:
            return found | {"read": rounded(x), "check": None}
    if row is None:
        return found | {"read": rounded(read), "check": None}
    found["bias"] = 0.0 if bias is None else float(bias[best[0].id])
    dot = float(read.double() @ row.double())
    logit = dot + found["bias"]
    if found["cap"] is not None:
        logit = found["cap"] * float(torch.tanh(torch.tensor(logit / found["cap"], dtype=torch.float64)))
    return found | {
        "read": rounded(read),
        "row": rounded(row),
        "dot": dot,
        "logit": logit,
        "check": abs(logit - best[0].value),
    }


def _sample(trace: Trace, at: int) -> dict[str, Any]:
    best = outputs(trace, at)
    formula = _probability(trace) if best[0].p is not None else []
    return {"formula": formula, "separate": separate_labels(trace), "outputs": [list(one) for one in best]}


def _probability(trace: Trace) -> list[str]:
    """Return the formula of the probability of an output."""
    if separate_labels(trace):
        return ["p_i = σ(logit_i)"]
    if trace.run.config.head.output == "span":
        return ["p_t = exp(logit_t) / Σ_t exp(logit_t)"]
    logit = "logit_i / T" if predicts_tokens(trace.run) else "logit_i"
    return [f"p_i = exp({logit}) / Σ_i exp({logit})"]


HEAD_STAGES: dict[str, Callable[[Trace, int], dict[str, Any]]] = {"pool": _pool, "logits": _logits, "sample": _sample}
