"""The last stages of the path: from hidden states to the outputs of the head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.explore.formulas import POOLED, head_formula
from anyformer.explore.outputs import outputs, separate_labels
from anyformer.explore.trace import Trace, last_side, predicts_tokens
from anyformer.explore.vectors import gap, rounded
from anyformer.nn.heads import EmbeddingHead, PooledHead, SpanHead, TokenHead, VocabularyHead, pool

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
