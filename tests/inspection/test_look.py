"""Laws of looking inside: maps, patches, ablation, the lens, terms of scores, curves, attribution, caches."""

import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import anyformer.nn.attention as attention_module
from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    Classifier,
    Convolution,
    FactorisedTable,
    Latent,
    LayerNorm,
    Learned,
    LinearScaling,
    MaskedLM,
    ModelConfig,
    NoFeedForward,
    NoNorm,
    NoPosition,
    Parallel,
    Plain,
    Position,
    Projected,
    Recurrent,
    Rotary,
    Sinusoidal,
    Stack,
    T5Bias,
    Tokens,
    Window,
)
from anyformer.inspection import taps
from anyformer.inspection.ablate import head_scores, run_without_heads
from anyformer.inspection.attribution import attribute
from anyformer.inspection.count import count
from anyformer.inspection.curves import position_curves
from anyformer.inspection.growth import cache_growth
from anyformer.inspection.lens import logit_lens
from anyformer.inspection.maps import attention_maps
from anyformer.inspection.measures import log_probability, logit, loss
from anyformer.inspection.patch import run_with_patches
from anyformer.inspection.sublayers import attentions
from anyformer.inspection.taps import run_with_taps
from anyformer.inspection.terms import score_terms
from anyformer.nn.attend import mix
from anyformer.nn.model import Transformer
from tests.strategies import build, close, models, seeds, tokens

READ = Tokens(vocab=11)
BLOCK = Block(mixer=Attention(heads=2), feedforward=Plain(width=8))
PAIR = ModelConfig(
    width=8,
    source=READ,
    target=READ,
    encoder=Stack(depth=2, blocks=(BLOCK,), position=Sinusoidal()),
    decoder=Stack(depth=3, blocks=(BLOCK.model_copy(update={"cross": Attention(heads=4)}),), final_norm=LayerNorm()),
    head=LM(),
)
SOURCE, TARGET = tokens(0, 2, 5), tokens(1, 2, 4)
FEW = settings(max_examples=15)


def read(config: ModelConfig) -> tuple[Tensor, ...]:
    return (SOURCE, TARGET) if config.shape == "encoder-decoder" else (TARGET,)


NOWHERE = NoPosition()


def decoder(block: Block, position: Position = NOWHERE, depth: int = 2, **changes: object) -> Transformer:
    stack = Stack(depth=depth, blocks=(block,), position=position)
    config = ModelConfig(width=8, target=READ, decoder=stack, head=LM())
    return build(config.model_copy(update=changes))


# -- maps -----------------------------------------------------------------------------------------------------------


@FEW
@given(models(mixers=("attention",)), seeds)
def test_maps_are_the_weights_that_the_heads_read_by(config: ModelConfig, seed: int):
    """Whatever kernel ran: the maps times the values are what came out of it; and rows are distributions."""
    model = build(config, seed)
    with torch.no_grad():
        _, seen = run_with_taps(model, ["*.weights", "*.v", "*.heads"], *read(config))
    for name, attention in attentions(model).items():
        weights, v, heads = (seen[f"{name}.{part}"] for part in ("weights", "v", "heads"))
        close(mix(weights, v), heads)
        if attention.normalizer == "softmax" and attention.sinks is None:
            total = weights.sum(dim=-1)
            close(total, total.round())  # 1, or 0 where there is nothing to see
            assert (total > 0.5).any()


def test_some_layers_and_heads_alone():
    model = build(PAIR)
    every = attention_maps(model, SOURCE, TARGET)
    some = attention_maps(model, SOURCE, TARGET, stacks=["decoder", "cross"], layers=[2, -3], heads=[1])
    assert list(some) == ["decoder", "cross"]
    for kind, maps in some.items():
        assert torch.equal(maps, every[kind][[2, 0]][:, :, [1]])
    assert list(attention_maps(model, SOURCE, TARGET, layers=[2])) == ["decoder", "cross"]  # the encoder has no third
    assert attention_maps(model, SOURCE, TARGET, stacks=["cross"], heads=[-1, 0])["cross"].shape == (3, 2, 2, 4, 5)


def test_what_is_not_asked_for_is_not_computed():
    model = build(PAIR)
    with mock.patch.object(attention_module, "weigh", wraps=attention_module.weigh) as weigh:
        attention_maps(model, SOURCE, TARGET, stacks=["cross"], layers=[1])
        assert weigh.call_count == 1
        attention_maps(model, SOURCE, TARGET)
        assert weigh.call_count == 1 + 2 + 3 + 3


def test_heads_of_layers_that_differ():
    blocks = tuple(Block(mixer=Attention(heads=heads)) for heads in (2, 4))
    model = build(ModelConfig(width=8, source=READ, encoder=Stack(depth=2, blocks=blocks), head=LM()))
    assert attention_maps(model, SOURCE, heads=[0, 1])["encoder"].shape == (2, 2, 2, 5, 5)
    with pytest.raises(ValueError, match=r"head 3: encoder\.0\.mixer has heads 0 to 1"):
        attention_maps(model, SOURCE, heads=[3])


def test_maps_that_are_not_there():
    model = build(PAIR)
    with pytest.raises(ValueError, match=r"layer 7: there is attention of encoder in layers 0 to 1"):
        attention_maps(model, SOURCE, TARGET, layers=[7], stacks=["encoder"])
    recurrent = decoder(Block(mixer=Recurrent(), feedforward=NoFeedForward()))
    with pytest.raises(ValueError, match="there is no attention in the model"):
        attention_maps(recurrent, TARGET)
    with pytest.raises(ValueError, match="there is no attention in cross, but in decoder"):
        attention_maps(decoder(BLOCK), TARGET, stacks=["cross"])


def test_the_table_of_names_is_complete():
    """Every name by which a module shows something stands in it."""
    sources = Path(attention_module.__file__).parent.glob("*.py")
    shown = {name for path in sources for name in re.findall(r'taps?\("(\w+)"', path.read_text(encoding="utf-8"))}
    assert {"q", "weights", "state", "router", "final"} <= shown
    listed = set(re.findall(r"\w+", taps.__doc__.partition("each behind")[0])) | {"head"}
    assert shown <= listed


# -- patches --------------------------------------------------------------------------------------------------------


@FEW
@given(models(), seeds)
def test_patching_with_the_same_run_changes_nothing(config: ModelConfig, seed: int):
    """No bit, with all activations patched at once but the weights: with these, attention is mixed by definition."""
    model, args = build(config, seed), read(config)
    with torch.no_grad():
        out, seen = run_with_taps(model, ["*"], *args)
        others = {name: x for name, x in seen.items() if not name.endswith(".weights")}
        assert torch.equal(run_with_patches(model, others, *args), out)
        if weights := {name: x for name, x in seen.items() if name.endswith(".weights")}:
            close(run_with_patches(model, weights, *args), out)


def test_patches_by_function_and_by_pattern():
    model = build(PAIR)
    twice = run_with_patches(model, {"head": lambda x: 2 * x}, SOURCE, TARGET)
    assert torch.equal(twice, 2 * model(SOURCE, TARGET))
    silent = run_with_patches(model, {"decoder.*.cross.out": torch.zeros_like}, SOURCE, TARGET)
    other = run_with_patches(model, {"decoder.*.cross.out": torch.zeros_like}, SOURCE.flip(1), TARGET)
    assert torch.equal(silent, other)  # the decoder no longer sees the source


def test_wrong_patches():
    model = decoder(BLOCK)
    with pytest.raises(ValueError, match=r"no activation is called decoder\.9\.out"):
        run_with_patches(model, {"decoder.9.out": torch.zeros(2, 4, 8), "decoder.0.out": lambda x: x}, TARGET)
    with pytest.raises(ValueError, match=r"the patch of decoder\.0\.out has shape \[2, 4, 7\], expected \[2, 4, 8\]"):
        run_with_patches(model, {"decoder.0.out": torch.zeros(2, 4, 7)}, TARGET)


# -- ablation -------------------------------------------------------------------------------------------------------


@FEW
@given(models(mixers=("attention",)), seeds)
def test_switching_heads_off_is_zeroing_columns(config: ModelConfig, seed: int):
    """In every attention the first head and the last; where layers share weights, of all applications alike."""
    model, args = build(config, seed), read(config)
    known = {name: a for name, a in attentions(model).items() if isinstance(a.out, torch.nn.Linear)}
    if not known:
        return
    heads = {name: sorted({0, attention.heads - 1}) for name, attention in known.items()}
    with torch.no_grad():
        out = run_without_heads(model, heads, *args)
        for attention in set(known.values()):
            width = attention.out.in_features // attention.heads
            columns = attention.out.weight.unflatten(1, (attention.heads, width))
            columns[:, [0, attention.heads - 1]] = 0.0
        close(out, model(*args))


def test_head_scores():
    """What a measure gains without each head, in tables by stack and sublayer."""
    model, labels = build(PAIR), tokens(2, 2, 4)
    measure = log_probability(labels)
    tables = head_scores(model, measure, SOURCE, TARGET)
    assert {kind: tuple(table.shape) for kind, table in tables.items()} == {
        "encoder.mixer": (2, 2),
        "decoder.mixer": (3, 2),
        "decoder.cross": (3, 4),
    }
    with torch.no_grad():
        without = run_without_heads(model, {"decoder.1.cross": [3]}, SOURCE, TARGET)
        close(tables["decoder.cross"][1, 3], measure(without) - measure(model(SOURCE, TARGET)))
        mean = head_scores(model, loss(labels), SOURCE, TARGET)
    close(mean["decoder.mixer"], -tables["decoder.mixer"] / 8)


def test_a_head_that_writes_nothing_scores_nothing():
    model = decoder(BLOCK)
    with torch.no_grad():
        model.decoder.blocks[1]["mixer"].inner.out.weight[:, :4] = 0.0
    table = head_scores(model, logit(3), TARGET)["decoder.mixer"]
    assert float(table[1, 0]) == 0.0
    assert table[[0, 0, 1], [0, 1, 1]].abs().min() > 1e-6


def test_tables_have_nan_where_there_is_no_head():
    blocks = BLOCK.model_copy(update={"mixer": Convolution(width=2)}), Block(mixer=Attention(heads=4))
    config = ModelConfig(width=8, target=READ, decoder=Stack(depth=2, blocks=blocks), head=LM())
    table = head_scores(build(config), logit(0), TARGET)["decoder.mixer"]
    assert table.isnan().tolist() == [[True] * 4, [False] * 4]


def test_wrong_heads():
    model = decoder(BLOCK)
    with pytest.raises(ValueError, match=r"no attention is called 'decoder\.5\.mixer'"):
        run_without_heads(model, {"decoder.5.mixer": [0]}, TARGET)
    with pytest.raises(ValueError, match=r"head 2: decoder\.0\.mixer has heads 0 to 1"):
        run_without_heads(model, {"decoder.0.mixer": [2]}, TARGET)
    with pytest.raises(ValueError, match="leave `cache` out"):
        head_scores(model, logit(0), TARGET, cache=model.new_cache(2, 8))


def test_labels_that_ask_for_nothing():
    output, labels = torch.randn(2, 3, 5), torch.tensor([[1, -100, 2], [-100, -100, 4]])
    p = output.log_softmax(dim=-1)
    close(log_probability(labels)(output), p[0, 0, 1] + p[0, 2, 2] + p[1, 2, 4], 1e-6)
    close(loss(labels)(output), -(p[0, 0, 1] + p[0, 2, 2] + p[1, 2, 4]) / 3, 1e-6)


# -- the lens -------------------------------------------------------------------------------------------------------


@FEW
@given(models(pools=False), seeds)
def test_the_lens_ends_with_what_the_model_says(config: ModelConfig, seed: int):
    model, args = build(config, seed), read(config)
    with torch.no_grad():
        lens = logit_lens(model, *args)
        assert torch.equal(lens[-1], model(*args))
    assert len(lens) == 1 + len((model.decoder or model.encoder).runs)


@pytest.mark.parametrize("head", [MaskedLM(), Classifier(labels=3)], ids=lambda head: head.kind)
def test_the_lens_of_an_encoder(head: MaskedLM | Classifier):
    """After so many layers it is what a model without the others would say."""
    stack = Stack(depth=3, blocks=(BLOCK,), final_norm=LayerNorm())
    model = build(ModelConfig(width=8, source=READ, encoder=stack, head=head))
    segments = torch.tensor([[0, 0, 0, -1, -1], [0, 0, 0, 0, 0]])
    lens = logit_lens(model, SOURCE, segments=segments)
    for depth in (1, 2):
        short = model.config.model_copy(update={"encoder": stack.model_copy(update={"depth": depth})})
        small = Transformer(short).eval().double()
        small.load_state_dict({name: model.state_dict()[name] for name in small.state_dict()})
        close(lens[depth], small(SOURCE, segments=segments).detach())


# -- terms of scores ------------------------------------------------------------------------------------------------


def bare(position: Position, **changes: object) -> Transformer:
    """No norm before the first scores."""
    attention = Attention(heads=2, kv_heads=1, bias=True).model_copy(update=changes)
    return decoder(Block(mixer=attention, feedforward=NoFeedForward(), norm=NoNorm()), position)


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
    if position.kind != "none":  # where tokens stand decides, and no token
        other = score_terms(model, "decoder.1.mixer", (TARGET + 1) % 11)
        assert torch.equal(other["bias"], terms["bias"])


@pytest.mark.parametrize("position", [Sinusoidal(), Learned(length=9)], ids=lambda p: p.kind)
@pytest.mark.parametrize("late", [False, True], ids=["full", "factorised"])
def test_four_terms_of_positions_in_embeddings(position: Position, late: bool):
    """They add up; what is of content alone stays where tokens move along, what is of position where tokens change."""
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


def test_where_terms_cannot_be_told_apart():
    def refused(model: Transformer, name: str, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            score_terms(model, name, TARGET)

    refused(bare(Rotary()), "decoder.0.mixer", "rotary positions turn queries and keys")
    refused(bare(Sinusoidal()), "decoder.1.mixer", "past the first layer")
    refused(bare(Sinusoidal(), cap=2.0), "decoder.0.mixer", "scores are capped")
    refused(decoder(Block(mixer=Attention(heads=2)), Sinusoidal()), "decoder.0.mixer", "behind a norm")
    shared = Block(mixer=Attention(heads=2), order=Parallel(shared_norm=True))
    refused(decoder(shared, Sinusoidal()), "decoder.0.mixer", "behind a norm")
    latent = Attention(heads=2, key_width=8, compress=Latent(rank=3, rotary_width=4))
    refused(decoder(Block(mixer=latent, norm=NoNorm()), Sinusoidal()), "decoder.0.mixer", "in latent attention")
    cross = score_terms(build(PAIR), "decoder.1.cross", SOURCE, TARGET)
    close(cross["content"].softmax(dim=-1), attention_maps(build(PAIR), SOURCE, TARGET)["cross"][1])


# -- curves ---------------------------------------------------------------------------------------------------------


def test_bias_curves():
    """ALiBi's is a line by its slope; T5's is the bias of the scores at that distance, both ways in an encoder."""
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
            turned = sum(math.cos(distance / 2 * 100 ** (-i / waves)) for i in range(waves))
            assert float(curve.values[head, distance]) == pytest.approx((turned + 4 - waves) / 4, abs=1e-6)
    assert (curve.kind, float(curve.values[0, 0])) == ("envelope", 1.0)


def test_no_curve_where_no_scheme_acts_on_scores():
    assert position_curves(bare(Sinusoidal())) == {}
    assert {name.split(".")[2] for name in position_curves(build(PAIR))} <= {"mixer"}


# -- attribution ----------------------------------------------------------------------------------------------------


def test_attributions_add_up_in_a_linear_model():
    """gradient × input is all of a bias-free linear function; of others it is not."""
    block = Block(mixer=Convolution(width=3, bias=False), feedforward=NoFeedForward(), norm=NoNorm())
    found = attribute(linear := decoder(block, Sinusoidal()), logit(5), TARGET)
    close(found.total, linear(TARGET)[:, -1, 5].sum().detach())
    close(found.value, found.total)
    curved = attribute(decoder(BLOCK), logit(5), TARGET)
    assert not torch.allclose(curved.value, curved.total)


def test_attribution_is_by_the_slope_of_each_embedding():
    """A little more of one token's embedding changes the measure by that token's part; one not seen has none."""
    model, measure = build(PAIR), logit(5, at=1)
    found = attribute(model, measure, SOURCE, TARGET)
    assert {side: tuple(x.shape) for side, x in found.tokens.items()} == {"encoder": (2, 5), "decoder": (2, 4)}
    assert not found.tokens["decoder"][:, 2:].any()
    step = 1e-6

    def more(x: Tensor) -> Tensor:
        scale = torch.ones(5, dtype=x.dtype)
        scale[3] += step
        return x * scale[:, None]

    with torch.no_grad():
        grown = measure(run_with_patches(model, {"encoder.embed": more}, SOURCE, TARGET))
        slope = (grown - measure(model(SOURCE, TARGET))) / step
    close(found.tokens["encoder"][:, 3].sum(), slope, 1e-4)


# -- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mixer",
    [
        Attention(heads=2, kv_heads=1),
        Attention(heads=2, pattern=Window(before=2, after=0)),
        Attention(heads=2, key_width=8, compress=Latent(rank=3, rotary_width=4)),
        Recurrent(cell="lstm"),
    ],
    ids=["grouped", "ring", "latent", "recurrent"],
)
def test_a_cache_grows_as_counted(mixer: Attention | Recurrent):
    model = decoder(Block(mixer=mixer, feedforward=NoFeedForward()))
    grown = cache_growth(model, 7, batch=3)
    assert grown == [count(model.config, n, batch=3, bytes_per_value=8).cache_bytes for n in range(1, 8)]
    assert grown == sorted(grown)
    assert (grown[-1] == grown[-2]) == (isinstance(mixer, Attention) and mixer.pattern is not None)  # a ring is full


def test_the_cache_of_an_encoder_decoder_begins_with_the_source():
    model = build(PAIR)
    grown = cache_growth(model, 3, SOURCE)
    asked = [count(PAIR, n, batch=2, source_length=5, bytes_per_value=8).cache_bytes for n in (1, 2, 3)]
    assert grown == asked
    assert grown[0] > 2 * (grown[1] - grown[0])


def test_a_biased_projection_stays_when_its_heads_go():
    block = Block(mixer=Attention(heads=2, output=Projected(bias=True)), feedforward=NoFeedForward())
    model = decoder(block, depth=1)
    _, seen = run_with_taps(model, ["decoder.embed"], TARGET)
    bias = model.decoder.blocks[0]["mixer"].inner.out.bias
    expected = model.head(seen["decoder.embed"] + bias, None, None)
    close(run_without_heads(model, {"decoder.0.mixer": [0, 1]}, TARGET), expected)
