"""Models whose answers depend on all of a prompt: with others, a wrong KV cache would not show."""

from dataclasses import replace
from typing import Any

import torch

import anyformer as af
from anyformer.nn.attention import MultiHeadAttention
from anyformer.runs.run import Run
from tests.decoding import small_models
from tests.explore import made

SEED = 4  # of weights with which all models of the tests answer in many ways


def responsive(model: af.Transformer, seed: int = SEED) -> af.Transformer:
    """Draw the weights of a model again, the largest in attention."""
    torch.manual_seed(seed)
    attention = {x for part in model.modules() if isinstance(part, MultiHeadAttention) for x in part.parameters()}
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() > 1:
                scale = 1 if "table" in name else 6 if x in attention else 4
                x.normal_(0, scale / x.shape[-1] ** 0.5)
            else:
                x.normal_(0 if name.endswith("bias") else 1, 0.1)
    return model


def decoder(seed: int = 0, **fields: Any) -> af.Transformer:
    return responsive(small_models.decoder(**fields), SEED + seed)


def pair(seed: int = 0, **fields: Any) -> af.Transformer:
    return responsive(small_models.pair(**fields), SEED + seed)


def make_run(name: str) -> Run:
    """Return one of the runs of `made`."""
    found = made.made(name)
    return replace(found, model=responsive(found.model))
