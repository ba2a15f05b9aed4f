"""Disentangled attention by its formula: scores, gradients, kernels, and configs that it does not fit."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.attention.attend import choose
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import make_layout
from anyformer.config import (
    Attention,
    Block,
    ConfigError,
    Disentangled,
    Full,
    Latent,
    LayerNorm,
    MaskedLM,
    ModelConfig,
    NoFeedForward,
    NoNorm,
    Stack,
    Tokens,
)
from anyformer.kernels.runtime import Runtime
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.nn.positions import decoder
from tests.strategies import build, close, seeds, tokens

SCHEME = Disentangled(buckets=4, max_distance=7)


def encoder(scheme: Disentangled, **attention: Any) -> ModelConfig:
    mixer = Attention(**{"heads": 2, "bias": True, **attention})
    block = Block(mixer=mixer, feedforward=NoFeedForward(), norm=NoNorm())
    stack = Stack(depth=1, blocks=(block,), position=scheme)
    return ModelConfig(width=8, source=Tokens(vocab=11), encoder=stack)


def bucket(scheme: Disentangled, distance: int) -> int:
    """By hand: one for each near distance, then as many again up to the longest; all further ones share the last."""
    half, far = scheme.buckets // 2, abs(distance)
    if scheme.max_distance is not None and far > half:
        growth = math.log(far / half) / math.log((scheme.max_distance - 1) / half)
        far = math.ceil(round(growth * (half - 1), 5)) + half
    row = scheme.buckets + (far if distance > 0 else -far)
    return min(max(row, 0), 2 * scheme.buckets - 1)


def by_hand(model: Transformer, x: Tensor, scheme: Disentangled) -> Tensor:
    """The attention of one layer, pair by pair: q·k + q·K(p) + k·Q(p), over the root of 3 k."""
    mixer = model.encoder.blocks[0].mixer.inner
    tables = model.encoder.schemes[0].tables
    vectors = tables["relative"]
    if isinstance(scheme.norm, LayerNorm):
        mean, variance = vectors.mean(-1, keepdim=True), vectors.var(-1, keepdim=True, unbiased=False)
        vectors = (vectors - mean) / (variance + scheme.norm.eps).sqrt() * tables["norm_weight"] + tables["norm_bias"]
    (h, n, d), k_width = (mixer.heads, x.shape[1], x.shape[2]), x.shape[2] // mixer.heads
    weights, biases = mixer.qkv.weight.split(d), mixer.qkv.bias.split(d)
    q, k, v = (x[0] @ w.T + b for w, b in zip(weights, biases, strict=True))
    if mixer.own is None:
        position_q, position_k = (vectors @ weights[i].T + biases[i] for i in (0, 1))
    else:
        own, shift = mixer.own.weight.split(d), mixer.own.bias.split(d)
        position_q, position_k = (vectors @ own[i].T + shift[i] for i in (0, 1))
    out = []
    for head in range(h):
        part = slice(head * k_width, (head + 1) * k_width)
        rows = []
        for i in range(n):
            scores = []
            for j in range(n):
                row = bucket(scheme, i - j)
                one = q[i, part] @ k[j, part] + q[i, part] @ position_k[row, part] + k[j, part] @ position_q[row, part]
                scores.append(one / math.sqrt(3 * k_width))
            rows.append(torch.stack(scores).softmax(0) @ v[:, part])
        out.append(torch.stack(rows))
    return x[0] + torch.cat(out, dim=-1) @ mixer.out.weight.T


@pytest.mark.parametrize("projections", ["shared", "separate"])
@pytest.mark.parametrize("distance", [7, None])
@pytest.mark.parametrize("norm", [LayerNorm(eps=1e-7), NoNorm()], ids=["norm", "plain"])
def test_scores_and_gradients_by_hand(projections: Any, distance: int | None, norm: Any):
    scheme = Disentangled(buckets=4, max_distance=distance, projections=projections, norm=norm)
    model, ids = build(encoder(scheme)), tokens(3, 1, 9)
    results = []
    for reference in (False, True):
        model.zero_grad()
        x = model.source.table.weight[ids]
        out = by_hand(model, x, scheme) if reference else model(ids)[0]
        out.square().sum().backward()
        results.append((out, {name: p.grad.clone() for name, p in model.named_parameters()}))
    (found, gradients), (expected, by_loop) = results
    close(found, expected)
    for name, gradient in gradients.items():
        close(gradient, by_loop[name])


@pytest.mark.parametrize(("terms", "part"), [("position_to_content", 0), ("content_to_position", 1)])
def test_one_term_of_groups_is_both_without_the_other(terms: Any, part: int):
    """Three heads share one key, so the projections of the two terms differ in width."""
    both, one = (
        build(
            encoder(
                SCHEME.model_copy(update={"projections": "separate", "terms": x}),
                heads=3,
                kv_heads=1,
                key_width=4,
                value_width=4,
            )
        )
        for x in ("both", terms)
    )
    ids = tokens(3, 2, 9)
    whole, alone = (model.encoder.blocks[0].mixer.inner for model in (both, one))
    alone.scale = whole.scale
    with torch.no_grad():
        one.load_state_dict({**both.state_dict(), **{n: x for n, x in one.state_dict().items() if ".own." in n}})
        for name in ("weight", "bias"):
            kept, dropped = (getattr(whole.own, name).split(whole.own.parts)[i] for i in (part, 1 - part))
            getattr(alone.own, name).copy_(kept)
            dropped.zero_()
        close(one(ids), both(ids))


@pytest.mark.parametrize("terms", ["content_to_position", "position_to_content"])
def test_one_term_of_two(terms: Any):
    """The other term has no weights of its own, and the divisor is that of two terms."""
    model = build(encoder(Disentangled(buckets=4, max_distance=7, terms=terms, projections="separate")))
    mixer = model.encoder.blocks[0].mixer.inner
    assert mixer.own.weight.shape == (8, 8)
    assert mixer.scale == pytest.approx(1 / math.sqrt(2 * 4))


@given(st.integers(2, 9), st.sampled_from([7, 20, 64]), st.integers(-80, 80))
def test_buckets_are_odd_and_grow(buckets: int, longest: int, distance: int):
    scheme = Disentangled(buckets=buckets, max_distance=longest)
    at = scheme.bucket(torch.tensor([distance, -distance, distance + 1]))
    assert at[0] == -at[1]
    assert at[2] >= at[0]
    assert at[0] == distance or abs(distance) > buckets // 2


@given(seeds)
def test_far_keys_share_a_vector(seed: int):
    """Past the longest distance, moving a document along changes nothing but for the sign of the direction."""
    model, ids = build(decoder(SCHEME, depth=1), seed), tokens(seed, 1, 3)
    apart = [torch.tensor([[0, 1, far]]) for far in (50, 500)]
    close(*(model(ids, positions=positions) for positions in apart))


def test_kernels_without_a_bias_are_not_chosen():
    layout, cuda = make_layout(1, 2048, torch.device("cpu")), Runtime("cuda", torch.bfloat16, training=False)
    needs = Requirements(64, 64)
    for backend in ("auto", "flex", "varlen", "decode"):
        chosen = choose(backend, Full(), layout, layout, "self", SCHEME, needs, cuda)
        assert chosen.kernel == "sdpa"
        assert "disentangled positions add a bias of each text's own" in chosen.reason


def test_dropout_of_vectors_acts_in_training_alone():
    model = Transformer(encoder(Disentangled(buckets=4, max_distance=7, dropout=0.5))).double()
    ids = tokens(0, 1, 6)
    assert not torch.equal(model.train()(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheme": {"max_distance": 129}}, "encoder.position.max_distance = 129: must be more than buckets / 2 + 1 ="),
        ({"scheme": {"buckets": 1}}, "buckets"),
        (
            {"compress": Latent(rank=3, rotary_width=2), "bias": False, "key_width": 8},
            "encoder.position: of kind 'disentangled': projects its vectors like tokens, which latent attention",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str):
    scheme = changes.pop("scheme", {})
    with pytest.raises((ConfigError, ValueError), match=re.escape(said)):
        encoder(Disentangled(**scheme), **changes)


def test_a_model_from_scratch_learns_an_order():
    """Each token is the one two places before it: content alone cannot say which."""
    config = encoder(Disentangled(buckets=4, max_distance=8)).model_copy(update={"head": MaskedLM(bias=False)})
    torch.manual_seed(0)
    model = Transformer(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(120):
        ids = tokens(step, 64, 8)
        logits = model(ids)[:, 2:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, :-2].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.5 < math.log(11)
    ids = tokens(999, 1, 8)
    _, seen = run_with_taps(model.eval(), ["encoder.0.mixer.weights"], ids)
    heads = seen["encoder.0.mixer.weights"][0]
    assert max(head.diagonal(-2).mean().item() for head in heads) > 0.5
