"""Laws of attention maps, patching, the logit lens and cache growth."""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given

import anyformer.nn.attention as attention_module
from anyformer.attention.attend import mix
from anyformer.config import (
    LM,
    Attention,
    Block,
    Classifier,
    Latent,
    LayerNorm,
    MaskedLM,
    ModelConfig,
    NoFeedForward,
    Recurrent,
    Stack,
    Window,
)
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.inspection import taps
from anyformer.nn.inspection.attention_maps import attention_maps
from anyformer.nn.inspection.cache_growth import cache_growth
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.logit_terms import logit_lens
from anyformer.nn.inspection.sublayers import attentions
from anyformer.nn.inspection.taps import run_with_patches, run_with_taps
from anyformer.nn.model import Transformer
from tests.inspection.small_models import BLOCK, FEW_EXAMPLES, PAIR, READ, SOURCE, TARGET, decoder, read
from tests.strategies import build, close, models, seeds

# -- maps -----------------------------------------------------------------------------------------------------------


@FEW_EXAMPLES
@given(models(mixers=("attention",)), seeds)
def test_maps_times_values_are_the_outputs_of_the_heads(config: ModelConfig, seed: int):
    """Holds for every kernel; and with softmax the rows are distributions."""
    model = build(config, seed)
    with torch.no_grad():
        _, seen = run_with_taps(model, ["*.weights", "*.v", "*.heads"], *read(config))
    for name, attention in attentions(model).items():
        weights, v, heads = (seen[f"{name}.{part}"] for part in ("weights", "v", "heads"))
        close(mix(weights, v), heads)
        if attention.normalizer == "softmax" and attention.sinks is None:
            total = weights.sum(dim=-1)
            close(total, total.round())  # 1, or 0 for fully masked queries
            assert (total > 0.5).any()


def test_selected_layers_and_heads():
    model = build(PAIR)
    every = attention_maps(model, SOURCE, TARGET)
    some = attention_maps(model, SOURCE, TARGET, stacks=["decoder", "cross"], layers=[2, -3], heads=[1])
    assert list(some) == ["decoder", "cross"]
    for kind, maps in some.items():
        assert torch.equal(maps, every[kind][[2, 0]][:, :, [1]])
    assert list(attention_maps(model, SOURCE, TARGET, layers=[2])) == ["decoder", "cross"]  # the encoder has no third
    assert attention_maps(model, SOURCE, TARGET, stacks=["cross"], heads=[-1, 0])["cross"].shape == (3, 2, 2, 4, 5)


def test_only_selected_maps_are_computed():
    model = build(PAIR)
    with mock.patch.object(MultiHeadAttention, "weigh", wraps=MultiHeadAttention.weigh) as weigh:
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


def test_maps_of_layers_without_attention_are_refused():
    model = build(PAIR)
    with pytest.raises(ValueError, match=r"layer 7 has no attention: choose from encoder layers 0 to 1"):
        attention_maps(model, SOURCE, TARGET, layers=[7], stacks=["encoder"])
    recurrent = decoder(Block(mixer=Recurrent(), feedforward=NoFeedForward()))
    with pytest.raises(ValueError, match="there is no attention in the model"):
        attention_maps(recurrent, TARGET)
    with pytest.raises(ValueError, match="there is no attention in cross, only in decoder"):
        attention_maps(decoder(BLOCK), TARGET, stacks=["cross"])


def test_the_table_of_names_is_complete():
    """It lists every name that a module passes to a tap."""
    sources = Path(attention_module.__file__).parent.rglob("*.py")
    used = {name for path in sources for name in re.findall(r'taps?\("(\w+)"', path.read_text(encoding="utf-8"))}
    assert {"q", "weights", "state", "router", "final"} <= used
    listed = set(re.findall(r"\w+", taps.__doc__.partition("Each name")[0])) | {"head"}
    assert used <= listed


# -- patches --------------------------------------------------------------------------------------------------------


@FEW_EXAMPLES
@given(models(), seeds)
def test_patching_a_run_with_its_own_activations_changes_nothing(config: ModelConfig, seed: int):
    """Exact for all activations but `weights`, which switch attention to the reference implementation."""
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


# -- the lens -------------------------------------------------------------------------------------------------------


@FEW_EXAMPLES
@given(models(pools=False), seeds)
def test_the_last_layer_of_the_lens_is_the_output(config: ModelConfig, seed: int):
    model, args = build(config, seed), read(config)
    with torch.no_grad():
        lens = logit_lens(model, *args)
        assert torch.equal(lens[-1], model(*args))
    assert len(lens) == 1 + len((model.decoder or model.encoder).runs)


@pytest.mark.parametrize("head", [MaskedLM(), Classifier(labels=3)], ids=lambda head: head.kind)
def test_the_lens_of_an_encoder(head: MaskedLM | Classifier):
    """After n layers it equals the output of a model with only these n layers."""
    stack = Stack(depth=3, blocks=(BLOCK,), final_norm=LayerNorm())
    model = build(ModelConfig(width=8, source=READ, encoder=stack, head=head))
    segments = torch.tensor([[0, 0, 0, -1, -1], [0, 0, 0, 0, 0]])
    lens = logit_lens(model, SOURCE, segments=segments)
    for depth in (1, 2):
        short = model.config.model_copy(update={"encoder": stack.model_copy(update={"depth": depth})})
        small = Transformer(short).eval().double()
        small.load_state_dict({name: model.state_dict()[name] for name in small.state_dict()})
        close(lens[depth], small(SOURCE, segments=segments).detach())


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
    expected = [count(PAIR, n, batch=2, source_length=5, bytes_per_value=8).cache_bytes for n in (1, 2, 3)]
    assert grown == expected
    assert grown[0] > 2 * (grown[1] - grown[0])
