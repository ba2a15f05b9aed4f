"""Small mixtures of experts for tests."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from anyformer.config import (
    LM,
    Attention,
    Block,
    Experts,
    Gated,
    Gelu,
    ModelConfig,
    Plain,
    QuickGelu,
    RMSNorm,
    SigmoidTopK,
    SoftmaxTopK,
    Stack,
    Tanh,
    Tokens,
)
from anyformer.nn.context import Context
from anyformer.nn.experts import ExpertMixture
from tests.strategies import HERE, VOCAB

WIDTH, NOWHERE = 6, Context(HERE, HERE)
ROUTERS = [
    SoftmaxTopK(),
    SoftmaxTopK(normalize=False, bias=True),
    SigmoidTopK(),
    SigmoidTopK(normalize=False, scale=2.5),
    SigmoidTopK(groups=3, top_groups=2),
    SoftmaxTopK(normalize=False, scale=2.5, groups=3, top_groups=2),
]
networks = st.sampled_from(
    [
        Gated(width=5),
        Gated(width=4, activation=Gelu(), bias=True),
        Gated(width=4, activation=QuickGelu(), limit=0.3, offset=1.0),
        Plain(width=7, activation=Tanh()),
    ]
)


def made(spec: Experts, seed: int = 0) -> ExpertMixture:
    torch.manual_seed(seed)
    mixture = spec.build(WIDTH).double().eval()
    for tensor in (*mixture.parameters(), *mixture.buffers()):
        tensor.data = torch.randn_like(tensor)
    return mixture


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model_of(feedforward, **fields) -> ModelConfig:
    block = Block(mixer=Attention(heads=2), feedforward=feedforward, norm=RMSNorm())
    stack = Stack(depth=2, blocks=(block,), **fields)
    return ModelConfig(width=WIDTH, target=Tokens(vocab=VOCAB), decoder=stack, head=LM())
