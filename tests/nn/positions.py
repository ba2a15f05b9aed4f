"""Decoders with a position scheme and rotated vectors, for tests of positions."""

import torch
from torch import Tensor

from anyformer.config import LM, Attention, Block, ModelConfig, Position, Rotary, Stack, Tokens


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decoder(position: Position, *mixers: Attention, depth: int = 2, share: bool = False) -> ModelConfig:
    blocks = tuple(Block(mixer=mixer) for mixer in mixers or (Attention(heads=2),))
    stack = Stack(depth=depth, blocks=blocks, position=position, share=share)
    return ModelConfig(width=8, target=Tokens(vocab=11), decoder=stack, head=LM())


def turn(scheme: Rotary, x: Tensor, positions: list[int]) -> Tensor:
    return scheme.rotate(x, scheme.prepare(torch.tensor([positions]), x.shape[-1]))
