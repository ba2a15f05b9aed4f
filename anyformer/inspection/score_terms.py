"""A score taken apart: what of it is about content, and what about position.

What a scheme adds to scores (T5, ALiBi) is apart already:           score = content + bias
Of positions added to embeddings (sinusoidal, learned), x = c + p:   score = (W_q c)·(W_k c) + (W_q c)·(W_k p) + ...

The second is exact in the first layer alone, and only where nothing but matrices stands between the embeddings and the
scores: a norm is not linear, and what layers above read is a sum in which content and position are no longer apart.
Rotary positions turn queries and keys: their part in a score is a factor, not a term (see `curves.py`).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.position_tables import Positions
from anyformer.config import Scheme, Side
from anyformer.inspection.sublayers import attention_at, layout_of, refuse_state, stacks_of
from anyformer.inspection.taps import run_with_taps
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.inputs import AnyInput, TokenInput
from anyformer.nn.linear import split
from anyformer.nn.model import Transformer
from anyformer.nn.stack import BlockStack


@torch.no_grad()
def score_terms(model: Transformer, name: str, *inputs: Tensor, **options: Any) -> dict[str, Tensor]:
    """The terms [b, h, t, s] of which an attention's scores (`decoder.0.mixer`) are the sum, before any mask.

    "content", and "bias" where a scheme adds one; with positions in the embeddings "content-content",
    "content-position", "position-content" and "position-position" (query first; biases of projections count as
    content), and an error that says why where these cannot be told apart.
    """
    refuse_state(options, "scores are taken apart in whole texts")
    attention = attention_at(model, name)
    side, layer = cast(Side, name.split(".")[0]), int(name.split(".")[1])
    stack = stacks_of(model)[side]
    _, seen = run_with_taps(model, [f"{name}.q", f"{name}.k", f"{side}.embed"], *inputs, **options)
    terms = {"content": _scores(attention, seen[f"{name}.q"], seen[f"{name}.k"])}
    if attention.cross:
        return terms  # no scheme acts between two texts
    if stack.levels[layer]:
        raise ValueError(f"{name} reads pooled tokens, whose scores are not taken apart")
    plan = stack.plans[cast(int, stack.follows[layer])]
    positions = cast(Positions, stack.schemes[plan.scheme])
    if type(positions.scheme).rotate is not Scheme.rotate:
        raise ValueError(f"{name}: {positions.scheme.kind} positions turn queries and keys, and add nothing to scores")
    x = seen[f"{side}.embed"]
    layout = layout_of(side, x, model, options)
    if stack.embedder.scheme.embeds():
        read = cast(AnyInput, model.source if side == "encoder" else model.target)
        if (why := _mixed(attention, stack, read, layer)) is not None:
            raise ValueError(f"{name}: content and position cannot be told apart, {why}")
        place = stack.embed(x.new_zeros(*x.shape[:2], read.inner_width), layout)
        if isinstance(read, TokenInput) and read.project is not None and not read.early:
            place = F.linear(place, read.project.weight)
        nothing = _project(attention, torch.zeros_like(x))
        content = _project(attention, x - place)
        position = [part - none for part, none in zip(_project(attention, place), nothing, strict=True)]
        both = {"content": content, "position": position}
        terms = {f"{a}-{b}": _scores(attention, both[a][0], both[b][1]) for a in both for b in both}
    bias = positions.bias(layout.positions, layout.positions, causal=not plan.pattern.looks_ahead)
    if bias is not None:
        terms["bias"] = bias.expand(x.shape[0], -1, -1, -1)
    return terms


def _scores(attention: MultiHeadAttention, q: Tensor, k: Tensor) -> Tensor:
    """cap(q kᵀ · scale), as attention has it before positions and masks."""
    scores = at_least_fp32(q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT) * attention.scale
    return scores if attention.cap is None else attention.cap * torch.tanh(scores / attention.cap)


def _mixed(attention: MultiHeadAttention, stack: BlockStack, read: AnyInput, layer: int) -> str | None:
    """Why content and position cannot be told apart; None if they can."""
    block = stack.blocks[stack.runs[layer]]
    norms = getattr(block, "norm_in", nn.Identity()), cast(nn.Module, block.mixer).norm_in
    if layer:
        return "past the first layer: it reads what layers below made of both"
    if not isinstance(read.norm, nn.Identity) or not all(isinstance(norm, nn.Identity) for norm in norms):
        return "behind a norm, which is not linear"
    if attention.norms or attention.cap is not None:
        return "where queries and keys are normed, or scores are capped"
    return "in latent attention" if attention.latent is not None else None


def _project(attention: MultiHeadAttention, x: Tensor) -> list[Tensor]:
    """Queries [b, h, t, k] and keys [b, g, t, k]."""
    parts, (query, key, _) = attention.qkv(x), attention.serves
    return [split(parts[query], attention.heads), split(parts[key], attention.groups)]
