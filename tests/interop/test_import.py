"""`anyformer import` of published folders: fields that are ignored, and files that lack the usual ones."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import anyformer as af
from anyformer.config import ConfigError
from tests.interop.test_bad_input import _whole as _whole, change, folder as folder
from tests.interop.test_encoders import bert
from tests.test_cli import refused, run


def same(folder: Path, state: dict[str, torch.Tensor], **options: Any) -> None:
    found = af.from_hf(folder, **options).model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_unused_fields_are_ignored_with_one_warning(folder: Path) -> None:
    whole = af.from_hf(folder).model.state_dict()
    change(folder / "config.json", rotary=True, auto_map={"AutoModel": "code.Model"})
    with pytest.warns(UserWarning, match="ignored fields that gpt2 does not use: auto_map, rotary$") as told:
        same(folder, whole)
    assert len(told) == 1
    result = run("import", folder, "--out", folder.parent / "run")
    assert result.exit_code == 0
    line = f"warning: {folder / 'config.json'}: ignored fields that gpt2 does not use: auto_map, rotary"
    assert result.stderr.splitlines() == [line]


def test_a_refused_field_can_be_ignored(folder: Path) -> None:
    whole, out = af.from_hf(folder).model.state_dict(), folder.parent / "run"
    change(folder / "config.json", add_cross_attention=True, quantization_config={"bits": 4})
    lines = refused("import", folder, "--out", out)
    assert ["--ignore-field add_cross_attention" in lines[0], "--ignore-field quantization_config" in lines[1]] == [
        True
    ] * 2
    names = ["add_cross_attention", "quantization_config"]
    same(folder, whole, ignore_fields=names)
    assert (
        run("import", folder, "--out", out, *(part for name in names for part in ("--ignore-field", name))).exit_code
        == 0
    )
    (line,) = refused("import", folder, "--out", folder.parent / "other", "--ignore-field", "heads")
    assert line == f"--ignore-field = 'heads': {folder / 'config.json'} has no such field"
    (line,) = refused("import", folder.parent / "x.bin", "--out", folder.parent / "other", "--ignore-field", "heads")
    assert line.startswith("--ignore-field: is for folders with a config.json")


def test_a_family_by_name(folder: Path) -> None:
    whole = af.from_hf(folder).model.state_dict()
    change(folder / "config.json", model_type="drop")
    (line,) = refused("import", folder, "--out", folder.parent / "run")
    assert f"{folder / 'config.json'}: model_type: is missing: name the family with --family" in line
    same(folder, whole, family="gpt2")
    assert run("import", folder, "--out", folder.parent / "run", "--family", "gpt2").exit_code == 0
    change(folder / "config.json", auto_map={"AutoModel": "code.Model"})  # of an unknown family it may be needed
    with pytest.raises(ConfigError, match="--ignore-field auto_map"):
        af.from_hf(folder, family="gpt2")
    change(folder / "config.json", model_type="bert")
    with pytest.raises(ConfigError, match="model_type = 'bert': --family is 'gpt2'"):
        af.from_hf(folder, family="gpt2")
    with pytest.raises(ConfigError, match="--family = 'gtp2': did you mean 'gpt2'"):
        af.from_hf(folder, family="gtp2")


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForSequenceClassification", "BertModel"])
def test_without_architectures_the_weights_tell_the_head(tmp_path: Path, name: str) -> None:
    bert(name.removeprefix("Bert").removeprefix("For")).saved(tmp_path / "bert")
    whole = af.from_hf(tmp_path / "bert")
    change(tmp_path / "bert" / "config.json", architectures="drop")
    with pytest.warns(UserWarning, match=f"config.json: has no architectures: by its weights it is read as {name}"):
        found = af.from_hf(tmp_path / "bert")
    assert found.config == whole.config


def test_a_decoder_without_architectures_writes(folder: Path) -> None:
    whole = af.from_hf(folder).model.state_dict()
    change(folder / "config.json", architectures=["GPT2DoubleHeadsModel"])
    with pytest.raises(ConfigError, match="--ignore-field architectures"):
        af.from_hf(folder)
    with pytest.warns(UserWarning, match="GPT2LMHeadModel"):
        same(folder, whole, ignore_fields=["architectures"])


def test_ids_that_end_a_text_are_checked_where_they_are(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=["x"])
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id = \['x'\]: must be the id"):
        af.from_hf(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_pipe_in_place_of_a_file_is_refused(folder: Path, name: str) -> None:
    """Reading it would wait for ever."""
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=f"{re.escape(name)}: is not a regular file"):
        af.from_hf(folder, allow_pickle=True)


@pytest.mark.parametrize("value", [[], {}, 3, ["gpt2"], [[]]])
def test_a_model_type_that_is_no_name(folder: Path, value: Any) -> None:
    change(folder / "config.json", model_type=value)
    with pytest.raises(ConfigError, match=r"config\.json: model_type = .*: must be one of gpt2, llama"):
        af.from_hf(folder)


@pytest.mark.parametrize("kind", ["mamba", "xlnet", "zebra"])
def test_only_a_misspelt_family_is_suggested(folder: Path, kind: str) -> None:
    change(folder / "config.json", model_type=kind)
    with pytest.raises(ConfigError, match="known here: albert, bart"):
        af.from_hf(folder)


def test_only_a_misspelt_class_is_suggested(folder: Path) -> None:
    for name, words in (
        ("GPT2Moddel", "did you mean 'GPT2Model'"),
        ("GPT2DoubleHeadsModel", "known here: GPT2ForQuestionAnswering"),
    ):
        change(folder / "config.json", architectures=[name])
        with pytest.raises(ConfigError, match=f"config.json: architectures = '{name}': {words}"):
            af.from_hf(folder)


def test_labels_that_hold_together(tmp_path: Path) -> None:
    """Multi-label classification: every label with sigmoid(logit) > 1/2, by its name."""
    labels = {"0": "a", "1": "b b", "2": "한"}
    theirs = bert("SequenceClassification", problem_type="multi_label_classification", id2label=labels)
    model = theirs._replace(seed=1).saved(tmp_path / "bert")
    found, texts = af.from_hf(tmp_path / "bert"), ["abc zebra", "cab", "zz top"]
    rows = [torch.tensor([found.task.masked(text)]) for text in texts]
    held = [(model(row).logits[0].sigmoid() > 0.5).tolist() for row in rows]
    expected = [[name for name, holds in zip(labels.values(), one, strict=True) if holds] for one in held]
    assert [json.loads(line) for line in found.predict(texts)] == expected
    assert 0 < sum(map(len, expected)) < 9
    result = run("import", tmp_path / "bert", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert af.load(tmp_path / "run").predict(texts) == found.predict(texts)
    shutil.rmtree(tmp_path / "run")
    af.to_hf(found, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["problem_type"] == "multi_label_classification"
    assert af.from_hf(tmp_path / "again").predict(texts) == found.predict(texts)
