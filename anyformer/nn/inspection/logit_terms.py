"""Outputs from the residual stream: the logit lens, and direct logit attribution.

The lens applies the head after each layer. Attribution is a sum over embeddings, layers, heads, tokens and dimensions:
the residual stream is a sum. So is an output, once norms and activations between the stream and the output are frozen
at their values in this forward pass (`frozen.py`):

    output = ⟨u, embedding⟩ + Σ ⟨u, what a sublayer added⟩ + constant
    ⟨u, attention⟩ = Σ over heads h of ⟨u_h, Σ over tokens s of w[s] v[s]⟩ + constant,  u_h = u W_o restricted to head h

The constant collects biases. The sums are exact up to rounding, but they are no prediction of what the output would be
without a term: later layers and norms would change, too (`ablation.py` measures that).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.attention.layout import Layout
from anyformer.config import Side
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.frozen import freeze, freeze_head, pull
from anyformer.nn.inspection.residual_stream import LayerStream, layer_input, layer_stream, pooled_stream, stream_names
from anyformer.nn.inspection.sublayers import attentions, parse_name, refuse_state, stacks_of
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.linear import Linear
from anyformer.nn.model import Transformer
from anyformer.nn.norm import normed

Heads = Mapping[str, Collection[int]]


@torch.no_grad()
def logit_lens(model: Transformer, *inputs: Tensor | Inputs, **options: Any) -> Tensor:
    """Apply the final norm and the head to the embeddings and to the residual stream after each layer.

    Returns [1 + layers, b, t, v], or the head's own shape. The last entry is the model's output, to the bit in eval
    mode. In an encoder-decoder the layers are the decoder's.
    """
    refuse_state(options, "the logit lens reads complete texts")
    side: Side = "encoder" if model.decoder is None else "decoder"
    stack = stacks_of(model)[side]
    if stack.pooling is not None:
        raise ValueError("the logit lens needs one residual stream: this encoder pools its tokens")
    names = [f"{side}.embed", *(f"{side}.{i}.out" for i in range(len(stack.runs)))]
    _, seen = run_with_taps(model, names, *inputs, **options)
    layout = model.read_sides(*inputs, **options)[side][1]
    return torch.stack([model.apply_head(normed(stack.final_norm, seen[name], layout), layout) for name in names])


@dataclass(frozen=True)
class LogitTerms:
    """Terms of one output. A name is that of a tap without `out`: `decoder.embed`, `decoder.0.mixer`, ...

    `terms` and `constant` add up to the output. `heads` splits the term of an attention layer into those of its heads;
    `biases` has the rest. `directions` has u_h [n, k_v] of each head, for the `positions` of the output.
    """

    positions: list[int]
    terms: dict[str, float]
    constant: float
    heads: dict[str, list[float]]
    biases: dict[str, float]
    directions: dict[str, Tensor] = field(repr=False)  # [h, n, k_v]
    streams: dict[str, Tensor] = field(repr=False)  # u of each sublayer [n, d]

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return sum(self.terms.values()) + self.constant


def logit_terms(model: Transformer, index: int, *inputs: Tensor | Inputs, at: int = -1, **options: Any) -> LogitTerms:
    """Return the terms of output `index` (a token or label) at position `at`, for a batch of one."""
    refuse_state(options, "terms are computed for complete texts")
    with torch.no_grad():
        _, seen = run_with_taps(model, term_names(model), *inputs, **options)
        side: Side = "encoder" if model.decoder is None else "decoder"
        layout = model.read_sides(*inputs, **options)[side][1]
    return split_logit(model, seen, layout, index, at % seen[f"{side}.final"].shape[1])


def term_names(model: Transformer) -> list[str]:
    """Return the taps that `split_logit` reads."""
    names = stream_names(model)
    for name, attention in attentions(model).items():
        names += [f"{name}.heads"] + ([f"{name}.gate"] if attention.gate is not None else [])
    return names


@torch.no_grad()
def split_logit(
    model: Transformer,
    seen: Mapping[str, Tensor],
    layout: Layout,
    index: int,
    at: int,
    off: Heads | None = None,
    only: int | None = None,
) -> LogitTerms:
    """Return the terms of an output, by the taps `term_names` of a forward pass in which the heads `off` were disabled.

    A head that pools tokens uses several positions; `only` selects the share of one of them.
    """
    side: Side = "encoder" if model.decoder is None else "decoder"
    stack = stacks_of(model)[side]
    positions, u, constant = freeze_head(model, seen[f"{side}.final"][0], index, at)
    if only is not None:
        u, positions, constant = u[[positions.index(only)]], [only], 0.0
    found = _Walk(model, seen, layout, off or {}, positions)
    depth = len(stack.runs)
    x = layer_input(model, side, seen, depth, layout)[0, positions]
    u, constant = _through(stack.final_norm, x, u, constant)
    if stack.pooling is not None:
        _, first = pooled_stream(stack, side, seen, depth, layout)
        assert first is not None
        found.terms[f"{side}.pooled"] = _dot(u, x - first[0, positions])
        depth = stack.levels.index(1)
    u, constant = found.layers(side, depth, u, constant)
    found.terms[f"{side}.embed"] = _dot(u, seen[f"{side}.embed"][0, positions])
    terms = dict(reversed(found.terms.items()))
    return LogitTerms(positions, terms, constant, found.heads, found.biases, found.directions, found.streams)


class _Walk:
    """The way back from the final norm to the embeddings."""

    def __init__(
        self, model: Transformer, seen: Mapping[str, Tensor], layout: Layout, off: Heads, positions: list[int]
    ):
        self.model, self.seen, self.layout, self.off, self.positions = model, seen, layout, off, positions
        self.terms: dict[str, float] = {}
        self.heads: dict[str, list[float]] = {}
        self.biases: dict[str, float] = {}
        self.directions: dict[str, Tensor] = {}
        self.streams: dict[str, Tensor] = {}

    def layers(self, side: Side, depth: int, u: Tensor, constant: float) -> tuple[Tensor, float]:
        """Return the direction at the embeddings, and the constant."""
        skips = stacks_of(self.model)[side].skips
        at_embeddings, early_outputs = torch.zeros_like(u), dict[int, Tensor]()
        for i in reversed(range(depth)):
            u = u + early_outputs.get(i, 0)
            layer = layer_stream(self.model, side, self.seen, i, self.positions, self.layout)
            u, constant = self._parallel(layer, u, constant) if layer.parallel else self._steps(layer, u, constant)
            if skips is None:
                continue
            if skips.own is not None and skips.embedding is not None:
                at_embeddings = at_embeddings + float(skips.embedding[i]) * u
                u = float(skips.own[i]) * u
            early = skips.depth - 1 - i
            if skips.unet is not None and early < len(skips.unet):
                early_outputs[early] = early_outputs.get(early, 0) + float(skips.unet[early]) * u
        return u + at_embeddings, constant

    def _steps(self, layer: LayerStream, u: Tensor, constant: float) -> tuple[Tensor, float]:
        for step in reversed(layer.steps):
            u, constant = _through(step.sublayer.norm_sum, step.total, u, constant)
            self._add(step.name, step.added, u)
            u = u if layer.residual else torch.zeros_like(u)
        return u, constant

    def _parallel(self, layer: LayerStream, u: Tensor, constant: float) -> tuple[Tensor, float]:
        u, constant = _through(layer.norm, layer.total, u, constant)
        for step in reversed(layer.steps):
            self._add(step.name, step.added, u)
        return u if layer.residual else torch.zeros_like(u), constant

    def _add(self, name: str, added: Tensor, u: Tensor) -> None:
        self.terms[name], self.streams[name] = _dot(u, added), u
        attention = attentions(self.model).get(name)
        if attention is not None:
            self._split(name, attention, u)

    def _split(self, name: str, attention: MultiHeadAttention, u: Tensor) -> None:
        """Split the term of an attention layer into heads."""
        heads = gated_heads(self.seen, name, self.positions, self.off.get(name, ()))  # [h, n, k_v]
        joined = heads.transpose(0, 1).flatten(1)  # [n, h·k_v]
        weight, bias = output_matrix(attention.out, joined.shape[1])
        inner = joined @ weight.mT + bias
        side, layer, part = parse_name(name)
        stack = stacks_of(self.model)[side]
        block = stack.blocks[stack.runs[layer]]
        u, constant = _through(getattr(block, part).norm_branch, inner, u, 0.0)
        direction = (u @ weight).unflatten(1, (attention.heads, -1)).transpose(0, 1)  # [h, n, k_v]
        self.heads[name] = (direction * heads).sum(dim=(1, 2)).tolist()
        self.biases[name] = constant + float((u * bias).sum())
        if (gate := self.seen.get(f"{name}.gate")) is not None:
            direction = direction * gate[0][:, self.positions].double()
        self.directions[name] = direction


def gated_heads(seen: Mapping[str, Tensor], name: str, positions: list[int], off: Collection[int]) -> Tensor:
    """Return the outputs of the heads [h, n, k_v] as the output projection reads them; those that are off are 0."""
    heads = seen[f"{name}.heads"][0][:, positions].double()
    if (gate := seen.get(f"{name}.gate")) is not None:
        heads = heads * gate[0][:, positions].double()
    heads[list(off)] = 0
    return heads


def output_matrix(out: nn.Module, width: int) -> tuple[Tensor, Tensor]:
    """Return weight [d, h·k_v] and bias [d] of an output projection, in float64."""
    if isinstance(out, nn.Identity):
        return torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    assert isinstance(out, Linear)
    weight = out.dense(0).double()
    return weight, torch.zeros_like(weight[:, 0]) if out.bias is None else out.bias.double()


def _through(norm: nn.Module, x: Tensor, u: Tensor, constant: float) -> tuple[Tensor, float]:
    """Return the direction before a norm of x for one after it, and the constant with that of the norm."""
    direction, more = pull(freeze(norm, x), x, u)
    return direction, constant + more


def _dot(u: Tensor, x: Tensor) -> float:
    return float((u * x.double()).sum())
