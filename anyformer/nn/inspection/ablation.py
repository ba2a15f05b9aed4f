"""Ablation of attention heads: the output without some heads, and the effect of each head on a scalar of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.kernels.conventions import IGNORE
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.sublayers import attention_at, attentions, check_heads, parse_name, refuse_state, stacks_of
from anyformer.nn.model import Transformer

Measure = Callable[[Tensor], Tensor]


def logit(token: int, at: int = -1) -> Measure:
    """Return a function that sums over the batch the logit of a token (or of a label) at position `at`."""
    return lambda output: output[:, at, token].sum() if output.dim() == 3 else output[:, token].sum()


def log_probability(labels: Tensor) -> Measure:
    """Return a function that sums log-probabilities of labels [b, t], or [b] for outputs [b, labels]; -100: ignored."""

    def measure(output: Tensor) -> Tensor:
        has_label = labels != IGNORE
        log_p = output.log_softmax(dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return log_p.masked_fill(~has_label, 0.0).sum()

    return measure


def loss(labels: Tensor) -> Measure:
    """Return a function that computes the mean cross-entropy of labels [b, t]; -100 is ignored."""
    count = (labels != IGNORE).sum().clamp(min=1)
    total = log_probability(labels)
    return lambda output: -total(output) / count


@contextmanager
def disable_heads(model: Transformer, heads: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Run the block as if the output projections had zeros in the columns of these heads.

    A module with shared weights runs in several layers; the number of its calls shows which layer it is in.
    """
    layers: dict[MultiHeadAttention, list[Sequence[int]]] = {}
    for name, attention in attentions(model).items():
        layers.setdefault(attention, []).append(heads.get(name, ()))
    with ExitStack() as stack:
        for attention, off in layers.items():
            if any(off):
                hook = attention.out.register_forward_pre_hook(_zeroing_hook(attention.heads, off))
                stack.callback(hook.remove)
        yield


def _zeroing_hook(heads: int, off: Sequence[Sequence[int]]) -> Any:
    calls = count()

    def change(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:  # [b, t, h·k_v]
        disabled = off[next(calls) % len(off)]
        x = inputs[0].unflatten(-1, (heads, -1))
        mask = torch.zeros(heads, 1, dtype=torch.bool, device=x.device)
        mask[list(disabled)] = True
        return x.masked_fill(mask, 0.0).flatten(-2)

    return change


def run_without_heads(
    model: Transformer, heads: Mapping[str, Sequence[int]], *inputs: Tensor | Inputs, **options: Any
) -> Tensor:
    """Return the model's output with the outputs of some heads set to zero: `{"decoder.1.mixer": [0, 3]}`.

    Equivalent to zeros in these heads' columns of the output projections.
    """
    for name, indices in heads.items():
        check_heads(attention_at(model, name), name, indices)
    with disable_heads(model, heads):
        output: Tensor = model(*inputs, **options)
    return output


@torch.no_grad()
def head_scores(model: Transformer, measure: Measure, *inputs: Tensor | Inputs, **options: Any) -> dict[str, Tensor]:
    """Return the change of a measure of the output when each head is switched off, one forward pass per head.

    The result has tables [layers, heads] for "encoder.mixer", "decoder.mixer" and "decoder.cross"; NaN where a layer
    has no such head.
    """
    refuse_state(options, "each head is switched off in a separate forward pass")
    known, base = attentions(model), measure(model(*inputs, **options))
    tables: dict[str, Tensor] = {}
    for name, attention in known.items():
        side, layer, sublayer = parse_name(name)
        kind = f"{side}.{sublayer}"
        if kind not in tables:
            columns = max(a.heads for other, a in known.items() if other.startswith(side) and other.endswith(sublayer))
            size = len(stacks_of(model)[side].runs), columns
            tables[kind] = torch.full(size, torch.nan, dtype=base.dtype, device=base.device)
        for head in range(attention.heads):
            without = run_without_heads(model, {name: [head]}, *inputs, **options)
            tables[kind][layer, head] = measure(without) - base
    return tables
