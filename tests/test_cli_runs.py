"""The verbs that train, measure and use a run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import anyformer as af
from anyformer.cli import app
from anyformer.data.files import set_of
from anyformer.recipe.data import named_files
from anyformer.recipe.ready import names, read_recipe
from tests.test_cli import done, refused, run

SMALL = ["train.steps=4", "data.train.count=200", "data.valid.count=20", "data.test.count=20", "task.max_target=12"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "정렬 排序"
    text = done("train", "sort", *SMALL, "--out", out)
    assert "step 4/4" in text
    told = f"trained: {out}\nnext:    anyformer predict '{out}' FILE\n         anyformer evaluate '{out}'\n"
    assert text.endswith(told)
    return out


def test_recipes_are_listed_and_valid() -> None:
    lines = done("recipes").splitlines()
    listed = [line.split()[0] for line in lines[::2]]
    assert listed == names()
    assert all(line.strip().startswith("data: ") for line in lines[1::2])
    for name, line in zip(listed, lines[1::2], strict=True):
        data = read_recipe(name).data
        needed = {set_of(file, data) or file for _, file in named_files(data)}
        assert [one for one in needed if f"{one} (" not in line] == []
        assert line.endswith("synthetic") == (not needed)


def test_evaluate(trained: Path) -> None:
    last = json.loads(done("evaluate", trained, "--json").splitlines()[-1])
    assert last["task"] == "seq2seq"
    assert last["n"] == 20
    assert {"loss", "perplexity", "exact_match"} == last["metrics"].keys()
    assert "exact_match" in done("evaluate", trained, "--split", "valid")


def test_evaluate_with_fewer_bits(trained: Path) -> None:
    plain, small = (
        json.loads(done("evaluate", trained, "--json", *bits).splitlines()[-1])["metrics"]["loss"]
        for bits in ([], ["--bits", "4"])
    )
    assert plain != small
    assert abs(plain - small) < 0.1 * plain
    (line,) = refused("evaluate", trained, "--bits", "3")
    assert line == "--bits = 3: must be 8 or 4"


def test_predict(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("3 1 2\n5 4\n", encoding="utf-8")
    shown = done("predict", trained, tmp_path / "in.txt")
    assert shown.splitlines() == af.load(trained).predict(["3 1 2", "5 4"])
    done("predict", trained, tmp_path / "in.txt", "--out", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == shown
    piped = CliRunner().invoke(app, ["predict", str(trained)], input="3 1 2\n5 4\n")
    assert piped.stdout == shown


def test_a_folder_is_never_overwritten(trained: Path, tmp_path: Path) -> None:
    before = (trained / "model.safetensors").read_bytes()
    (line,) = refused("train", "sort", *SMALL, "--out", trained)
    assert line == f"{trained}: holds a run: add --resume to continue it, or choose another --out"
    (tmp_path / "notes.txt").touch()
    (line,) = refused("train", "sort", *SMALL, "--out", tmp_path)
    assert line == f"{tmp_path}: is not empty and holds no run: choose another --out"
    assert (trained / "model.safetensors").read_bytes() == before


def test_merge(trained: Path, tmp_path: Path) -> None:
    adapter = 'model.adapter={rank=2, targets=["*.mixer"]}'
    out, merged = tmp_path / "run", tmp_path / "merged"
    done("train", "sort", *SMALL, f"train.init_from={trained}", adapter, "--out", out)
    size = af.load(trained).model.num_parameters()
    assert done("merge", out, "--out", merged) == f"merged: {merged}, {size:,} parameters\n"
    assert f"trained: {af.count(af.load(out).config).trained:,} parameters" in done("count", out)
    lines = [done("evaluate", run, "--split", "valid").splitlines() for run in (merged, out)]
    assert [line for line in lines[0] if "exact" in line] == [line for line in lines[1] if "exact" in line] != []
    assert refused("merge", trained, "--out", tmp_path / "no") == [
        f"{trained}: has no adapter: there is nothing to merge"
    ]
    assert refused("merge", out, "--out", merged) == [f"{merged}: exists already; choose another --out"]


def test_wrong_input(trained: Path, tmp_path: Path) -> None:
    assert refused("train", "srot")[0] == "'srot' is neither a recipe nor a file; did you mean 'sort'?"
    assert refused("train", "sort", "train.stesp=3") == ["train.stesp: unknown key; did you mean 'steps'?"]
    assert "data.root" in refused("train", "scan", f"data.root={tmp_path}", "--out", tmp_path / "new")[0]
    assert not (tmp_path / "new").exists()
    assert refused("evaluate", tmp_path / "none")[0].endswith("there is no such folder")
    assert refused("predict", trained, tmp_path / "none.txt") == [f"{tmp_path / 'none.txt'}: is not a file"]
    (tmp_path / "new.fr").touch()
    (line,) = refused("predict", trained, tmp_path / "newx.fr")
    assert line.endswith(f"newx.fr: is not a file; did you mean '{tmp_path / 'new.fr'}'?")
    (tmp_path / "captions.toml").touch()
    for misspelt in ("captions.tml", "caption", "captions"):
        (line,) = refused("train", tmp_path / misspelt)
        assert line.endswith(f"is neither a recipe nor a file; did you mean '{tmp_path / 'captions.toml'}'?")
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    (line,) = refused("predict", copy, "-")
    assert "model.safetensors: is not the file that was written" in line


def test_overrides_apply_to_a_recipe_in_hand(tmp_path: Path) -> None:
    made = af.train(read_recipe("sort", SMALL), tmp_path / "run", ["train.steps=2", "model.width=32"])
    assert made.config.width == 32
    assert "steps = 2" in (tmp_path / "run" / "recipe.toml").read_text(encoding="utf-8")


def test_a_dry_run_tells_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = done("train", "sort", *SMALL, "--dry-run").splitlines()
    assert lines[0].startswith("data       200 pairs, ")
    assert lines[4].startswith("training   4 steps = ")
    assert lines[-1].endswith(" <eos>")
    assert refused("train", "sort", "--dry-run", "--out", tmp_path / "run") == [
        "--dry-run: writes nothing: leave out --out and --resume"
    ]
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("anyformer.training.objective.Objective.forward", fails)
    result = run("train", "sort", *SMALL, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert result.stderr == (
        "out of memory after step 0: lower batches.tokens = 896 and raise train.accumulate = 1 by the same factor, "
        "or set train.checkpoint_activations = true\n"
    )


def test_the_cost_of_a_run(trained: Path) -> None:
    assert f"{af.load(trained).model.num_parameters():,}" in done("count", trained)
