"""Effect of positions on attention scores: as terms beside content, and by distance.

Bias on scores (T5, ALiBi):                                       score = content + bias
Vectors of distances (disentangled):                              score = content + q·K(p) + Q(p)·k
Positions added to embeddings (sinusoidal, learned), x = c + p:   score = (W_q c)·(W_k c) + (W_q c)·(W_k p) + ...

The second split is exact only in the first layer, and only if all between embeddings and scores is linear: a norm is
not, and later layers read a sum in which content and position are mixed. Rotary positions rotate queries and keys:
their effect on a score is a factor, not a term (see `position_curves`).
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.lowered import Relation
from anyformer.attention.position_module import Positions
from anyformer.config import Position
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.attention_variants.cross import CrossAttention
from anyformer.nn.attention_variants.disentangled import DisentangledAttention
from anyformer.nn.attention_variants.global_tokens import GlobalTokenAttention
from anyformer.nn.attention_variants.latent import LatentAttention
from anyformer.nn.block import ParallelBlock
from anyformer.nn.inputs import InputModule, Inputs
from anyformer.nn.inspection.sublayers import attention_at, attentions, parse_name, refuse_state, stacks_of
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.linear import split_heads
from anyformer.nn.model import Transformer
from anyformer.nn.stack import BlockStack


@torch.no_grad()
def score_terms(model: Transformer, name: str, *inputs: Tensor | Inputs, **options: Any) -> dict[str, Tensor]:
    """Return the terms [b, h, t, s] whose sum are the scores of an attention layer (`decoder.0.mixer`), before masks.

    The terms are "content", and "bias" if the scheme adds one. Positions of the kind `disentangled` add
    "content-distance" and "distance-content". With positions in the embeddings, "content-content", "content-position",
    "position-content" and "position-position" are in place of "content"; projection biases count as content. Names have
    the query first.
    Raises with the reason if content and position cannot be separated.
    """
    refuse_state(options, "scores are split for complete texts")
    attention = attention_at(model, name)
    side, layer, _ = parse_name(name)
    stack = stacks_of(model)[side]
    _, seen = run_with_taps(model, [f"{name}.q", f"{name}.k", f"{side}.embed"], *inputs, **options)
    terms = {"content": attention.scoring.scores(seen[f"{name}.q"], seen[f"{name}.k"])}
    if isinstance(attention, CrossAttention):
        return terms  # positions do not act between two texts
    if stack.levels[layer]:
        raise ValueError(f"{name} reads pooled tokens: their scores cannot be split")
    plan = stack.plans[cast(int, stack.plan_of_layer[layer])]
    positions = cast(Positions, stack.schemes[plan.scheme])
    if type(positions.scheme).rotate is not Position.rotate:
        raise ValueError(
            f"{name}: {positions.scheme.kind} positions rotate queries and keys, and add nothing to scores"
        )
    x = seen[f"{side}.embed"]
    layout = model.read_sides(*inputs, **options)[side][1]
    if stack.embedder.scheme.embeds():
        read = cast(InputModule, model.source if side == "encoder" else model.target)
        if (why := _why_mixed(attention, stack, read, layer)) is not None:
            raise ValueError(f"{name}: content and position cannot be separated {why}")
        position_part = stack.embed(x.new_zeros(*x.shape[:2], read.inner_width), layout)
        if (last := read.last_linear()) is not None:
            position_part = F.linear(position_part, last.weight)
        bias_only = _project(attention, torch.zeros_like(x))
        content = _project(attention, x - position_part)
        position = [part - bias for part, bias in zip(_project(attention, position_part), bias_only, strict=True)]
        both = {"content": content, "position": position}
        terms = {f"{a}-{b}": attention.scoring.scores(both[a][0], both[b][1]) for a in both for b in both}
    bias = positions.bias(layout.positions, layout.positions, causal=not plan.pattern.looks_ahead)
    if bias is not None:
        terms["bias"] = bias.expand(x.shape[0], -1, -1, -1)
    if isinstance(attention, DisentangledAttention):
        relation = Relation(relative=positions.relative(layout.positions, layout.positions))
        found = attention.distance_terms(relation, seen[f"{name}.q"], seen[f"{name}.k"])
        terms |= {name: term * attention.scale for name, term in found.items()}
    return terms


def _why_mixed(attention: MultiHeadAttention, stack: BlockStack, read: InputModule, layer: int) -> str | None:
    """Return why content and position cannot be separated, or None if they can."""
    block = stack.blocks[stack.runs[layer]]
    norms = [getattr(read, "norm", nn.Identity()), cast(nn.Module, block.mixer).norm_in]
    if isinstance(block, ParallelBlock):
        norms.append(block.norm_in)
    if layer:
        return "after the first layer: later layers read a mixture of both"
    if not all(isinstance(norm, nn.Identity) for norm in norms):
        return "after a norm, which is not linear"
    if attention.norms or attention.cap is not None:
        return "where queries and keys are normalised, or scores are capped"
    if isinstance(attention, GlobalTokenAttention):
        return "where global tokens have separate projections"
    return "in latent attention" if isinstance(attention, LatentAttention) else None


def _project(attention: MultiHeadAttention, x: Tensor) -> list[Tensor]:
    """Return queries [b, h, t, k] and keys [b, g, t, k]."""
    parts, (query, key, _) = attention.qkv.split(x), attention.serves
    return [split_heads(parts[query], attention.heads), split_heads(parts[key], attention.groups)]


@dataclass(frozen=True)
class Curve:
    """A value for each head and distance: a bias added to scores, or an envelope that scales them."""

    kind: Literal["bias", "envelope"]
    distances: Tensor  # int [n]: the query's position minus the key's
    values: Tensor  # [h, n]


@torch.no_grad()
def position_curves(model: Transformer, reach: int = 64) -> dict[str, Curve]:
    """Return the curve of each self-attention that has one (`decoder.0.mixer`), up to distance `reach`.

    Distances are negative, too, where a layer sees later tokens. bias: the term that T5 or ALiBi adds. envelope: with
    rotary positions, the score of equal query and key vectors of equal strength at all frequencies, relative to the
    score without positions: Σ_i cos(θ_i · distance) / frequencies.
    """
    curves = {}
    for name, attention in attentions(model).items():
        side, layer, sublayer = parse_name(name)
        if sublayer == "cross":
            continue  # positions do not act between two texts
        stack = stacks_of(model)[side]
        plan = stack.plans[cast(int, stack.plan_of_layer[layer])]
        positions, ahead = cast(Positions, stack.schemes[plan.scheme]), plan.pattern.looks_ahead
        device = next(model.parameters()).device
        distances = torch.arange(-reach if ahead else 0, reach + 1, device=device)
        start = torch.zeros(1, 1, dtype=torch.long, device=device)
        if positions.scheme.biases():
            bias = positions.bias(distances[None], start, causal=not ahead)  # [1, h, n, 1]
            assert bias is not None
            curves[name] = Curve("bias", distances, bias[0, :, :, 0])
        elif type(positions.scheme).rotate is not Position.rotate:
            q, k = (_rotated_ones(positions, at, plan.needs.rotary_width) for at in (distances[None], start))
            curve = (q * k).sum(dim=-1)[0] / plan.needs.rotary_width  # [1, n]
            curves[name] = Curve("envelope", distances, curve.expand(attention.heads, -1))
    return curves


def _rotated_ones(positions: Positions, at: Tensor, width: int) -> Tensor:
    rotation = positions.scheme.prepare(at, width)
    assert rotation is not None
    return positions.scheme.rotate(torch.ones(1, 1, at.shape[1], width, device=at.device), rotation)
