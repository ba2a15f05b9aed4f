"""Draft models and ragged prompts for tests of speculative decoding."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from anyformer.config import Attention, Block, Recurrent, Window
from anyformer.generation.strategy import Draft, Lookup
from anyformer.nn.model import Transformer
from tests.decoding.small_models import BLOCK, STACK
from tests.strategies import build, tokens

MIXED = STACK.model_copy(
    update={
        "depth": 3,
        "blocks": (
            Block(mixer=Attention(heads=2, pattern=Window(before=2, after=0))),
            Block(mixer=Recurrent(cell="lstm")),
            BLOCK,
        ),
    }
)
kinds = st.sampled_from(["auto", "static", "int8"])


def nearly(model: Transformer) -> Transformer:
    """A model that mostly agrees."""
    other = build(model.config)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.03)
    return other


def drafting(kind: str, model: Transformer, seed: int = 0) -> Draft | Lookup:
    match kind:
        case "itself":
            return Draft(model)
        case "another":
            return Draft(build(model.config, seed + 1))
        case "nearly":
            return Draft(nearly(model))
        case "lookup":
            return Lookup()
        case _:
            return Lookup(ngram=1)


def ragged(seed: int, lengths: list[int], side: str) -> tuple[Tensor, Tensor]:
    longest = max(lengths)
    segments = torch.full((len(lengths), longest), -1)
    for i, length in enumerate(lengths):
        segments[i, slice(longest - length, None) if side == "left" else slice(length)] = 0
    return tokens(seed, len(lengths), longest), segments
