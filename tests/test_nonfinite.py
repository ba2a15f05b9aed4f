"""Weights with NaN are never used as if nothing were wrong."""

from pathlib import Path

import pytest
import torch

from anyformer.recipe import Classify, MaskedLanguageModel, Recipe, Tag
from anyformer.runs.run import load, write_folder, write_model
from tests.test_cli import run as command
from tests.training.small import corrupted, labelled, pairs, parities, run, tagging, text


def recipes(folder: Path) -> dict[str, Recipe]:
    return {
        "seq2seq": pairs("encoder-decoder", steps=2),
        "lm": text(folder, steps=2),
        "classify": labelled(folder, Classify(), parities(), steps=2),
        "tag": tagging(folder, Tag(), steps=2),
        "mlm": corrupted(folder, MaskedLanguageModel(), steps=2),
    }


TEXTS = {"seq2seq": "1 2 3", "lm": "the", "classify": "1 2", "tag": "1 2", "mlm": "n1 <mask> n3"}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_model_with_nan_is_refused_by_every_verb(tmp_path: Path, kind: str) -> None:
    made = run(recipes(tmp_path)[kind], tmp_path / "made")
    weights = {name: torch.full_like(x, torch.nan) for name, x in made.model.state_dict().items()}
    out = tmp_path / "nan"
    write_folder(out, lambda to: write_model(to, weights, made.config, made.spec, made.task))
    (out / "recipe.toml").write_bytes((tmp_path / "made" / "recipe.toml").read_bytes())
    (tmp_path / "in.txt").write_text(f"{TEXTS[kind]}\n")
    verbs = [
        ["inspect", out, TEXTS[kind]],
        ["predict", out, tmp_path / "in.txt"],
        ["evaluate", out, "--split", "valid"],
    ]
    if kind in ("seq2seq", "lm"):
        verbs.append(["generate", out, "--prompt", TEXTS[kind]])
    for verb in verbs:
        result = command(*map(str, verb))
        assert result.exit_code == 1, (verb, result.output)
        assert not result.stdout.strip()
        first, *_, told = result.stderr.splitlines()  # predict may name unknown parts between them
        assert first.startswith(f"warning: {out / 'model.safetensors'}: NaN or Inf in ")
        assert "finite" in told or "loss is nan" in told


def test_loading_names_the_tensors(tmp_path: Path) -> None:
    made = run(pairs(steps=2), tmp_path / "made")
    weights = made.model.state_dict()
    name = list(weights)[-1]
    weights[name] = weights[name] / 0
    write_folder(tmp_path / "inf", lambda to: write_model(to, weights, made.config, made.spec, made.task))
    with pytest.warns(UserWarning, match=f"NaN or Inf in 1 of {len(weights)} tensors: {name}"):
        load(tmp_path / "inf")
