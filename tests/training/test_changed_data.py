"""A resumed training has the data that it began with, or is refused: its checkpoints hold fingerprints of all files."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from anyformer.config import ConfigError
from anyformer.data import fingerprint as prints
from anyformer.data.fingerprint import changes, fingerprint
from anyformer.recipe import ClassFolders, Classify, Data, JoinedSources, ParallelFiles, Recipe, TextFile
from anyformer.runs.run import checkpoints, seal
from anyformer.training.loop import fit
from anyformer.training.prepare import prepare
from tests.test_cli import refused
from tests.training.small import labelled, make, pairs, parities, quiet, run, said, shards, stop_at, text


def folders(folder: Path) -> Recipe:
    recipe = labelled(folder, Classify(), parities(), steps=4)
    for n, (row, label) in enumerate(parities()):
        (folder / "classes" / label).mkdir(parents=True, exist_ok=True)
        (folder / "classes" / label / f"{n}.txt").write_text(row, encoding="utf-8")
    source = ClassFolders(path=str(folder / "classes"))
    return recipe.model_copy(update={"data": Data(train=source)})


def parallel(folder: Path) -> Recipe:
    for name in ("a", "b"):
        (folder / name).write_text("".join(f"{n} {n + 1}\n" for n in range(9)), encoding="utf-8")
    both = ParallelFiles(source=str(folder / "a"), target=str(folder / "b"))
    return pairs(steps=4).model_copy(update={"data": Data(train=JoinedSources(parts=(both,)))})


CASES: dict[str, tuple[Callable[[Path], Recipe], str, str]] = {  # the recipe, the file that changes, the key
    "text": (lambda folder: text(folder, steps=4), "text.txt", "data.train.path"),
    "table": (lambda folder: labelled(folder, Classify(), parities(), steps=4), "rows.tsv", "data.train.path"),
    "folders": (folders, "classes/odd/{}", "data.train.path"),
    "shards": (lambda folder: shards(folder, steps=4), "shards/{}", "data.train.path"),
    "parallel": (parallel, "b", "data.train.parts.0.target"),
}


def changed(folder: Path, name: str) -> Path:
    """A file with another last character, and the same size."""
    if name.endswith("{}"):
        path = max((path for path in (folder / name).parent.iterdir() if path.suffix != ".json"), key=str)
    else:
        path = folder / name
    raw = path.read_bytes().rstrip(b"\n")
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) + path.read_bytes()[len(raw) :])
    return path


@pytest.mark.parametrize("case", CASES)
def test_changed_data_is_refused_by_name(case: str, tmp_path: Path) -> None:
    build, name, key = CASES[case]
    recipe, out = build(tmp_path), tmp_path / "run"
    fit(make(recipe, out))
    before = checkpoints(out)
    make(recipe, out, resume=True)
    changed(tmp_path, name)
    with pytest.raises(
        ConfigError, match=f"^{key} = .*changed since step-0*4, .*; resume with .* --allow-changed-data"
    ):
        make(recipe, out, resume=True)
    assert checkpoints(out) == before


def test_every_split_is_covered_and_nothing_but_content_counts(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    data = Data(**{name: TextFile(path=name) for name in ("train", "valid", "test")}, root=str(tmp_path))
    before = fingerprint(data)
    assert list(before) == ["data.train.path", "data.valid.path", "data.test.path"]
    os.utime(tmp_path / "train", (0, 0))
    shutil.copytree(tmp_path, tmp_path / "moved")
    assert fingerprint(data.model_copy(update={"root": str(tmp_path / "moved")})) == before
    (tmp_path / "test").write_text("tset", encoding="utf-8")
    assert changes(before, fingerprint(data)) == ["data.test.path"]


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first byte to the last; the time does not grow with the size."""
    monkeypatch.setattr(prints, "MAX_HASHED", 1000)
    monkeypatch.setattr(prints, "SAMPLE", 10)
    path, data = tmp_path / "text", Data(train=TextFile(path=str(tmp_path / "text")))
    path.write_bytes(bytes(5000))
    before = fingerprint(data)
    for raw in (b"x" + bytes(4999), bytes(4999) + b"x", bytes(5001)):
        path.write_bytes(raw)
        assert fingerprint(data) != before
    path.write_bytes(bytes(5000))
    assert fingerprint(data) == before


def test_changed_data_may_be_allowed(tmp_path: Path) -> None:
    """From then on it is the data of the run; with fewer rows than the epoch had batches, the next epoch begins."""
    recipe, out = labelled(tmp_path, Classify(), parities(60), steps=30), tmp_path / "run"
    assert stop_at(recipe, out, 4)
    lines = (tmp_path / "rows.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "rows.tsv").write_text("".join(lines[:6]), encoding="utf-8")
    console = quiet()
    job = prepare(recipe, out, True, console, allow_changed_data=True)
    assert "data.train.path = " in said(console)
    assert tuple(job.state.cursor) == (1, 0)
    fit(job)
    make(recipe, out, resume=True)


def test_a_checkpoint_without_fingerprints_is_resumed_with_a_line(tmp_path: Path) -> None:
    recipe, out = text(tmp_path, steps=4), tmp_path / "run"
    run(recipe, out)
    (last,) = checkpoints(out)
    facts = json.loads((last / "state.json").read_text(encoding="utf-8"))
    del facts["data"]
    (last / "state.json").write_text(json.dumps(facts), encoding="utf-8")
    seal(last, [path.name for path in last.iterdir() if path.name != "manifest.json"])
    console = quiet()
    make(recipe, out, resume=True, console=console)
    assert "step-000000004 has no fingerprints of its data" in said(console)


def test_the_option_is_for_resumed_runs(tmp_path: Path) -> None:
    (line,) = refused("train", "sort", "--allow-changed-data", "--out", tmp_path / "run")
    assert line == "--allow-changed-data: needs --resume: a new run has no earlier data"
