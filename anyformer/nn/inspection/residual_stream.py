"""The residual stream inside a layer, rebuilt at some positions from what the taps recorded between layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from anyformer.attention.layout import Layout
from anyformer.config import Side
from anyformer.nn.block import ParallelBlock, Sublayer
from anyformer.nn.inspection.sublayers import stacks_of
from anyformer.nn.model import Transformer
from anyformer.nn.norm import normed
from anyformer.nn.pooling import Funnel
from anyformer.nn.stack import BlockStack, Skipped


@dataclass(frozen=True)
class StreamStep:
    """A sublayer in the residual stream; all tensors [n, d]."""

    name: str  # decoder.0.mixer
    sublayer: Sublayer
    before: Tensor  # the stream that it reads
    read: Tensor  # after the norm: input of the mixer or feed-forward
    added: Tensor  # what it adds: the tap `out`
    total: Tensor  # the sum, before a norm of it
    after: Tensor  # the stream afterwards; for parallel sublayers the same for all


@dataclass(frozen=True)
class LayerStream:
    """The sublayers of one layer, in order; parallel ones read and return the same stream."""

    steps: list[StreamStep]
    total: Tensor  # the sum, before a norm of it [n, d]
    end: Tensor
    residual: bool
    parallel: bool
    norm: nn.Module  # of the sum of parallel sublayers


def stream_names(model: Transformer) -> list[str]:
    """Return the taps that `layer_stream` reads."""
    names = []
    for side, stack in stacks_of(model).items():
        names += [f"{side}.embed", f"{side}.final"]
        for i, run in enumerate(stack.runs):
            names += [f"{side}.{i}.{part}.out" for part, _ in _sublayers(stack.blocks[run])] + [f"{side}.{i}.out"]
    return names


@torch.no_grad()
def layer_stream(
    model: Transformer, side: Side, seen: Mapping[str, Tensor], layer: int, positions: list[int], layout: Layout
) -> LayerStream:
    """Return the stream through a layer at some positions of its input, by the taps `stream_names` of a batch of one.

    Uses the operations of the model in its order, so the last stream equals the tap `{layer}.out`. In a layer that
    reads pooled tokens the positions are those of windows.
    """
    stack = stacks_of(model)[side]
    block = stack.blocks[stack.runs[layer]]
    start = layer_input(model, side, seen, layer, layout)[:, positions]
    parallel, residual = isinstance(block, ParallelBlock), True
    x = total = common = start
    norm, steps = cast(nn.Module, nn.Identity()), list[StreamStep]()
    if isinstance(block, ParallelBlock):
        common, norm = normed(block.norm_in, start, layout), block.norm_sum
    for part, sublayer in _sublayers(block):
        name, residual = f"{side}.{layer}.{part}", sublayer.residual
        added = seen[f"{name}.out"][:, positions]
        read = normed(sublayer.norm_in, common if parallel else x, layout)
        if parallel:
            total = total + added if steps or residual else added
            after = total
        else:
            total = x + added if residual else added
            after = normed(sublayer.norm_sum, total, layout)
        steps.append(StreamStep(name, sublayer, x[0], read[0], added[0], total[0], after[0]))
        x = start if parallel else after
    if parallel:
        x = normed(norm, total, layout)
        steps = [replace(step, total=total[0], after=x[0]) for step in steps]
    return LayerStream(steps, total[0], x[0], residual, parallel, norm)


@torch.no_grad()
def layer_input(model: Transformer, side: Side, seen: Mapping[str, Tensor], layer: int, layout: Layout) -> Tensor:
    """Return the input [1, t, d] of a layer, after pooling and skip connections; layer = depth: of the final norm."""
    stack = stacks_of(model)[side]
    if stack.pooling is not None:
        return pooled_stream(stack, side, seen, layer, layout)[0]
    x = seen[f"{side}.embed"] if layer == 0 else seen[f"{side}.{layer - 1}.out"]
    if stack.skips is None or layer == len(stack.runs):
        return x
    outputs = [seen[f"{side}.{i}.out"] for i in range(layer)]
    return stack.skips(layer, x, Skipped(seen[f"{side}.embed"], outputs))


@torch.no_grad()
def pooled_stream(
    stack: BlockStack, side: Side, seen: Mapping[str, Tensor], layer: int, layout: Layout
) -> tuple[Tensor, Tensor | None]:
    """Return the input of a layer in a stack that pools its tokens, and the output of the first stage if it is over."""
    funnel, x = Funnel(stack.pooling, layout, 1), seen[f"{side}.embed"]
    levels = [*stack.levels, 0]
    for i in range(layer):
        funnel.to(levels[i], x)
        x = seen[f"{side}.{i}.out"]
    return funnel.to(levels[layer], x), funnel.skip


def _sublayers(block: nn.Module) -> list[tuple[str, Sublayer]]:
    return [(name, part) for name, part in block.named_children() if isinstance(part, Sublayer)]
