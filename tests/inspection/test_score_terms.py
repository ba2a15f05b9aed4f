"""Terms of attention scores, curves of position schemes, and attribution."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    Convolution,
    Disentangled,
    FactorisedTable,
    Latent,
    LayerNorm,
    Learned,
    LinearScaling,
    ModelConfig,
    NoFeedForward,
    NoNorm,
    NoPosition,
    Parallel,
    Position,
    Rotary,
    Sinusoidal,
    Stack,
    T5Bias,
    Tokens,
)
from anyformer.nn.inspection.ablation import logit
from anyformer.nn.inspection.attention_maps import attention_maps
from anyformer.nn.inspection.attribution import attribute, integrated_gradients
from anyformer.nn.inspection.score_terms import position_curves, score_terms
from anyformer.nn.inspection.taps import run_with_patches
from anyformer.nn.model import Transformer
from tests.inspection.small_models import BLOCK, PAIR, READ, SOURCE, TARGET, bare, decoder
from tests.strategies import build, close

# -- terms of scores ------------------------------------------------------------------------------------------------


def from_terms(terms: dict[str, Tensor]) -> Tensor:
    scores = torch.stack(list(terms.values())).sum(dim=0)
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -torch.inf).softmax(dim=-1)


@pytest.mark.parametrize("position", [T5Bias(buckets=8, max_distance=12), Alibi(), NoPosition()], ids=lambda p: p.kind)
@pytest.mark.parametrize("changes", [{}, {"cap": 1.5}, {"qk_norm": LayerNorm()}], ids=["plain", "cap", "qk norm"])
def test_content_and_bias_add_up_to_the_scores(position: Position, changes: dict[str, object]):
    model = bare(position, **changes)
    maps = attention_maps(model, TARGET)["decoder"]
    for layer in (0, 1):
        terms = score_terms(model, f"decoder.{layer}.mixer", TARGET)
        assert list(terms) == (["content"] if position.kind == "none" else ["content", "bias"])
        close(from_terms(terms), maps[layer])
    if position.kind != "none":  # the bias depends on positions, not on tokens
        other = score_terms(model, "decoder.1.mixer", (TARGET + 1) % 11)
        assert torch.equal(other["bias"], terms["bias"])


@pytest.mark.parametrize("projections", ["shared", "separate"])
@pytest.mark.parametrize("changes", [{}, {"cap": 1.5}, {"qk_norm": LayerNorm()}], ids=["plain", "cap", "qk norm"])
def test_terms_of_content_and_distance_add_up_to_the_scores(projections: Any, changes: dict[str, object]):
    model = bare(Disentangled(buckets=3, max_distance=6, projections=projections), **changes)
    maps = attention_maps(model, TARGET)["decoder"]
    for layer in (0, 1):
        terms = score_terms(model, f"decoder.{layer}.mixer", TARGET)
        assert list(terms) == ["content", "content-distance", "distance-content"]
        close(from_terms(terms), maps[layer])


@pytest.mark.parametrize("position", [Sinusoidal(), Learned(length=9)], ids=lambda p: p.kind)
@pytest.mark.parametrize("late", [False, True], ids=["full", "factorised"])
def test_four_terms_of_positions_in_embeddings(position: Position, late: bool):
    """They add up; content-content does not change with positions, position-position not with tokens."""
    model = bare(position)
    if late:
        read = Tokens(vocab=11, table=FactorisedTable(width=4))
        model = build(model.config.model_copy(update={"target": read}))
    terms = score_terms(model, "decoder.0.mixer", TARGET)
    assert list(terms) == ["content-content", "content-position", "position-content", "position-position"]
    close(from_terms(terms), attention_maps(model, TARGET)["decoder"][0])
    moved = score_terms(model, "decoder.0.mixer", TARGET, positions=torch.arange(3, 7)[None])
    others = score_terms(model, "decoder.0.mixer", (TARGET + 1) % 11)
    close(moved["content-content"], terms["content-content"])
    close(others["position-position"], terms["position-position"])
    for name, changed in (("content-content", others), ("position-position", moved), ("content-position", moved)):
        assert not torch.allclose(changed[name], terms[name])


def test_terms_that_cannot_be_separated_are_refused():
    def refused(model: Transformer, name: str, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            score_terms(model, name, TARGET)

    refused(bare(Rotary()), "decoder.0.mixer", "rotary positions rotate queries and keys")
    refused(bare(Sinusoidal()), "decoder.1.mixer", "after the first layer")
    refused(bare(Sinusoidal(), cap=2.0), "decoder.0.mixer", "scores are capped")
    refused(decoder(Block(mixer=Attention(heads=2)), Sinusoidal()), "decoder.0.mixer", "after a norm")
    shared = Block(mixer=Attention(heads=2), order=Parallel(shared_norm=True))
    refused(decoder(shared, Sinusoidal()), "decoder.0.mixer", "after a norm")
    latent = Attention(heads=2, key_width=8, compress=Latent(rank=3, rotary_width=4))
    refused(decoder(Block(mixer=latent, norm=NoNorm()), Sinusoidal()), "decoder.0.mixer", "in latent attention")
    cross = score_terms(build(PAIR), "decoder.1.cross", SOURCE, TARGET)
    close(cross["content"].softmax(dim=-1), attention_maps(build(PAIR), SOURCE, TARGET)["cross"][1])


# -- curves ---------------------------------------------------------------------------------------------------------


def test_bias_curves():
    """ALiBi's curve is a line; T5's is the bias of the scores at that distance, in both directions in an encoder."""
    curve = position_curves(bare(Alibi()), reach=5)["decoder.1.mixer"]
    slopes = torch.tensor(Alibi.slopes(2))[:, None]
    close(curve.values, -slopes * torch.arange(6.0))
    assert (curve.kind, curve.distances.tolist()) == ("bias", list(range(6)))
    block = Block(mixer=Attention(heads=2), norm=NoNorm())
    stack = Stack(depth=1, blocks=(block,), position=T5Bias(buckets=8, max_distance=12))
    model = build(ModelConfig(width=8, source=READ, encoder=stack, head=LM()))
    curve = position_curves(model, reach=4)["encoder.0.mixer"]
    bias = score_terms(model, "encoder.0.mixer", SOURCE)["bias"][0]
    for i in range(5):
        for j in range(5):
            assert torch.equal(curve.values[:, curve.distances.tolist().index(i - j)], bias[:, i, j])


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_envelope_of_rotary(fraction: float):
    model = bare(Rotary(theta=100.0, fraction=fraction, scaling=LinearScaling(factor=2.0)), key_width=8)
    curve = position_curves(model, reach=6)["decoder.0.mixer"]
    waves = int(8 * fraction) // 2
    for head in range(2):
        for distance in range(7):
            envelope = sum(math.cos(distance / 2 * 100 ** (-i / waves)) for i in range(waves))
            assert float(curve.values[head, distance]) == pytest.approx((envelope + 4 - waves) / 4, abs=1e-6)
    assert (curve.kind, float(curve.values[0, 0])) == ("envelope", 1.0)


def test_no_curve_without_positions_in_scores():
    assert position_curves(bare(Sinusoidal())) == {}
    assert {name.split(".")[2] for name in position_curves(build(PAIR))} <= {"mixer"}


# -- attribution ----------------------------------------------------------------------------------------------------


def test_attributions_add_up_in_a_linear_model():
    """Gradient × input equals a bias-free linear function exactly; it does not for others."""
    block = Block(mixer=Convolution(width=3, bias=False), feedforward=NoFeedForward(), norm=NoNorm())
    result = attribute(linear := decoder(block, Sinusoidal()), logit(5), TARGET)
    close(result.total, linear(TARGET)[:, -1, 5].sum().detach())
    close(result.value, result.total)
    curved = attribute(decoder(BLOCK), logit(5), TARGET)
    assert not torch.allclose(curved.value, curved.total)


def test_attribution_is_the_derivative_along_each_embedding():
    """Scaling one token's embedding slightly changes the measure by its contribution; invisible tokens have none."""
    model, measure = build(PAIR), logit(5, at=1)
    result = attribute(model, measure, SOURCE, TARGET)
    assert {side: tuple(x.shape) for side, x in result.tokens.items()} == {"encoder": (2, 5), "decoder": (2, 4)}
    assert not result.tokens["decoder"][:, 2:].any()
    step = 1e-6

    def more(x: Tensor) -> Tensor:
        scale = torch.ones(5, dtype=x.dtype)
        scale[3] += step
        return x * scale[:, None]

    with torch.no_grad():
        grown = measure(run_with_patches(model, {"encoder.embed": more}, SOURCE, TARGET))
        derivative = (grown - measure(model(SOURCE, TARGET))) / step
    close(result.tokens["encoder"][:, 3].sum(), derivative, 1e-4)


def test_integrated_gradients_add_up_to_the_difference_from_zero_embeddings():
    """For a smooth model, up to the error of the integral; in a linear one they equal gradient × input."""
    block = Block(mixer=Convolution(width=3, bias=False), feedforward=NoFeedForward(), norm=NoNorm())
    linear = decoder(block, Sinusoidal())
    close(
        integrated_gradients(linear, logit(5), TARGET, steps=2).tokens["decoder"],
        attribute(linear, logit(5), TARGET).tokens["decoder"],
    )
    smooth = decoder(BLOCK.model_copy(update={"norm": NoNorm()}), Sinusoidal())
    result = integrated_gradients(smooth, logit(5), TARGET, steps=64)
    assert result.baseline is not None
    close(result.value, smooth(TARGET)[:, -1, 5].sum().detach())
    close(result.total, result.value - result.baseline, 1e-3)
    rough = integrated_gradients(smooth, logit(5), TARGET, steps=1)
    assert abs(rough.total - (rough.value - result.baseline)) > abs(result.total - (result.value - result.baseline))
