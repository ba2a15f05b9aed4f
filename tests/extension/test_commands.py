"""Parts from outside by commands alone: as the axis of a grid, below adapters, and without anything stored."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyformer import cli
from anyformer.config import import_file
from anyformer.generation import session

FILE = Path(__file__).with_name("my_parts.py")
FEW = ["data.train.count=64", "data.valid.count=16", "data.test.count=16"]
BLOCK = "model.decoder.blocks.0"


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")
    import_file(FILE)


def command(*words: object) -> str:
    """Run a command in this process; return its output and notes."""
    done = CliRunner().invoke(cli.app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.system
def test_a_part_is_an_axis_of_a_grid(tmp_path: Path) -> None:
    axis = "model.decoder.position=rotary,logarithm"
    said = command("lab", "run", "sort", axis, *FEW, "--steps", 20, "--seeds", 1, "--out", tmp_path / "grid")
    assert "position=logarithm" in said
    assert (tmp_path / "grid" / "figure.png").is_file()


@pytest.mark.system
def test_a_mixer_that_stores_nothing_generates_below_adapters(tmp_path: Path) -> None:
    """A note says once that texts are read again; adapters are trained on the run."""
    body, out = tmp_path / "body", tmp_path / "lora"
    parts = [f"{BLOCK}.mixer=average", f"{BLOCK}.feedforward=bottleneck", "model.decoder.position=none"]
    command("train", "sort", "--out", body, *FEW, *parts, "train.steps=2")
    adapter = ["model.adapter={kind='lora', rank=2, targets=['*.feedforward']}", f"train.init_from={body}"]
    command("train", "sort", "--out", out, *FEW, *parts, *adapter, "train.steps=2")
    asked = ["generate", out, "--prompt", "n3 n1 n2", "--max-new-tokens", 3]
    session._say.cache_clear()
    first, again = command(*asked), command(*asked, "--cache", "none")
    assert first.count("note: mixers that store nothing (average)") == 1
    assert [line for line in first.splitlines() if not line.startswith("note")] == again.splitlines()
