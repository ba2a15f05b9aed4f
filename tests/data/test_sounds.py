"""Sounds whose file names have their labels: rows of one file, and rows joined from several."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anyformer.config import ConfigError
from anyformer.data.readers import read
from anyformer.recipe import SPLITS, Data, Recipe, SoundFiles
from anyformer.recipe.ready import read_recipe
from anyformer.training.train import train

PATTERN = r"(?P<label>\d)_[a-z]+_\d\.wav"
JOINED = {"count": 40, "shortest": 2, "longest": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tones, whose pitch is their label."""
    time = np.arange(1600) / 8000
    for label in range(3):
        for n in range(4):
            values = 8000 * np.sin(2 * np.pi * (300 + 500 * label + 5 * n) * time)
            with wave.open(str(tmp_path / f"{label}_tone_{n}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(8000)
                file.writeframes(values.astype("<i2").tobytes())
    (tmp_path / "README.md").write_text("not a sound")
    return tmp_path


def columns(folder: Path, split: Any = "train", seed: int = 0, **settings: Any) -> dict[str, list[str]]:
    source = SoundFiles(path=str(folder), pattern=PATTERN, **settings)
    return read(source, Data(train=source), split, seed).columns


def test_one_row_for_each_file(folder: Path) -> None:
    found = columns(folder)
    assert found["text"][0] == f"<audio:{folder / '0_tone_0.wav'}>"
    assert found["label"] == [str(label) for label in range(3) for _ in range(4)]
    assert found["text"] == found["source"]
    assert found["label"] == found["target"]


def test_joined_rows(folder: Path) -> None:
    """The labels are those of the files, in order; only training rows depend on the seed."""
    found = columns(folder, **JOINED)
    for text, target in zip(found["source"], found["target"], strict=True):
        names = [Path(name).name for name in text.removeprefix("<audio:").removesuffix(">").split("+")]
        assert " ".join(name[0] for name in names) == target
        assert 2 <= len(names) <= 4
    assert len(found["source"]) == 40
    assert found == columns(folder, **JOINED)
    assert found != columns(folder, seed=1, **JOINED)
    assert columns(folder, "test", **JOINED) == columns(folder, "test", seed=1, **JOINED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere"}, r"data\.train\.path = 'nowhere': no file"),
        ({"pattern": r"(?P<label>x)"}, r"data\.train\.pattern = .*matches no file name"),
    ],
)
def test_faults_of_files(folder: Path, settings: dict[str, str], message: str) -> None:
    source = SoundFiles(**{"path": str(folder), "pattern": PATTERN} | settings)
    with pytest.raises(ConfigError, match=message) as error:
        read(source, Data(train=source), "train", 0)
    assert len(error.value.faults) == 1


def recipe(name: str, folder: Path, *more: str) -> Recipe:
    keys = {"path": folder, "pattern": PATTERN}
    sources = [f"data.{split}.{key}={value}" for split in SPLITS for key, value in keys.items()]
    small = ["model.width=32", "model.encoder.depth=1", "model.encoder.blocks.*.mixer.heads=2", "batches.tokens=600"]
    return read_recipe(name, [*sources, *small, "train.optimizer.lr=0.01", *more])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train.pattern=(", "is not a regular expression"),
        (r"data.train.pattern=\d.wav", "needs the named groups"),
        ("data.train.shortest=9", "shortest = 9: must be at most longest = 6"),
        ("task={kind='lm'}", "'sounds': the task lm needs text"),
    ],
)
def test_faults_of_a_recipe(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe("digits-strings", folder, override)


def test_recipes_learn(folder: Path, tmp_path: Path) -> None:
    """The recipe of single digits, made small, learns to label tones."""
    steps = ["train.steps=40", "train.schedule.warmup=5", "train.evaluate_every=40", "model.head.labels=3"]
    run = train(recipe("digits-speech", folder, *steps), tmp_path / "run")
    assert run.predict([str(folder / f"{label}_tone_1.wav") for label in range(3)]) == ["0", "1", "2"]
