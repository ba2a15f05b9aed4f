"""Attention maps of the real model, recomputed beside the fast kernels."""

from typing import Any

import torch
from torch import Tensor

from anyformer.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer


@torch.no_grad()
def attention_maps(model: Transformer, *inputs: Tensor, **options: Any) -> dict[str, Tensor]:
    """The weights of every layer and head for ids (or source and target): {"encoder" | "decoder" | "cross": maps}.

    Maps are [layers, b, heads, t, s], rows are queries. Options are those of the model's call (segments, ...). Layers
    of an encoder that read pooled tokens stand apart, by how many times those were pooled: "encoder.1", "encoder.2".
    """
    _, seen = run_with_taps(model, ["*.weights"], *inputs, **options)
    maps: dict[str, list[Tensor]] = {}
    for name, weights in seen.items():  # in the order of the layers
        side, layer, sublayer, _ = name.split(".")
        level = getattr(model, side).levels[int(layer)]
        maps.setdefault("cross" if sublayer == "cross" else f"{side}.{level}" if level else side, []).append(weights)
    for kind, layers in maps.items():
        if len(heads := {x.shape[1] for x in layers}) > 1:
            raise ValueError(f"the {kind} layers differ in heads {sorted(heads)}: use run_with_taps for single layers")
    return {kind: torch.stack(layers) for kind, layers in maps.items()}
