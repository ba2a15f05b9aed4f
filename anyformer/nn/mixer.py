"""Mixers, the first sublayer of a block: the module of each spec, and what it stores in a cache."""

from typing import assert_never

from torch import nn

from anyformer.cache.layer_cache import Sizes
from anyformer.cache.states import StateSizes
from anyformer.config import (
    Attention,
    Convolution,
    Disentangled,
    FullyConnected,
    GatedDelta,
    Latent,
    LinearAttention,
    Mamba2,
    Mixer,
    NoMixer,
    PositionMixing,
    Recurrent,
)
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.attention_variants.disentangled import DisentangledAttention
from anyformer.nn.attention_variants.global_tokens import GlobalTokenAttention
from anyformer.nn.convolution import ConvolutionMixer
from anyformer.nn.dense import DenseMixer, PositionMixer
from anyformer.nn.recurrent import RecurrentMixer
from anyformer.nn.state_mixers.gated_delta import GatedDeltaMixer
from anyformer.nn.state_mixers.linear_attention import SUM_COLUMNS, LinearAttentionMixer
from anyformer.nn.state_mixers.mamba2 import Mamba2Mixer


def build_mixer(spec: Mixer, width: int) -> nn.Module | None:
    """Return the module of a mixer; None if the block has none."""
    match spec:
        case Attention(position=Disentangled() as scheme):
            return DisentangledAttention(spec, scheme, width)
        case Attention(global_projections=True):
            return GlobalTokenAttention(spec, width)
        case Attention():
            return MultiHeadAttention(spec, width)
        case LinearAttention():
            return LinearAttentionMixer(spec, width)
        case GatedDelta():
            return GatedDeltaMixer(spec, width)
        case Mamba2():
            return Mamba2Mixer(spec, width)
        case Recurrent():
            return RecurrentMixer(spec, width)
        case Convolution():
            return ConvolutionMixer(spec, width)
        case FullyConnected():
            return DenseMixer(spec, width)
        case PositionMixing():
            return PositionMixer(spec)
        case NoMixer():
            return None
        case _:
            assert_never(spec)


def cache_sizes(spec: Mixer, width: int) -> Sizes | StateSizes:
    """Return what one layer stores in a cache: keys and values of each token, or one state for each row."""
    match spec:
        case Attention():
            if isinstance(spec.compress, Latent):
                return Sizes(1, spec.compress.rank, spec.compress.rotary_width, spec.reach, quantisable=True)
            return Sizes(spec.groups, *spec.widths(width), spec.reach, quantisable=True)
        case LinearAttention(heads=h, convolution=conv):
            k, v = spec.widths(width)
            channels, tail = (h * (2 * k + v), conv - 1) if conv else (0, 0)
            return StateSizes(h, k, v + SUM_COLUMNS * (spec.normalizer == "sum"), channels, tail)
        case GatedDelta(heads=h):
            k, v = spec.widths(width)
            return StateSizes(h, k, v, 2 * spec.groups * k + h * v, spec.convolution - 1)
        case Mamba2(heads=h, groups=g, state=n):
            inner = spec.inner_width(width)
            return StateSizes(h, n, inner // h, inner + 2 * g * n, spec.convolution - 1)
        case Recurrent():
            return Sizes(1, spec.hidden(width), spec.state(width) - spec.hidden(width))  # h, and c
        case Convolution():
            return Sizes(1, width, 0, spec.before(causal=True))
        case FullyConnected() | PositionMixing():
            return Sizes(1, width, 0)  # what it read
        case NoMixer():
            return Sizes(0, 0, 0)
        case _:
            assert_never(spec)
