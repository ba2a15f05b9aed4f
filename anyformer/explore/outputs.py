"""The outputs of a head at one position, by name: tokens, labels, tags, ends of an answer, a number, a vector."""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from anyformer.attention.layout import make_layout
from anyformer.config import ConfigError, Fault, LabelHead
from anyformer.explore.trace import Trace, initial_position, last_side, output_kind, predicts_tokens
from anyformer.nn.heads import TokenHead
from anyformer.nn.inspection.sublayers import stacks_of
from anyformer.nn.norm import normed
from anyformer.runs.run import Run

TOP_OUTPUTS = 12


class Output(NamedTuple):
    """One output of the head."""

    id: int  # of a token or label
    name: str
    value: float
    p: float | None  # None: it has no probability


def position(trace: Trace, at: int) -> int:
    """Return a position of the stack that predicts; -1 is the initial one."""
    tokens = trace.reading.tokens[last_side(trace.run)]
    if not -1 <= at < len(tokens):
        raise ConfigError([Fault("at", f"= {at}: there are {len(tokens)} tokens, from 0")])
    return initial_position(trace) if at == -1 else at


@torch.no_grad()
def values_at(trace: Trace, at: int) -> Tensor:
    """Return all outputs of the head at a position, or of the text, as the model computes them."""
    model, side = trace.run.model, last_side(trace.run)
    if predicts_tokens(trace.run):
        hidden = trace.activations[f"{side}.final"][:, at : at + 1]
        return model.apply_head(hidden, make_layout(1, 1, hidden.device))[0, 0].float().cpu()
    head = model.head
    if isinstance(head, TokenHead) and head.transitions is not None:  # without those of the CRF
        hidden = trace.activations[f"{side}.final"][0, at]
        return cast(Tensor, head.linear(head.transform(hidden))).float().cpu()
    output = trace.output[0].float().cpu()
    return output[at] if output.dim() > 1 else output


def outputs(trace: Trace, at: int) -> list[Output]:
    """Return the largest outputs with their probabilities, in descending order."""
    values, names = values_at(trace, at), output_names(trace)
    p: Tensor | None = None
    head = trace.run.config.head
    match head.output:
        case "span":
            p = trace.output[0].double().cpu().softmax(dim=0)[at]
        case "embedder" | "none":
            pass
        case "classifier" if len(values) == 1:
            pass
        case _ if not head.joint:
            p = probabilities_of(trace, values.double())
    order = (values.abs() if head.output in ("embedder", "none") else values).argsort(descending=True)
    return [
        Output(i, names(i), float(values[i]), None if p is None else float(p[i])) for i in order[:TOP_OUTPUTS].tolist()
    ]


def chosen(trace: Trace, at: int, index: int) -> Output:
    """Return one output by its index; -1 is the most probable."""
    if index == -1:
        return outputs(trace, at)[0]
    values = values_at(trace, at)
    if not 0 <= index < len(values):
        raise ConfigError([Fault("output", f"= {index}: there are {len(values)} outputs, from 0")])
    known = next((one for one in outputs(trace, at) if one.id == index), None)
    if known is not None:
        return known
    p = float(values.double().softmax(dim=0)[index]) if predicts_tokens(trace.run) else None
    return Output(index, output_names(trace)(index), float(values[index]), p)


def has_probabilities(run: Run) -> bool:
    """Return whether the head gives probabilities of tokens, labels or tags, each position for itself."""
    return output_kind(run) in ("tokens", "masked", "labels", "tags") and not run.config.head.joint


def separate_labels(trace: Trace) -> bool:
    """Return whether each label is decided separately."""
    return trace.run.spec.several_labels and trace.run.config.head.output == "classifier"


def probabilities_of(trace: Trace, values: Tensor) -> Tensor:
    """Return the probabilities of outputs [..., outputs]."""
    return values.sigmoid() if separate_labels(trace) else values.softmax(dim=-1)


@torch.no_grad()
def logits_after(trace: Trace, layer: int, first: int, stop: int) -> Tensor:
    """Return the outputs [positions, outputs] that the head has after a layer, -1: after the embeddings.

    Equals `logit_lens`, whose result for all layers and positions of a long text would be too large.
    """
    model, side = trace.run.model, last_side(trace.run)
    stack = stacks_of(model)[side]
    is_last = layer == len(stack.runs) - 1
    x = trace.activations[f"{side}.final" if is_last else f"{side}.embed" if layer < 0 else f"{side}.{layer}.out"]
    if trace.run.config.head.per_row:
        layout = trace.layout(side)
    else:
        x, layout = x[:, first:stop], make_layout(1, stop - first, x.device)
    logits = model.apply_head(x if is_last else normed(stack.final_norm, x, layout), layout).float().cpu()
    return logits if logits.dim() == 2 else logits[0]


def output_names(trace: Trace) -> Callable[[int], str]:
    """Return a function from the index of an output to its name: a token or a label."""
    run = trace.run
    labels: tuple[str, ...]
    if predicts_tokens(run):
        return run.tokenizer.token
    if isinstance(run.config.head, LabelHead):
        labels = run.spec.label_names or ()
    else:
        labels = ("first", "last") if run.config.head.output == "span" else ()
    return lambda i: labels[i] if i < len(labels) else f"[{i}]"
