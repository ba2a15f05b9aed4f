"""What stands in a block's first sublayer: the module of each mixer, and what it keeps in a cache."""

from typing import assert_never

from torch import nn

from anyformer.config import Attention, Mixer, NoMixer
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.cache import Sizes


def build_mixer(spec: Mixer, width: int) -> nn.Module | None:
    """None: the block has no such sublayer."""
    match spec:
        case Attention():
            return MultiHeadAttention(spec, width)
        case NoMixer():
            return None
        case _:
            assert_never(spec)


def kept(spec: Mixer, width: int) -> Sizes:
    """What one layer keeps of each token, as groups of keys and values."""
    match spec:
        case Attention():
            return Sizes(spec.groups, *spec.widths(width))
        case NoMixer():
            return Sizes(0, 0, 0)
        case _:
            assert_never(spec)
