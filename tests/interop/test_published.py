"""Published config.json files load and compute what `transformers` computes, or are refused for a reason that is true.

The files are in `published/`, with the repository, path and commit that each was read from.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers as hf

from anyformer.config import Attention, ModelConfig, Rotary
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import FAMILIES
from tests.interop.shrunk import PAGE, PROMISE, Published, class_of, entries, outcome, sentence, shrink
from tests.parity.test_positions import assert_turns

ENTRIES = entries()
LOADED = [name for name, entry in ENTRIES.items() if not entry.refused]
REFUSED = [name for name, entry in ENTRIES.items() if entry.refused]
UNPUBLISHED = {
    "big_bird",  # but for block-sparse ones
    "longformer",
    "clip",
    "whisper",
    "starcoder2",
    "smollm3",
    "olmo2",
    "qwen2_moe",
    "qwen3_next",
    "mpt",
    "xglm",
    "gpt_oss",  # but for quantised ones
}  # no config.json of theirs was found in a repository
LISTS = {"layer_types", "attention_layers", "attention_types", "rope_scaling", "rope_parameters"}  # one entry per layer
UNNAMED = [name for name, entry in ENTRIES.items() if "model_type" not in entry.config]


def ignored(warned: tuple[str, ...]) -> set[str]:
    """The fields that warnings name as ignored."""
    found = (re.search(r"ignored fields that \S+ does not use: (.*)", text) for text in warned)
    return {name for match in found if match for name in match[1].split(", ")}


@pytest.mark.parametrize("name", LOADED)
def test_loads_and_equals_transformers(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    found = outcome(entry, tmp_path)
    assert not found.refused
    assert found.distance <= PROMISE
    assert found.greedy
    defined = vars(hf.CONFIG_MAPPING[entry.family]())
    assert not {field for field in ignored(found.warned) if field in defined}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_for_a_true_reason(name: str, tmp_path: Path) -> None:
    """Every line of the error names the field that is expected, and none another one."""
    entry = ENTRIES[name]
    found = outcome(entry, tmp_path)
    assert all(entry.refused in line for line in found.refused.splitlines())
    assert found.refused


@pytest.mark.parametrize("name", UNNAMED)
def test_loads_with_the_family_that_it_does_not_name(name: str, tmp_path: Path) -> None:
    found = outcome(ENTRIES[name], tmp_path, family=ENTRIES[name].family)
    assert not found.refused
    assert found.distance <= PROMISE
    assert found.greedy


def rotations(config: ModelConfig) -> list[tuple[Rotary, int]]:
    """Return the rotary positions of a model, each with the width of the heads that it rotates."""
    found = {
        (position, block.mixer.rotary_width(config.width))
        for stack in config.stacks.values()
        for block in stack.unrolled()
        if isinstance(block.mixer, Attention) and isinstance(position := block.mixer.position or stack.position, Rotary)
    }
    return list(found)


def published_angles(entry: Published) -> list[tuple[torch.Tensor, float]]:
    """Return the frequencies of the model of `transformers`, and the factor of cos and sin."""
    classes = vars(inspect.getmodule(class_of(entry.config, entry.family)))
    (part,) = (one for name, one in classes.items() if name.endswith("RotaryEmbedding") and "Vision" not in name)
    made = part(hf.CONFIG_MAPPING[entry.family].from_dict(entry.config))
    kinds = [name.removesuffix("inv_freq") for name, _ in made.named_buffers() if "original" not in name]
    return [(getattr(made, f"{kind}inv_freq"), getattr(made, f"{kind}attention_scaling")) for kind in kinds]


def test_rotary_positions_at_published_sizes() -> None:
    """At a tiny size, two different ramps from fast to slow waves may be the same."""
    scalings = set()
    for name in set(LOADED) - set(UNNAMED):
        entry = ENTRIES[name]
        classes = entry.config.get("architectures")
        if not classes or entry.family == "gptj":  # which has no class for it
            continue
        found = rotations(FAMILIES[entry.family].config(Fields(entry.config, Path(name), dict), classes))
        found.sort(key=lambda one: float(one[0].prepare(torch.tensor([[1]]), one[1]).sin.flatten()[-1]))
        theirs = sorted(published_angles(entry), key=lambda one: float(one[0][-1].sin()) * one[1]) if found else []
        for (rotary, width), (frequencies, factor) in zip(found, theirs, strict=True):
            assert_turns(rotary, width, frequencies, factor)
            scalings.add(rotary.scaling.kind)
    assert scalings == {"none", "llama3", "yarn"}


def test_every_family_has_a_published_config() -> None:
    assert {ENTRIES[name].family for name in LOADED} == set(FAMILIES) - UNPUBLISHED


def test_sources_are_named() -> None:
    sources = [(e.repository, e.path, e.commit) for e in ENTRIES.values()]
    sources += [(f["repository"], f["path"], f["commit"]) for e in ENTRIES.values() for f in e.beside]
    for repository, path, commit in sources:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
        assert re.fullmatch(r"[0-9a-f]{40}", commit)
        assert path.endswith(".json")


def test_only_sizes_and_ids_are_changed() -> None:
    """Flags, names and rates of a published file are those of the file in the test."""
    for entry in ENTRIES.values():
        small = shrink(entry.config)
        assert small.keys() == entry.config.keys()
        changed = {field for field in small if small[field] != entry.config[field]}
        for field in changed - LISTS:
            assert all(type(i) is int for i in _flat(small[field])), field


def _flat(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def test_the_page_has_these_figures() -> None:
    assert sentence(ENTRIES.values()) in PAGE.read_text(encoding="utf-8"), "python -m tests.interop.shrunk"
