"""Training adapters over rounded weights (QLoRA): what learns, what is saved, and that it resumes to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import anyformer as af
from anyformer.config import ConfigError, io
from anyformer.data.tokenizer import train_tokenizer
from anyformer.nn.linear import Linear
from anyformer.nn.transforms.quantise import round_base
from anyformer.nn.transforms.rounding import RoundedFormat, round_off
from anyformer.recipe import LanguageModel
from anyformer.recipe.recipe import Recipe
from anyformer.recipe.tokenizer import Words
from anyformer.runs.run import Run, load
from anyformer.training.loop import fit
from anyformer.training.train import merge
from tests.training.small import adapter, assert_same_run, make, pairs, run, stop_at


def rounded(folder: Path, bits: int, **train: Any) -> Recipe:
    return io.override(adapter(folder, **train), [f"train.base_bits={bits}"])


@pytest.mark.parametrize("bits", [8, 4])
def test_the_base_is_rounded_and_only_adapters_learn(tmp_path: Path, bits: int) -> None:
    job = make(rounded(tmp_path, bits), tmp_path / "run")
    layers = {name: m for name, m in job.model.named_modules() if isinstance(m, Linear)}
    assert layers
    assert all(isinstance(layer.format, RoundedFormat) and layer.weight is None for layer in layers.values())
    first, before = load(tmp_path / "first").model.state_dict(), job.model.state_dict()
    for name in layers:
        expected = round_off(first[f"{name}.weight"], bits, 32).dense()
        assert torch.equal(before[f"{name}.weight"], expected)
    before = {name: x.clone() for name, x in before.items()}
    fit(job)
    changed = {name for name, x in job.model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {name for name in before if ".lora." in name or name.startswith("head.")}


@pytest.mark.parametrize("bits", [8, 4])
def test_the_saved_run_computes_what_was_trained(tmp_path: Path, bits: int) -> None:
    """It has the names of any run with an adapter, and merges to the same outputs."""
    recipe = rounded(tmp_path, bits, snapshots=2)
    job = make(recipe, tmp_path / "trained")
    fit(job)
    done = run(recipe, tmp_path / "run")
    plain = run(adapter(tmp_path), tmp_path / "plain")
    assert done.model.state_dict().keys() == plain.model.state_dict().keys()
    ids = torch.randint(3, 9, (2, 6))
    with torch.no_grad():
        expected = job.model.eval()(ids)
        torch.testing.assert_close(done.model(ids), expected, rtol=1e-5, atol=1e-5)
        merged = merge(tmp_path / "run", tmp_path / "merged")
        torch.testing.assert_close(merged.model(ids), expected, rtol=1e-4, atol=1e-4)
        assert merged.config.adapter is None
        small = af.quantise(job.model, way="plain")  # merges first
        assert (small(ids) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_resumed_to_the_bit(tmp_path: Path, bits: int) -> None:
    recipe = rounded(tmp_path, bits, steps=6, save_every=2, ema=0.9, average=2)
    run(recipe, tmp_path / "whole")
    assert stop_at(recipe, tmp_path / "halved", 4)
    run(recipe, tmp_path / "halved", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "halved")


def test_a_rounded_model_loads_its_state_dict(tmp_path: Path) -> None:
    job = make(rounded(tmp_path, 4), tmp_path / "run")
    state = {name: x.clone() for name, x in job.model.state_dict().items()}
    other = af.Transformer(job.model.config)
    round_base(other, 4)
    other.load_state_dict(state)
    assert all(torch.equal(x, state[name]) for name, x in other.state_dict().items())
    assert other.state_dict().keys() == state.keys()


def test_a_merged_run_is_exported(tmp_path: Path) -> None:
    """A public folder gets the rounded weights with the adapter merged."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = af.presets.llama(depth=1, width=32, heads=2, vocab=31, ff=48)
    adapted = io.override(config, ["adapter={kind='lora', rank=2}"])
    model = af.Transformer(adapted).eval()
    round_base(model, 8)
    for parameter in (p for name, p in model.named_parameters() if name.endswith("lora.b")):
        torch.nn.init.normal_(parameter, std=0.1)
    tokenizer = train_tokenizer(Words(), [" ".join(map(str, range(20)))])
    spec = LanguageModel()
    af.to_hf(Run(model, spec.build(tokenizer), spec, tmp_path), tmp_path / "public")
    found = load_file(tmp_path / "public" / "model.safetensors")
    layer = model.get_submodule("decoder.blocks.0.feedforward.inner.down")
    assert isinstance(layer, Linear)
    torch.testing.assert_close(found["model.layers.0.mlp.down_proj.weight"], layer.dense(0))


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.base_bits = 8: rounds the weights under an adapter: set model\.adapter"
    ):
        io.override(pairs(), ["train.base_bits=8"])
    with pytest.raises(ConfigError, match=r"train\.precision = 'fp8': weights of train\.base_bits = 4 need"):
        io.override(rounded(tmp_path, 4), ["train.precision=fp8"])
    with pytest.raises(ConfigError, match=r"train\.base_bits"):
        io.override(adapter(tmp_path), ["train.base_bits=5"])


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = af.Transformer(io.override(af.presets.gpt2(depth=1, width=32, heads=2, vocab=17), ["adapter={rank=2}"]))
    model.get_submodule("decoder.blocks.0.mixer.inner.qkv").weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or Inf cannot be rounded: decoder\.blocks\.0\.mixer\.inner\.qkv"):
        round_base(model, 8)
