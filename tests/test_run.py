"""A run folder is loaded as it was written, or refused by the name of the file that is wrong."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config import ConfigError
from anyformer.recipe import Characters, Recipe, TableFile, TokenizerFile
from anyformer.runs.run import MANIFEST, load, seal, write_folder, write_model
from anyformer.training.checkpoint import checkpoints
from anyformer.training.loop import Interrupted, fit
from anyformer.training.train import finish
from tests.training.small import Watched, interrupt, make, pairs, quiet, run, said

ASKED = ["1 2 3", "9 8 7 6", "4 4"]
FILES = ["config.json", "task.json", "tokenizer.json", "source_tokenizer.json", "model.safetensors", "recipe.toml"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder–decoder with two tokenizers: a folder with all the files there can be."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run(pairs("encoder-decoder").model_copy(update={"source_tokenizer": Characters()}), out)
    return out


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap(path: Path) -> None:
    other = path.with_name(next(name for name in FILES if name != path.name))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [flip, cut, swap, empty, Path.unlink], ids=lambda harm: harm.__name__)
def test_a_harmed_file_is_refused_by_name(folder: Path, name: str, harm: Callable[[Path], None]) -> None:
    harm(folder / name)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert str(folder / name) in [fault.path for fault in caught.value.faults]


@pytest.mark.parametrize("harm", [flip, cut, empty])
def test_a_harmed_manifest_is_refused(folder: Path, harm: Callable[[Path], None]) -> None:
    harm(folder / MANIFEST)
    with pytest.raises(ConfigError):
        load(folder)


def test_what_the_manifest_does_not_vouch_for_is_not_read(folder: Path) -> None:
    listed = json.loads((folder / MANIFEST).read_text())
    del listed["files"]["model.safetensors"]
    (folder / MANIFEST).write_text(json.dumps(listed))
    with pytest.raises(ConfigError, match=r"manifest\.json: does not match its own checksum"):
        load(folder)
    del listed["sha256"]  # as earlier versions wrote it
    (folder / MANIFEST).write_text(json.dumps(listed))
    with pytest.raises(ConfigError, match=r"model\.safetensors: is not in manifest\.json"):
        load(folder)


def test_a_planted_tokenizer_is_not_read(tmp_path: Path) -> None:
    made = run(pairs("encoder-decoder"), tmp_path / "run")
    (tmp_path / "run" / "source_tokenizer.json").write_text("{")
    assert load(tmp_path / "run").predict(ASKED) == made.predict(ASKED)


@pytest.mark.parametrize(
    "listed", ["[]", "{}", '{"files": []}', '{"files": {"../x": "0"}}', "nan", '{"files": {"": ""}}']
)
def test_a_foreign_manifest_is_refused(folder: Path, listed: str) -> None:
    (folder / MANIFEST).write_text(listed)
    with pytest.raises(ConfigError):
        load(folder)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for place, what in ((tmp_path, "is not a finished run"), (tmp_path / "nowhere", "there is no such folder")):
        with pytest.raises(ConfigError, match=what):
            load(place)


def test_a_missing_run_names_those_beside_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no such folder; did you mean '{folder.name}'"):
        load(folder.parent / f"{folder.name}x")


class Bomb:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    recipe, out, mark = pairs(steps=8, save_every=4), tmp_path / "run", tmp_path / "exploded"
    run(recipe, out)
    bomb = pickle.dumps(Bomb(mark))
    for place in (out, out / "state", *checkpoints(out)):
        for name in ("model.pt", "state.pt", "optimizer.pt", "pytorch_model.bin", "data.pkl", ".metadata"):
            (place / name).write_bytes(bomb)
    load(out)
    run(recipe, out, resume=True)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):  # in the place of a file, vouched for
        kept = (out / name).read_bytes()
        (out / name).write_bytes(bomb)
        seal(out, json.loads((out / MANIFEST).read_text())["files"])
        with pytest.raises(ConfigError):
            load(out)
        (out / name).write_bytes(kept)
    newest = checkpoints(out)[-1]
    (newest / "state.safetensors").write_bytes(bomb)
    seal(newest, json.loads((newest / MANIFEST).read_text())["files"])
    with pytest.raises(ConfigError):
        make(recipe, out, resume=True)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()


def test_a_loaded_run_predicts_the_same(finished: Path, tmp_path: Path) -> None:
    one = load(finished)
    write_folder(tmp_path / "copy", lambda to: write_model(to, one.model.state_dict(), one.config, one.spec, one.task))
    other = load(tmp_path / "copy")
    assert other.config == one.config
    assert other.spec == one.spec
    assert other.predict(ASKED) == one.predict(ASKED)
    assert one.tokenizer.to_json() == other.tokenizer.to_json()
    for name, x in one.model.state_dict().items():
        assert torch.equal(x, other.model.state_dict()[name])


def test_training_returns_the_run_that_is_loaded(tmp_path: Path) -> None:
    job = make(pairs(dropout=0.5), tmp_path / "run", console=quiet())
    fit(job)
    made = finish(job)
    assert (tmp_path / "run" / "README.md").exists()
    assert made.predict(ASKED) == load(tmp_path / "run").predict(ASKED)
    assert not made.model.training


def test_an_unfinished_run_is_loaded_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    job = make(pairs(save_every=3), out)
    job.loader = Watched(job.loader, 8, interrupt)
    with pytest.raises(Interrupted):
        fit(job)
    assert load(out).folder == checkpoints(out)[-1]
    for name, x in load(out).model.state_dict().items():
        assert torch.equal(x, job.model.state_dict()[name])
    flip(checkpoints(out)[-1] / "model.safetensors")
    with pytest.warns(UserWarning, match="a newer checkpoint is damaged"):
        assert load(out).folder == checkpoints(out)[-2]


def test_whoever_may_read_the_config_may_read_the_weights(finished: Path) -> None:
    for folder in (finished, checkpoints(finished)[-1]):
        assert len({path.stat().st_mode for path in folder.iterdir() if path.is_file()}) == 1


def test_a_folder_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "a").write_text("a")
        raise RuntimeError("the power is gone")

    with pytest.raises(RuntimeError):
        write_folder(tmp_path / "run", fill)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_run_is_loaded_as_it_was_evaluated(tmp_path: Path) -> None:
    """That is, with the moving average of its weights where there is one."""
    out = tmp_path / "run"
    job = make(pairs(save_every=3, ema=0.9), out)
    job.loader = Watched(job.loader, 8, interrupt)
    with pytest.raises(Interrupted):
        fit(job)
    found = dict(load(out).model.named_parameters())
    for name, x in job.state.ema.items():
        assert torch.equal(found[name], x)
    assert any(not torch.equal(found[name], x) for name, x in job.model.named_parameters())
    resumed = make(pairs(save_every=3, ema=0.9), out, resume=True)
    for name, x in job.model.named_parameters():
        assert torch.equal(dict(resumed.model.named_parameters())[name], x)


# -- a run that another begins from ---------------------------------------------------------------------------------


def words(folder: Path, *texts: str, **changes: Any) -> Recipe:
    """A recipe whose words are those of some texts, each copied."""
    (folder / "words.tsv").write_text("\n".join(f"{text}\t{text}" for text in texts), encoding="utf-8")
    table = TableFile(path=str(folder / "words.tsv"), source="0", target="1", header=False)
    data = pairs().data.model_copy(update={"train": table, "valid": None})
    return pairs(steps=2).model_copy(update={"data": data, **changes})


def begun_from(recipe: Recipe, folder: Path) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"init_from": str(folder)})})


def test_the_tokenizer_of_a_run_goes_with_its_weights(tmp_path: Path) -> None:
    first = run(words(tmp_path, "a b c"), tmp_path / "first")
    console = quiet()
    job = make(begun_from(words(tmp_path, "d e f"), tmp_path / "first"), tmp_path / "second", console=console)
    assert job.task.tokenizer.to_json() == first.tokenizer.to_json()
    assert "tokenizer: that of" in said(console)


def test_another_tokenizer_than_that_of_the_weights_is_refused(tmp_path: Path) -> None:
    run(words(tmp_path, "a b c"), tmp_path / "first")
    other = begun_from(words(tmp_path, "d e f", tokenizer=Characters()), tmp_path / "first")
    with pytest.raises(ConfigError) as caught:
        make(other, tmp_path / "second")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"train.init_from = '{tmp_path / 'first'}': its tokenizer differs: ")
    assert not (tmp_path / "second" / "recipe.toml").exists()
    by_file = TokenizerFile(path=str(tmp_path / "first" / "tokenizer.json"))
    job = make(begun_from(words(tmp_path, "d e f", tokenizer=by_file), tmp_path / "first"), tmp_path / "third")
    assert job.task.tokenizer.to_json() == load(tmp_path / "first").tokenizer.to_json()


def test_a_line_in_is_a_line_out(tmp_path: Path) -> None:
    run(pairs(steps=2, valid=None), tmp_path / "run")
    for lines in ("1 2\n\n3\n", "\n", "\n\n1", "1\n\n"):
        shown = CliRunner().invoke(app, ["predict", str(tmp_path / "run")], input=lines)
        assert shown.exit_code == 0, shown.stderr
        blank = [not line.strip() for line in lines.removesuffix("\n").split("\n")]
        answers = shown.stdout.removesuffix("\n").split("\n")
        assert len(answers) == len(blank)
        assert all(not answer for answer, empty in zip(answers, blank, strict=True) if empty)
