"""Separate projections of global tokens, pair by pair, and configs that they do not fit."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.config import (
    Attention,
    BigBird,
    Block,
    ConfigError,
    Disentangled,
    Full,
    Latent,
    ModelConfig,
    NoFeedForward,
    NoNorm,
    NoPosition,
    Pattern,
    Stack,
    Tokens,
    Window,
)
from anyformer.kernels.conventions import PADDING, PLAIN, SEER
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.nn.positions import decoder
from tests.strategies import build, close, seeds, tokens

lengths, marked_tokens = st.integers(1, 12), st.lists(st.booleans(), min_size=12, max_size=12)
PATTERNS = (Window(before=2, after=2), Window(before=1, after=1, globals=2), BigBird(block=2, randoms=0), Full())


def encoder(pattern: Pattern, **attention: Any) -> ModelConfig:
    mixer = Attention(**{"heads": 2, "bias": True, "global_projections": True, "pattern": pattern, **attention})
    block = Block(mixer=mixer, feedforward=NoFeedForward(), norm=NoNorm())
    return ModelConfig(width=8, source=Tokens(vocab=11), encoder=Stack(depth=1, blocks=(block,)))


def by_hand(model: Transformer, x: Tensor, is_global: list[bool], pattern: Pattern) -> Tensor:
    """The attention of one layer on one text, pair by pair."""
    mixer = model.encoder.blocks[0].mixer.inner
    plain, own = (
        [x @ w.T + b for w, b in zip(part.weight.split(8), part.bias.split(8), strict=True)]
        for part in (mixer.qkv, mixer.global_qkv)
    )
    rows = []
    for i, wide in enumerate(is_global):
        q, k, v = own if wide else plain
        seen = [
            j for j in range(len(x)) if wide or is_global[j] or bool(pattern.sees(torch.tensor(i), torch.tensor(j)))
        ]
        heads = []
        for part in (slice(0, 4), slice(4, 8)):
            scores = torch.stack([q[i, part] @ k[j, part] / math.sqrt(4) for j in seen])
            heads.append(scores.softmax(0) @ v[seen][:, part])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ mixer.out.weight.T


@given(st.sampled_from(PATTERNS), lengths, marked_tokens, seeds)
def test_pair_by_pair(pattern: Pattern, n: int, marked: list[bool], seed: int) -> None:
    """With marks anywhere, beside the first positions of the pattern; and the taps of the weights are those used."""
    model, ids = build(encoder(pattern), seed), tokens(seed, 2, n)
    marks = torch.where(torch.tensor(marked[:n]), SEER, PLAIN)[None].expand(ids.shape)
    names = ("embed", "0.mixer.heads", "0.mixer.weights", "0.mixer.v")
    y, seen = run_with_taps(model, [f"encoder.{name}" for name in names], ids, marks=marks)
    first = model.config.encoder.blocks[0].mixer.global_positions
    is_global = [mark or i < first for i, mark in enumerate(marked[:n])]
    x, heads, weights, v = (seen[f"encoder.{name}"] for name in names)
    for row in range(len(ids)):
        close(y[row], x[row] + by_hand(model, x[row], is_global, pattern))
    halves = (weights @ v).chunk(2, dim=-1)
    close(heads, torch.where(torch.tensor(is_global)[None, None, :, None], halves[1], halves[0]))


@given(lengths, seeds)
def test_without_global_tokens_it_is_plain_attention(n: int, seed: int) -> None:
    """In evaluation without a second projection, and in training with one, whose gradient is 0."""
    pattern, ids = Window(before=2, after=2), tokens(seed, 2, n)
    model = build(encoder(pattern), seed)
    plain = build(encoder(pattern, global_projections=False), seed)
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if "global_qkv" not in name})
    expected = plain(ids)
    close(model(ids), expected)
    model.train()
    y = model(ids)
    close(y, expected)
    y.sum().backward()
    own = model.encoder.blocks[0].mixer.inner.global_qkv
    assert not own.weight.grad.any()
    assert not own.bias.grad.any()


@given(lengths, marked_tokens, st.integers(1, 9), seeds)
def test_padding_and_kernels_change_nothing(n: int, marked: list[bool], pads: int, seed: int) -> None:
    model, rows = build(encoder(Window(before=2, after=2, globals=1)), seed), 2
    ids = tokens(seed, rows, n)
    marks = torch.where(torch.tensor(marked[:n]), SEER, PLAIN)[None].expand(rows, n)
    expected = model(ids, marks=marks)
    longer, segments = ids.new_zeros(rows, n + pads), torch.full((rows, n + pads), PADDING)
    wide = torch.zeros_like(longer)
    longer[:, :n], segments[:, :n], wide[:, :n] = ids, 0, marks
    close(model(longer, segments=segments, marks=wide)[:, :n], expected)
    model.backend = "eager"
    close(model(ids, marks=marks), expected)


def test_without_global_tokens_its_cost_is_that_of_plain_attention() -> None:
    own, plain = (count(encoder(Window(before=2, after=2), global_projections=own), length=16) for own in (True, False))
    assert own.parameters - plain.parameters == 3 * 8 * 9
    assert own.flops == plain.flops


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compress": Latent(rank=3, rotary_width=2), "key_width": 4}, "global tokens have no separate compress"),
        ({"projections": "shared_qk"}, "global tokens have no separate projections"),
        ({"value_residual": True}, "global tokens have no separate value_residual"),
        ({"position": Disentangled(buckets=4)}, "disentangled positions compare distances with one kind of query"),
    ],
)
def test_other_parts_of_queries_and_keys_do_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        encoder(Full(), **changes)


def test_a_decoder_has_none() -> None:
    with pytest.raises(ConfigError, match="only an encoder has separate projections of global tokens"):
        decoder(NoPosition(), Attention(heads=2, global_projections=True))
