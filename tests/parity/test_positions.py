"""Sinusoidal waves, rotary scalings, ALiBi slopes and T5 buckets against those of `transformers`."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from anyformer.config import (
    Alibi,
    Disentangled,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    Rotary,
    RotaryScaling,
    Sinusoidal,
    T5Bias,
    YarnScaling,
)

# -- sinusoidal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [4, 7, 30, 64])
def test_sinusoidal(width: int) -> None:
    """As the paper has it, in Marian's order; and as fairseq has it, counted from behind the pad's id."""
    positions, nothing = torch.arange(300)[None], torch.zeros(1, 300, width)
    marian = MarianSinusoidalPositionalEmbedding(300, width).create_weight()
    torch.testing.assert_close(Sinusoidal(layout="halves").embed(nothing, positions, {})[0], marian, atol=1e-4, rtol=0)
    fairseq = M2M100SinusoidalPositionalEmbedding.get_embedding(302, width, padding_idx=1)[2:]
    ours = Sinusoidal(layout="halves", closed=True, offset=2).embed(nothing, positions, {})[0]
    torch.testing.assert_close(ours, fairseq, atol=1e-4, rtol=0)


# -- rotary ---------------------------------------------------------------------------------------------------------

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = [
    (LinearScaling(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    (LinearScaling(factor=1.5), {"rope_type": "linear", "factor": 1.5}),
    *(
        (
            YarnScaling(factor=factor, original_length=length),
            {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length},
        )
        for factor, length in ((4.0, 64), (16.0, 4096), (1.0, 2048), (8.0, 32_768))
    ),
    (
        YarnScaling(factor=4.0, original_length=512, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
    ),
    (  # a trained length shorter than a slow wave
        YarnScaling(factor=3.5, original_length=8, beta_fast=16.0, beta_slow=2.0, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 3.5,
            "original_max_position_embeddings": 8,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
    *(
        (
            Llama3Scaling(factor=factor, original_length=length),
            {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": length, **LLAMA3},
        )
        for factor, length in ((8.0, 64), (8.0, 8192), (32.0, 8192))
    ),
    (
        Llama3Scaling(factor=8.0, original_length=256, low_frequency=2.0, high_frequency=5.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "low_freq_factor": 2.0,
            "high_freq_factor": 5.0,
        },
    ),
]


def llama_config(width: int, **rope: object) -> LlamaConfig:
    return LlamaConfig(hidden_size=width, num_attention_heads=1, max_position_embeddings=64, rope_parameters=rope)


def assert_turns(rotary: Rotary, width: int, frequencies: torch.Tensor, temper: float) -> None:
    """At every position the angles are these frequencies times the position, and cos and sin are tempered."""
    positions = torch.arange(300)[None]
    cos, sin = (x.chunk(2, dim=-1)[1] for x in rotary.prepare(positions, width))  # twice the same, sin once negative
    assert cos.dtype == sin.dtype == torch.float32
    angles = positions[0, :, None] * frequencies
    torch.testing.assert_close(cos[0, 0], angles.cos() * temper, atol=1e-4, rtol=0)
    torch.testing.assert_close(sin[0, 0], angles.sin() * temper, atol=1e-4, rtol=0)
    # where an angle is below π it can be read off exactly
    torch.testing.assert_close(torch.atan2(sin, cos)[0, 0, 1], frequencies, atol=0, rtol=1e-5)
    torch.testing.assert_close(torch.hypot(sin, cos), torch.full_like(cos, temper))


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize(("width", "fraction"), [(16, 1.0), (64, 1.0), (64, 0.25)])
@pytest.mark.parametrize(("scaling", "theirs"), SCALINGS)
def test_rotary_scaling(scaling: RotaryScaling, theirs: dict[str, object], width: int, fraction: float, theta: float):
    config = llama_config(width, rope_theta=theta, partial_rotary_factor=fraction, **theirs)
    frequencies, temper = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"))
    assert_turns(Rotary(theta=theta, fraction=fraction, scaling=scaling), width, frequencies, temper)


@pytest.mark.parametrize(("width", "fraction"), [(16, 1.0), (64, 0.75)])
@pytest.mark.parametrize("side", ["short", "long"])
def test_longrope(side: str, width: int, fraction: float) -> None:
    """The factors of one side, and the factor of queries and keys of a model of texts four times as long."""
    n = int(width * fraction) // 2
    factors = {"short": tuple(1 + i / n for i in range(n)), "long": tuple(2.0 + i for i in range(n))}
    lists = {f"{name}_factor": list(each) for name, each in factors.items()}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 16, **lists}
    config = llama_config(width, rope_theta=1e4, partial_rotary_factor=fraction, **rope)
    length = 16 if side == "short" else 17
    frequencies, temper = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=length)
    scaling = LongRopeScaling(factors=factors[side], attention_factor=math.sqrt(1 + math.log(4) / math.log(16)))
    assert_turns(Rotary(fraction=fraction, scaling=scaling), width, frequencies, temper)


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_ntk_scaling(factor: float, width: int) -> None:
    """By its formula; and by their dynamic one, whose base grows as factor·length/trained - (factor - 1)."""
    base = 1e4 * factor ** (width / (width - 2))
    frequencies = base ** -(torch.arange(0, width, 2) / width)
    rotary = Rotary(scaling=NTKScaling(factor=factor))
    assert_turns(rotary, width, frequencies, temper=1.0)
    config = llama_config(width, rope_theta=1e4, rope_type="dynamic", factor=factor - 1)
    stretched, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=2 * 64)
    assert_turns(rotary, width, stretched, temper=1.0)


# -- ALiBi ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 33, 112])
def test_alibi(heads: int) -> None:
    """Theirs counts keys from the first, ours from the query: the same but for a constant, which softmax drops."""
    real = torch.ones(2, 40, dtype=torch.long)
    real[1, :15] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)
    theirs = build_alibi_tensor(real, heads, torch.float32).view(2, heads, 1, 40)
    torch.testing.assert_close(theirs[0, :, 0, 1], torch.tensor(Alibi.slopes(heads)))
    ours = Alibi().bias(positions, positions, heads, causal=True, tables={})
    gap = ours - theirs  # [b, h, t, s]
    seen = (positions[:, None, :] <= positions[:, :, None]) & (real[:, None, :] == 1) & (real[:, :, None] == 1)
    constant = gap.diagonal(dim1=-2, dim2=-1)[..., None]
    assert (gap - constant).masked_fill(~seen[:, None], 0).abs().max() <= 1e-5


# -- T5 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("buckets", "furthest"), [(32, 128), (32, 64), (32, 256), (16, 20), (64, 128), (128, 300), (8, 100), (4, 3)]
)
def test_t5_buckets(buckets: int, furthest: int, causal: bool) -> None:
    distances = torch.arange(-300, 301)  # query - key; theirs is key - query
    theirs = T5Attention._relative_position_bucket(
        -distances, bidirectional=not causal, num_buckets=buckets, max_distance=furthest
    )
    ours = T5Bias(buckets=buckets, max_distance=furthest).bucket(distances, causal)
    assert torch.equal(ours, theirs)
    assert ours.max() == buckets - 1  # the last one is reached


# -- DeBERTa --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buckets", "furthest"), [(256, 512), (256, 300), (32, 128), (9, 40), (8, 64), (2, 64), (3, 5), (64, 2048)]
)
def test_deberta_buckets(buckets: int, furthest: int) -> None:
    distances = torch.arange(-3000, 3001)
    theirs = make_log_bucket_position(distances, buckets, furthest).long()
    scheme = Disentangled(buckets=buckets, max_distance=furthest)
    assert torch.equal(scheme.bucket(distances), theirs)
    table = {name: torch.zeros(shape) for name, shape in scheme.tables(4, 1).items()}
    rows = scheme.relative(distances[None], torch.zeros(1, 1, dtype=torch.long), table).rows[0, :, 0]
    assert torch.equal(rows, (theirs + buckets).clamp(0, 2 * buckets - 1))
