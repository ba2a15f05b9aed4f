"""The logit lens: the prediction a model would make after each of its layers (nostalgebraist 2020)."""

from typing import Any

import torch
from torch import Tensor

from anyformer.config import Side
from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.sublayers import refuse_state, stacks_of
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from anyformer.nn.norm import normed


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
