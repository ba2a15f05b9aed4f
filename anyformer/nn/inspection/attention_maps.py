"""Attention maps: the weights of all layers and heads, recomputed next to the fast kernels, which do not store them."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.sublayers import Kind, attentions, attentions_by_kind, check_heads, parse_name, stacks_of
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer


@torch.no_grad()
def attention_maps(
    model: Transformer,
    *inputs: Tensor | Inputs,
    stacks: Collection[Kind] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return the attention weights for ids (or source and target): {"encoder" | "decoder" | "cross": maps}.

    Maps are [layers, b, heads, t, s]; rows are queries. `stacks`, `layers` and `heads` select and order them; None
    selects all. Layers are numbered as in the model; -1 is the last. Layers that are not selected stay on their fast
    kernels; layers without attention have no map. Other options are passed to the model (segments, ...). Layers of
    an encoder that read pooled tokens have their own keys, by how often the tokens were pooled: "encoder.1", ...
    """
    names = select_attentions(model, stacks, layers)
    for name, attention in attentions(model).items():
        if heads is not None and name in names:
            check_heads(attention, name, heads)
    _, seen = run_with_taps(model, [f"{name}.weights" for name in names], *inputs, **options)
    maps: dict[str, list[Tensor]] = {}
    for name in names:
        side, layer, sublayer = parse_name(name)
        level = stacks_of(model)[side].levels[layer]
        weights = seen[f"{name}.weights"]
        kind = "cross" if sublayer == "cross" else f"{side}.{level}" if level else side
        maps.setdefault(kind, []).append(weights if heads is None else weights[:, list(heads)])
    for kind, layer_maps in maps.items():
        if len(counts := {x.shape[1] for x in layer_maps}) > 1:
            raise ValueError(f"the {kind} layers differ in heads {sorted(counts)}: use run_with_taps for single layers")
    return {kind: torch.stack(layer_maps) for kind, layer_maps in maps.items()}


def select_attentions(
    model: Transformer, stacks: Collection[Kind] | None = None, layers: Sequence[int] | None = None
) -> list[str]:
    """Return the names of the attention layers in some stacks and layers, in that order; raise if there is none."""
    depths: dict[str, int] = {side: len(stack.runs) for side, stack in stacks_of(model).items()}
    known = attentions_by_kind(model)
    kinds = {kind: depths.get(kind, depths.get("decoder", 0)) for kind in known if stacks is None or kind in stacks}
    if not kinds:
        where = "the model" if stacks is None else " and ".join(stacks)
        raise ValueError(f"there is no attention in {where}" + (f", only in {', '.join(known)}" if known else ""))
    if layers is None:
        return [name for name in attentions(model) if any(name in known[kind].values() for kind in kinds)]
    names = []
    for n in layers:
        matches = [known[kind].get(n + depth if n < 0 else n) for kind, depth in kinds.items()]
        if not any(matches):
            available = " and ".join(f"{kind} layers {format_range(known[kind])}" for kind in kinds)
            raise ValueError(f"layer {n} has no attention: choose from {available}")
        names += [name for name in matches if name is not None]
    return names


def format_range(numbers: Collection[int]) -> str:
    """Return "0 to 3", or "0, 2, 5" where there are gaps."""
    first, last = min(numbers), max(numbers)
    if first == last:
        return str(first)
    return f"{first} to {last}" if len(numbers) == last - first + 1 else ", ".join(map(str, sorted(numbers)))
