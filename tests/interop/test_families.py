"""Families without weights: every preset that has a public form finds it, and what is read back is the same model."""

import re
from dataclasses import replace
from typing import Any

import pytest

from anyformer import presets
from anyformer.config import ConfigError, ModelConfig, NTKScaling, Rotary
from anyformer.config.overrides import override
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import FAMILIES
from anyformer.interop.family import Family, find_family
from anyformer.interop.same_model import differences
from anyformer.interop.weight_rules import Rule

HOMES = {name: name for name in ("t5", "bart", "bert", "roberta", "gpt2", "bloom", "llama", "mistral", "mixtral")}
HOMES |= {"neox": "gpt_neox", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text"}
HOMES |= {"modernbert": "modernbert", "deepseek": "deepseek_v2"}


def back(family: Family, fields: dict[str, Any], config: ModelConfig) -> ModelConfig:
    names = [name for rule in family.tensor_rules(config) for name in rule.theirs]
    return family.config(Fields(fields, "config.json", lambda: names), fields["architectures"])


@pytest.mark.parametrize("preset", HOMES)
def test_presets(preset: str) -> None:
    config = presets.PRESETS[preset](depth=2, vocab=300)
    family, fields = find_family(FAMILIES.values(), config)
    assert family.kind == HOMES[preset]
    assert not differences(config, back(family, fields, config), preset)


@pytest.mark.parametrize("kind", ["vit", "clip"])
def test_images_have_a_home(kind: str) -> None:
    config = presets.PRESETS[kind](depth=2)
    family, fields = find_family(FAMILIES.values(), config)
    assert family.kind == kind
    assert not differences(config, back(family, fields, config), kind)


def test_sounds_have_a_home() -> None:
    config = presets.whisper(depth=2)
    family, fields = find_family(FAMILIES.values(), config)
    assert family.kind == "whisper"
    assert not differences(config, back(family, fields, config), "whisper")


def test_waves_in_halves_have_a_home() -> None:
    """A small Transformer with norms first and no biases of attention, whose absence is written as zeros."""
    block = {"mixer": {"heads": 2}, "feedforward": {"kind": "plain", "width": 24}}
    stack = {"depth": 2, "position": {"kind": "sinusoidal", "layout": "halves"}, "final_norm": "layer"}
    tokens = {"vocab": 50, "scale": "sqrt_width", "pad": 0}
    config = ModelConfig.model_validate(
        {
            "width": 12,
            "source": tokens,
            "target": tokens,
            "encoder": stack | {"blocks": block},
            "decoder": stack | {"blocks": block | {"cross": {"heads": 2}}},
            "head": "lm",
            "tie": "all",
            "special": {"pad": 0, "bos": 1, "eos": 2, "start": 1},
        }
    )
    family, fields = find_family(FAMILIES.values(), config)
    assert family.kind == "pegasus"
    assert not differences(config, back(family, fields, config), "pegasus")


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_reads_what_it_writes_of_its_usual_model(kind: str) -> None:
    family = FAMILIES[kind]
    for name in family.heads:
        config = family.config(Fields({}, "config.json"), [name])
        fields = family.fields(config)
        assert fields["model_type"] == kind
        assert family.heads[fields["architectures"][0]] == family.heads[name]
        theirs = [tensor for rule in family.tensor_rules(config) for tensor in rule.theirs]
        assert len(theirs) == len(set(theirs))


def test_rules_need_not_be_complete_in_names_but_in_weights() -> None:
    """A rule that no weight of ours has is left out; a weight without a rule is a mistake in the family."""
    config = presets.gpt2(depth=1, width=8, heads=2, vocab=97)
    gpt2 = FAMILIES["gpt2"]
    more = replace(gpt2, rules=lambda config: (*gpt2.rules(config), Rule("decoder.nowhere", "nothing")))
    assert more.tensor_rules(config) == gpt2.tensor_rules(config)
    positions = "decoder.embedder.tables.positions"
    fewer = replace(
        gpt2, rules=lambda config: (rule for rule in gpt2.rules(config) if getattr(rule, "ours", "") != positions)
    )
    with pytest.raises(AssertionError, match=re.escape(positions)):
        fewer.tensor_rules(config)


def test_ntk_is_another_theta() -> None:
    config = override(presets.llama(depth=1, vocab=300), ['decoder.position.scaling={kind="ntk", factor=4.0}'])
    family, fields = find_family(FAMILIES.values(), config)
    assert family.kind == "llama"
    read = back(family, fields, config)
    assert read.decoder
    assert read.decoder.position == Rotary(theta=10_000.0 * 4.0 ** (128 / 126))
    assert isinstance(config.decoder.position.scaling, NTKScaling)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (presets.vaswani(depth=1), "encoder.position.layout = 'interleaved': m2m_100 has 'halves'"),
        (presets.gpt3(depth=2), "decoder.blocks.1.mixer.pattern.kind = 'window': gpt2 has 'causal'"),
        (presets.bigbird(depth=1, vocab=300), "encoder.blocks.0.mixer.pattern.kind = 'bigbird': bert has 'full'"),
    ],
)
def test_the_nearest_is_named(config: ModelConfig, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_family(FAMILIES.values(), config)
    assert said in str(error.value)
    assert "no public family supports this" in str(error.value)
