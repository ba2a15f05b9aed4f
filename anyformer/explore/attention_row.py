"""One query of one head: scores, mask and weights of all keys, and the weighted sum of their values, in float64."""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from anyformer.explore.trace import Trace


@dataclass(frozen=True)
class AttentionRow:
    """The attention of a query to s keys."""

    q: Tensor  # [k]
    keys: Tensor  # [s, k]
    values: Tensor  # [s, k_v]
    dots: Tensor  # [s]: q · k
    scale: float
    cap: float | None
    bias: Tensor | None  # [s]; 0 where masked
    visible: Tensor  # bool [s]
    scores: Tensor  # [s]: -inf where masked
    sink: float | None
    weights: Tensor  # [s]
    normalizer: str

    @property
    def output(self) -> Tensor:
        """Σ weight · v, [k_v]."""
        return self.weights @ self.values


@torch.no_grad()
def attention_row(trace: Trace, name: str, head: int, query: int) -> AttentionRow:
    """Return the attention of one query in one head of an attention layer."""
    attention, seen = trace.attention(name), trace.activations
    share = attention.heads // seen[f"{name}.k"].shape[1]  # heads that share a key
    q = seen[f"{name}.q"][0, head, query].double().cpu()
    keys = seen[f"{name}.k"][0, head // share].double().cpu()
    v = seen[f"{name}.v"][0]
    values = v[head // (attention.heads // len(v))].double().cpu()
    if values.shape[1] > (width := seen[f"{name}.heads"].shape[-1]):  # a global query reads the second half
        values = values[:, :width] if bool(q[: len(q) // 2].any()) else values[:, width:]
    dense, visible = trace.mask(name), trace.visible(name)[query]
    dots = keys @ q
    scores = dots * attention.scale
    if attention.cap is not None:
        scores = attention.cap * torch.tanh(scores / attention.cap)
    bias = None
    if dense.bias is not None:
        rows = dense.bias[0]
        bias = rows[head if len(rows) > 1 else 0, query].double().cpu().masked_fill(~visible, 0)
        scores = scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    sink = None if attention.sinks is None else float(attention.sinks[head])
    match attention.normalizer:
        case _ if not bool(visible.any()):
            weights = torch.zeros_like(scores)
        case "relu":
            weights = scores.relu() / visible.sum()
        case "softmax":
            total = scores if sink is None else torch.cat((scores, scores.new_tensor([sink])))
            weights = total.softmax(dim=0)[: len(scores)]
        case _:
            assert_never(attention.normalizer)
    return AttentionRow(
        q,
        keys,
        values,
        dots,
        attention.scale,
        attention.cap,
        bias,
        visible,
        scores,
        sink,
        weights,
        attention.normalizer,
    )
