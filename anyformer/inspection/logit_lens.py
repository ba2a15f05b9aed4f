"""The logit lens: what a model would say after each of its layers (nostalgebraist 2020)."""

from typing import Any

import torch
from torch import Tensor

from anyformer.config import Side
from anyformer.inspection.sublayers import layout_of, refuse_state, stacks_of
from anyformer.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from anyformer.nn.norm import normed


@torch.no_grad()
def logit_lens(model: Transformer, *inputs: Tensor, **options: Any) -> Tensor:
    """What the final norm and the head make of the embeddings and of the residual stream after each layer.

    [1 + layers, b, t, v], or with whatever shape the head gives; the last is what the model says, to the bit in eval
    mode. Of an encoder–decoder the decoder's layers: its head reads no others.
    """
    refuse_state(options, "the lens reads whole texts")
    side: Side = "encoder" if model.decoder is None else "decoder"
    stack = stacks_of(model)[side]
    if stack.pooling is not None:
        raise ValueError("an encoder that pools its tokens has no stream of them to look through")
    names = [f"{side}.embed", *(f"{side}.{i}.out" for i in range(len(stack.runs)))]
    _, seen = run_with_taps(model, names, *inputs, **options)
    layout = layout_of(side, seen[names[0]], model, options)
    return torch.stack([model.apply_head(normed(stack.final_norm, seen[name], layout), layout) for name in names])
