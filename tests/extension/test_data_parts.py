"""Data sources and a tokenizer from outside the package, by the commands alone."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from anyformer.cli import app
from anyformer.config import ConfigError, import_file, part
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.interop import gguf_vocabulary, public_tokenizers
from anyformer.recipe import trainable
from anyformer.recipe.ready import read_recipe
from tests.training.small import assert_same_run, stop_at

FILE = Path(__file__).with_name("my_data.py")
TEXTS = ["가나 12 다", "abc 가 7 나", "!? 3"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYFORMER_IMPORT", "")


def anyformer(*args: object, code: int = 0, given: Path | None = FILE) -> Result:
    done = CliRunner().invoke(app, [*(["--import", str(given)] if given else []), *map(str, args)])
    assert done.exit_code == code, done.output
    return done


def recipe(folder: Path) -> Path:
    """A recipe with both sources, joined, and the tokenizer."""
    (folder / "cards.txt").write_text("".join(f"{n} {n} 개 :: {n}\n" for n in range(40)), encoding="utf-8")
    file = folder / "mine.toml"
    file.write_text("""
base = "sort"
tokenizer = { kind = "syllables", size = 200 }
data.train = { kind = "joined", parts = [{ kind = "counting", count = 60 }, { kind = "cards", path = "cards.txt" }] }
data.valid = { kind = "cards", path = "cards.txt" }
data.test = { kind = "counting", count = 8 }
train = { steps = 6, save_every = 2, schedule = "constant" }
""")
    return file


def test_a_run_with_them_is_made_resumed_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, whole, parted = recipe(tmp_path), tmp_path / "whole", tmp_path / "parted"
    anyformer("config", "check", file)
    anyformer("train", file, "--out", whole)
    assert stop_at(read_recipe(str(file)), parted, 4)
    anyformer("train", file, "--out", parted, "--resume")
    assert_same_run(whole, parted)
    assert json.loads(anyformer("evaluate", whole, "--json").output)["metrics"]
    (tmp_path / "in.txt").write_text("3 4 5\n7 8 9\n")
    assert len(anyformer("predict", whole, "in.txt").output.splitlines()) == 2
    with monkeypatch.context() as patch:  # as in a process that has not imported the file
        patch.setattr(part, "_PARTS", [one for one in part.all_parts() if one.__module__ != "my_data"])
        patch.setenv("ANYFORMER_IMPORT", "")
        refused = " ".join(anyformer("predict", whole, "in.txt", code=2, given=None).output.split())
    assert "needs the part 'syllables' (Tokenizer) of my_data.py: give it with --import my_data.py" in refused
    assert {"Source counting", "Source cards"} <= json.loads((whole / "recipe.parts.json").read_text()).keys()
    (tmp_path / "cards.txt").write_text("1 :: 1\n" * 40)
    assert "data.train.parts.1.path" in anyformer("train", file, "--out", parted, "--resume", code=2).output


def test_faults_name_sources_from_outside(tmp_path: Path) -> None:
    file = recipe(tmp_path)
    for change, what in (
        ("data.valid.kind=card", "did you mean 'cards'?"),
        ("data.valid.stop=0", "data.valid.start = 0.0: must be before stop = 0.0"),
        ("data.valid.path=card.txt", "did you mean 'cards.txt'?"),
        ("task.kind=lm", "data.train.parts.0.kind = 'counting': the task lm needs text"),
        ("tokenizer.kind=syllable", "did you mean 'syllables'?"),
    ):
        assert what in " ".join(anyformer("train", file, change, "--out", "x", code=2).output.split()), change
    (tmp_path / "cards.txt").write_text("a :: b\nc\n")
    assert "cards.txt:2: has no ::" in anyformer("train", file, "--out", "x", code=2).output


def test_a_tokenizer_is_trained_stored_and_shown(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    anyformer("tokenizer", "train", "texts.txt", "--kind", "syllables", "--size", 40, "--out", "made")
    found = TextTokenizer.load(tmp_path / "made")
    assert [found.decode(ids) for ids in found.encode_batch(TEXTS)] == TEXTS
    assert "가" in anyformer("tokenizer", "show", "made", "가나 <pad>").output
    assert found.pad not in found.encode("<pad>")
    anyformer("data", "prepare", "texts.txt", "--tokenizer", "made", "--workers", 1, "--out", "shards")
    assert "documents  3" in anyformer("data", "show", "shards").output
    assert (
        "did you mean 'syllables'?"
        in anyformer("tokenizer", "train", "texts.txt", "--kind", "syllable", "--out", "x", code=2).output
    )


def test_code_of_a_tokenizer_comes_from_no_file_of_one(tmp_path: Path) -> None:
    """A file of a tokenizer names a kind, which is known or refused."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    anyformer("tokenizer", "train", "texts.txt", "--kind", "syllables", "--size", 40, "--out", "made")
    file = tmp_path / "made" / "tokenizer.json"
    written = file.read_text()
    for kind in ("os.system", "bpe", "file"):
        file.write_text(written.replace('"syllables"', f'"{kind}"'))
        told = anyformer("tokenizer", "show", "made", "a", code=2).output
        assert f"needs the tokenizer '{kind}': give its file with --import FILE" in " ".join(told.split())


@pytest.mark.parametrize("export", [lambda run: public_tokenizers.write(Path("public"), run), gguf_vocabulary.describe])
def test_no_public_format_has_its_code(export: Callable[[Any], object]) -> None:
    import_file(FILE)
    tokenizer = train_tokenizer(trainable()["syllables"].model_validate({"size": 40}), TEXTS)
    with pytest.raises(ConfigError, match="'syllables': has its own code, which no public format has"):
        export(SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(vocab=40)))
