"""Attention maps of the real model, recomputed beside the fast kernels."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer.inspection.sublayers import attentions, check_heads, stacks_of
from anyformer.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer

Kind = Literal["encoder", "decoder", "cross"]


@torch.no_grad()
def attention_maps(
    model: Transformer,
    *inputs: Tensor,
    stacks: Collection[Kind] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The weights of every layer and head for ids (or source and target): {"encoder" | "decoder" | "cross": maps}.

    Maps are [layers, b, heads, t, s], rows are queries; of the `stacks`, `layers` and `heads` asked for, in that order,
    all if not given. Layers are counted as in the model, -1 is the last; those not asked for stay on their kernels, and
    those without attention have no map. Other options are those of the model's call (segments, ...). Layers of an
    encoder that read pooled tokens stand apart, by how many times those were pooled: "encoder.1", "encoder.2".
    """
    names = choose(model, stacks, layers)
    for name, attention in attentions(model).items():
        if heads is not None and name in names:
            check_heads(attention, name, heads)
    _, seen = run_with_taps(model, [f"{name}.weights" for name in names], *inputs, **options)
    maps: dict[str, list[Tensor]] = {}
    for name in names:
        side, layer, sublayer = name.split(".")
        level = getattr(model, side).levels[int(layer)]
        weights = seen[f"{name}.weights"]
        kind = "cross" if sublayer == "cross" else f"{side}.{level}" if level else side
        maps.setdefault(kind, []).append(weights if heads is None else weights[:, list(heads)])
    for kind, found in maps.items():
        if len(counts := {x.shape[1] for x in found}) > 1:
            raise ValueError(f"the {kind} layers differ in heads {sorted(counts)}: use run_with_taps for single layers")
    return {kind: torch.stack(found) for kind, found in maps.items()}


def choose(
    model: Transformer, stacks: Collection[Kind] | None = None, layers: Sequence[int] | None = None
) -> list[str]:
    """The names of the attentions in some stacks and layers, in the order of these; an error where there is none."""
    depths: dict[str, int] = {side: len(stack.runs) for side, stack in stacks_of(model).items()}
    known: dict[str, dict[int, str]] = {}
    for name in attentions(model):
        side, layer, sublayer = name.split(".")
        known.setdefault("cross" if sublayer == "cross" else side, {})[int(layer)] = name
    kinds = {kind: depths.get(kind, depths.get("decoder", 0)) for kind in known if stacks is None or kind in stacks}
    if not kinds:
        where = "the model" if stacks is None else " and ".join(stacks)
        raise ValueError(f"there is no attention in {where}" + (f", but in {', '.join(known)}" if known else ""))
    if layers is None:
        return [name for name in attentions(model) if any(name in known[kind].values() for kind in kinds)]
    found = []
    for n in layers:
        own = [known[kind].get(n + depth if n < 0 else n) for kind, depth in kinds.items()]
        if not any(own):
            there = " and ".join(f"{kind} in layers {ranged(known[kind])}" for kind in kinds)
            raise ValueError(f"layer {n}: there is attention of {there}")
        found += [name for name in own if name is not None]
    return found


def ranged(numbers: Collection[int]) -> str:
    """0 to 3, or 0, 2, 5."""
    first, last = min(numbers), max(numbers)
    if first == last:
        return str(first)
    return f"{first} to {last}" if len(numbers) == last - first + 1 else ", ".join(map(str, sorted(numbers)))
