"""Trace of a text: activations of one forward pass, from which all views are computed on request."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from anyformer.attention.cache.ring import Step
from anyformer.attention.layout import Layout
from anyformer.attention.lowered import Dense, Relation, densify
from anyformer.config import (
    ConfigError,
    Fault,
    Side,
    position_of,
)
from anyformer.explore.requests import TextRequest
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.context import PassOptions
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.inspection.ablation import disable_heads
from anyformer.nn.inspection.attention_maps import format_range
from anyformer.nn.inspection.count import Table, count
from anyformer.nn.inspection.logit_terms import term_names
from anyformer.nn.inspection.sublayers import Kind, attentions, attentions_by_kind, labels_at, parse_name, stacks_of
from anyformer.nn.inspection.taps import hidden_with_taps, run_with_taps
from anyformer.nn.model import Transformer
from anyformer.nn.pooling import Funnel
from anyformer.nn.stack import HERE as SITE
from anyformer.runs.run import Run
from anyformer.runs.run_inspection import Reading, read
from anyformer.tasks.base import Writer

EAGER = PassOptions("eager")
MAX_FLOPS = 4e12  # of one request: below a minute on a CPU
MAX_PASSES = 4096


@dataclass(frozen=True)
class Trace:
    """A text with the residual stream, what each sublayer added to it, and q, k, v and outputs of all heads.

    The forward pass runs when it is first needed: the tokens of a text and the stages of its path are there before.
    """

    run: Run
    reading: Reading
    off: dict[str, list[int]]  # disabled heads, by attention layer

    @property
    def output(self) -> Tensor:
        """The output of the head; empty if that predicts tokens, whose logits are recomputed at single positions."""
        return self._pass[0]

    @property
    def activations(self) -> dict[str, Tensor]:
        return self._pass[1]

    @cached_property
    def _pass(self) -> tuple[Tensor, dict[str, Tensor]]:
        model, (first, *more) = self.run.model, self.reading.inputs
        names = [f"{name}.{part}" for name in attentions(model) for part in ("q", "k", "v")] + term_names(model)
        with evaluating(model), disable_heads(model, self.off):
            if not predicts_tokens(self.run):
                return run_with_taps(model, names, first, *more, **self.reading.options)
            activations = hidden_with_taps(model, names, first, *more, **self.reading.options)
            return torch.empty(0), activations

    @cached_property
    def attentions(self) -> dict[Kind, dict[int, str]]:
        """The names of the attention layers, by kind and layer."""
        return attentions_by_kind(self.run.model)

    @cached_property
    def heads(self) -> dict[str, tuple[Kind, int, int]]:
        """All heads by name (`decoder.0.3`): kind, layer and number."""
        places = ((kind, layer, name) for kind, layers in self.attentions.items() for layer, name in layers.items())
        numbered = ((kind, layer, head) for kind, layer, name in places for head in range(self.attention(name).heads))
        return {f"{kind}.{layer}.{head}": (kind, layer, head) for kind, layer, head in numbered}

    def name(self, kind: Kind, layer: int, head: int | None = None) -> str:
        """Return the name of the attention of a kind in a layer; raise if there is none, or no such head."""
        if kind not in self.attentions:
            available = " and ".join(self.attentions) or "no stack"
            raise ConfigError([Fault("kind", f"= '{kind}': there is attention in {available}")])
        layers = self.attentions[kind]
        if layer not in layers:
            raise ConfigError([Fault("layer", f"= {layer}: must be {format_range(layers)}, where {kind} attention is")])
        heads = self.attention(layers[layer]).heads
        if head is not None and head >= heads:
            raise ConfigError([Fault("head", f"= {head}: {layers[layer]} has heads 0 to {heads - 1}")])
        return layers[layer]

    def attention(self, name: str) -> MultiHeadAttention:
        return attentions(self.run.model)[name]

    def relation(self, name: str) -> Relation:
        """Return the lowered mask and the positions of an attention layer."""
        side, layer, sublayer = parse_name(name)
        stack, relations = stacks_of(self.run.model)[side], self._relations(side, sublayer == "cross")
        plan = (stack.cross_plan_of_layer if sublayer == "cross" else stack.plan_of_layer)[layer]
        assert plan is not None
        return relations[plan]

    @torch.no_grad()
    def _relations(self, side: Side, cross: bool) -> list[Relation]:
        """Return the relations of all plans of a stack, computed once."""
        if (side, cross) not in self._known_relations:
            stack, layout = stacks_of(self.run.model)[side], self.layout(side)
            if cross:
                found = stack.crossings(layout, self.layout("encoder"), SITE, EAGER)
            else:
                levels = Funnel(stack.pooling, layout, 1).layouts
                found = stack.relations(levels, {None: Step(layout)}, False, SITE, EAGER)
            self._known_relations[side, cross] = found
        return self._known_relations[side, cross]

    @cached_property
    def _known_relations(self) -> dict[tuple[Side, bool], list[Relation]]:
        return {}

    def mask(self, name: str) -> Dense:
        """Return the mask and bias of an attention layer as they are applied."""
        relation = self.relation(name)
        if name.endswith("cross"):
            return densify(relation.lowered)
        q, k = self.activations[f"{name}.q"], self.activations[f"{name}.k"]
        return densify(self.attention(name).mask(relation, q, k))

    def positions(self, name: str) -> Tensor | None:
        """Return the positions [t] of the tokens of a self-attention; None if they have several coordinates."""
        side, layer, _ = parse_name(name)
        stack, layout = stacks_of(self.run.model)[side], self.layout(side)
        level = Funnel(stack.pooling, layout, 1).layouts[stack.levels[layer]]
        return None if level.coordinates is not None else level.positions[0].cpu()

    def keys(self, name: str) -> Tensor:
        """Return the keys [h, s, k], repeated for the heads that share them."""
        q, k = self.activations[f"{name}.q"][0], self.activations[f"{name}.k"][0]
        return k.repeat_interleave(len(q) // len(k), dim=0)

    @torch.no_grad()
    def weights(self, name: str) -> Tensor:
        """Return the attention weights [h, t, s], by the reference implementation."""
        a, q, k = self.attention(name), self.activations[f"{name}.q"], self.activations[f"{name}.k"]
        return a.weigh(q, k, self.mask(name), a.scoring)[0].float().cpu()

    @torch.no_grad()
    def scores(self, name: str) -> Tensor:
        """Return the scores [h, t, s] before the softmax, with -inf where a query does not see a key."""
        q, k, bias = self.activations[f"{name}.q"], self.activations[f"{name}.k"], self.bias(name)
        scores = self.attention(name).scoring.scores(q, k)[0].float().cpu()
        scores = scores if bias is None else scores + bias
        return scores.masked_fill(~self.visible(name), -torch.inf)

    @property
    def predicts_tokens(self) -> bool:
        return predicts_tokens(self.run)

    def visible(self, name: str) -> Tensor:
        """Return a mask, bool [t, s]: the keys that each query sees."""
        dense, (_, _, t, _) = self.mask(name), self.activations[f"{name}.q"].shape
        s = self.activations[f"{name}.k"].shape[2]
        visible = torch.ones(t, s, dtype=torch.bool)
        if dense.bias is not None:
            visible = (dense.bias[0] > -torch.inf).any(dim=0).cpu()
        elif dense.mask is not None:
            visible = dense.mask[0, 0].cpu()
        elif dense.causal:
            visible = visible.tril()
        return visible if dense.has_key is None else visible & dense.has_key[0, 0].cpu()

    @torch.no_grad()
    def bias(self, name: str) -> Tensor | None:
        """Return the position bias of the scores [h, t, s], -inf where a query does not see a key; None without one."""
        bias = self.mask(name).bias
        return None if bias is None else bias[0].expand(self.attention(name).heads, -1, -1).float().cpu()

    def position(self, name: str) -> str:
        """Return the kind of positions in an attention layer, or "cross"."""
        side, layer, sublayer = parse_name(name)
        stack = self.run.config.stacks[side]
        mixer = stack.unrolled()[layer].attention
        return "cross" if sublayer == "cross" or mixer is None else position_of(mixer, stack).kind

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        """Return the tokens of the queries and keys of an attention layer; pooled tokens are joined."""
        return labels_at(self.run.model, self.reading.tokens, name)

    def layout(self, side: Side) -> Layout:
        return self.run.model.read_sides(*self.reading.inputs, **self.reading.options)[side][1]

    @property
    def nbytes(self) -> int:
        """Bytes of the activations, once they are computed."""
        if "_pass" not in self.__dict__:
            return 0
        return self.output.nbytes + sum(x.nbytes for x in self.activations.values())


def trace_text(run: Run, request: TextRequest) -> Trace:
    """Return the trace of a text, with some heads disabled."""
    with evaluating(run.model), disable_heads(run.model, parse_heads(run.model, request.off)):
        reading = read(run, request.text, request.target)
    return trace_reading(run, reading, request.off)


def trace_reading(run: Run, reading: Reading, disabled: Sequence[str]) -> Trace:
    """Return the trace of tokens that were read before, with some heads disabled."""
    return Trace(run, reading, parse_heads(run.model, disabled))


def parse_heads(model: Transformer, off: Sequence[str]) -> dict[str, list[int]]:
    """Parse `decoder.0.3` and `cross.1.0` as heads of `decoder.0.mixer` and `decoder.1.cross`."""
    known, heads = attentions(model), dict[str, list[int]]()
    for head_name in off:
        kind, _, rest = head_name.partition(".")
        layer, _, head = rest.partition(".")
        name = f"decoder.{layer}.cross" if kind == "cross" else f"{kind}.{layer}.mixer"
        if name not in known or not head.isdecimal() or int(head) >= known[name].heads:
            raise ConfigError([Fault("off", f"= '{head_name}': there is no such head")])
        heads.setdefault(name, []).append(int(head))
    return heads


def predicts_tokens(run: Run) -> bool:
    """Return whether the head computes probabilities of tokens."""
    return run.config.head.predicts_tokens


def reads_on(run: Run) -> bool:
    """Return whether a model predicts every token of a text from those before it."""
    return isinstance(run.task, Writer) and run.task.continues and not run.task.marked


OutputKind = Literal["tokens", "masked", "labels", "number", "tags", "answer", "vector"]


def output_kind(run: Run) -> OutputKind:
    """Return what a run predicts: the next token, masked tokens, labels, a number, tags, an answer, a vector."""
    match run.config.head.output:
        case "lm":
            return "tokens"
        case "masked_lm":
            return "masked"
        case "classifier":
            return "number" if run.spec.label_names is None else "labels"
        case "token_labels":
            return "tags"
        case "span":
            return "answer"
        case "embedder" | "none":
            return "vector"


def initial_position(trace: Trace) -> int:
    """Return the position that is shown first: the first mask, the middle of the answer, or the last token.

    In the answer, one after which another token follows: an output equal to the input would look like it.
    In an encoder that predicts other than tokens it is in the middle, or the token that a head reads alone.
    """
    ids, mask = trace.reading.distinct_ids(last_side(trace.run))[0].tolist(), trace.run.tokenizer.mask
    if trace.run.config.head.output == "masked_lm" and mask in ids:
        return ids.index(mask)
    begins = trace.reading.begins
    if begins is not None and begins < len(ids):
        predict = range(begins - 1, len(ids) - 1)  # the tokens of the answer
        middle = predict[(len(predict) - 1) // 2]
        return next((at for at in predict[middle - predict[0] :] if ids[at] != ids[at + 1]), middle)
    head = trace.run.config.head
    if last_side(trace.run) == "encoder" and head.output != "masked_lm":
        pool = head.pooling or "mean"
        middle = len(ids) // 2
        return {"first": 0, "last": len(ids) - 1, "mean": middle, "max": middle}[pool]
    return len(ids) - 1


def last_side(run: Run) -> Side:
    return "decoder" if run.config.decoder else "encoder"


def count_text(trace: Trace, length: int | None = None) -> Table:
    """Return the costs of a forward pass over the text of a trace.

    `length` replaces the number of tokens of the stack that predicts; a source keeps its own.
    """
    tokens, config = trace.reading.tokens, trace.run.config
    source = len(tokens["encoder"]) if config.shape == "encoder-decoder" else None
    size = next(trace.run.model.parameters()).element_size()
    return count(config, length or len(tokens[last_side(trace.run)]), source_length=source, bytes_per_value=size)


def passes_allowed(trace: Trace) -> int:
    """Return how many forward passes over a text one request may take within `MAX_FLOPS`, at least one."""
    return max(1, min(MAX_PASSES, int(MAX_FLOPS / max(count_text(trace).flops, 1))))
