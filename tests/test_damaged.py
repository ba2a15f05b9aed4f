"""A damaged run folder ends with one line that names the file: no traceback, no hang, no other answers."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config import ConfigError
from anyformer.recipe import Characters
from anyformer.runs.atomic_folder import seal
from anyformer.runs.run import MANIFEST, checkpoints, load, newest
from anyformer.training.train import evaluate, train
from tests.test_cli import run as command
from tests.training.small import pairs, quiet, run, stop_at

RECIPE = pairs("encoder-decoder", steps=12, save_every=4).model_copy(update={"source_tokenizer": Characters()})
RECIPE = RECIPE.model_copy(update={"data": RECIPE.data.model_copy(update={"test": RECIPE.data.valid})})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished and an unfinished run."""
    home = tmp_path_factory.mktemp("home")
    run(RECIPE, home / "finished")
    assert stop_at(RECIPE, home / "unfinished", 10)
    return home


@pytest.fixture
def finished(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home / "finished", tmp_path / "finished"))


@pytest.fixture
def unfinished(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home / "unfinished", tmp_path / "unfinished"))


def reseal(folder: Path) -> None:
    """Write the manifest again, so that it vouches for changed files."""
    seal(folder, json.loads((folder / MANIFEST).read_text())["files"])


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        work()
    assert len(str(caught.value)) < 4000
    return str(caught.value)


def resume(folder: Path) -> Any:
    return train(RECIPE, folder, resume=True, console=quiet())


# -- what must be in the manifest -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["source_tokenizer.json", "recipe.toml"])
def test_an_entry_that_is_removed_from_the_manifest_is_noticed(finished: Path, name: str) -> None:
    listed = json.loads((finished / MANIFEST).read_text())
    del listed["files"][name]
    (finished / MANIFEST).write_text(json.dumps(listed))
    assert "does not match its own checksum" in refused(lambda: load(finished))


@pytest.mark.parametrize("by_version", ["this", "earlier"])
def test_a_source_tokenizer_is_required_where_there_was_one(finished: Path, by_version: str) -> None:
    if by_version == "earlier":
        task = json.loads((finished / "task.json").read_text())["task"]
        (finished / "task.json").write_text(json.dumps({"task": task}))
    reseal(finished)
    load(finished)
    seal(finished, {*json.loads((finished / MANIFEST).read_text())["files"]} - {"source_tokenizer.json"})
    assert refused(lambda: load(finished)) == f"{finished / 'source_tokenizer.json'}: is not in manifest.json"


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_a_checkpoint_without_its_state_is_passed_over(unfinished: Path, name: str) -> None:
    state = checkpoints(unfinished)[-1]
    seal(state, {*json.loads((state / MANIFEST).read_text())["files"]} - {name})
    console = quiet()
    train(RECIPE, unfinished, resume=True, console=console)
    assert f"{name}: is not in manifest.json" in console.file.getvalue()  # type: ignore[attr-defined]


# -- a damaged newest checkpoint --------------------------------------------------------------------------------------


def test_an_older_checkpoint_is_never_taken_silently(unfinished: Path) -> None:
    state = checkpoints(unfinished)[-1]
    (state / "model.safetensors").write_bytes(b"no")
    for use in (load, lambda folder: evaluate(folder, split="valid")):
        with pytest.warns(UserWarning, match=f"a newer checkpoint is damaged: {state}"):
            use(unfinished)
    result = command("evaluate", unfinished, "--split", "valid")
    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: a newer checkpoint is damaged: {state / 'model.safetensors'}: is not ")
    assert newest(unfinished) == checkpoints(unfinished)[-2]
    for other in checkpoints(unfinished):
        (other / MANIFEST).unlink()
    assert refused(lambda: load(unfinished)).count("has no manifest.json") == len(checkpoints(unfinished))


def test_an_unfinished_run_says_so(finished: Path, unfinished: Path) -> None:
    line = f"{unfinished}: training has not finished: this is its checkpoint at step 10 of 12\n"
    for verb in (["predict"], ["inspect", "3 1"]):
        result = CliRunner().invoke(app, [verb[0], str(unfinished), *verb[1:]], input="3 1\n")
        assert (result.exit_code, result.stderr) == (0, line)
    assert CliRunner().invoke(app, ["predict", str(finished)], input="3 1\n").stderr == ""


def test_a_finished_run_without_its_manifest_is_not_taken_silently(finished: Path) -> None:
    (finished / MANIFEST).unlink()
    with pytest.warns(UserWarning, match="training has not finished"):
        load(finished)


# -- something else in place of a file --------------------------------------------------------------------------------


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def nested(path: Path) -> None:
    path.write_text("[" * 100_000 + "\n")


def not_utf8(path: Path) -> None:
    path.write_bytes(b'{"step": 1, "loss": "\xff"}\n')


def not_json(path: Path) -> None:
    path.write_text("loss 3.0\n")


HARMS = [as_folder, as_pipe, nested, not_utf8, not_json]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", [MANIFEST, "config.json", "task.json", "tokenizer.json", "source_tokenizer.json"])
def test_a_file_of_a_finished_run(finished: Path, name: str, harm: Callable[[Path], None]) -> None:
    harm(finished / name)
    assert str(finished / name) in refused(lambda: load(finished))
    if harm in HARMS[2:] and name != MANIFEST:
        reseal(finished)
        assert str(finished / name) in refused(lambda: load(finished))


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "recipe.toml"])
def test_a_file_that_resuming_reads(unfinished: Path, name: str, harm: Callable[[Path], None]) -> None:
    harm(unfinished / name)
    assert refused(lambda: resume(unfinished)).startswith(str(unfinished / name))


@pytest.mark.parametrize("harm", [nested, not_utf8, not_json])
def test_a_resealed_state_is_refused(unfinished: Path, harm: Callable[[Path], None]) -> None:
    state = checkpoints(unfinished)[-1]
    harm(state / "state.json")
    reseal(state)
    assert refused(lambda: resume(unfinished)).startswith(str(state / "state.json"))


@pytest.mark.parametrize("key", ["step", "place", "best", "state"])
def test_a_state_of_other_types_is_refused(unfinished: Path, key: str) -> None:
    state = checkpoints(unfinished)[-1]
    facts = json.loads((state / "state.json").read_text())
    (facts if key == "state" else facts["state"])[key] = "three"
    (state / "state.json").write_text(json.dumps(facts))
    reseal(state)
    assert refused(lambda: resume(unfinished)) == f"{state / 'state.json'}: is not the state of a training"


def test_a_renamed_checkpoint_is_refused(unfinished: Path) -> None:
    state = checkpoints(unfinished)[-1].rename(unfinished / "state" / "step-000000011")
    assert refused(lambda: resume(unfinished)).startswith(f"{state / 'state.json'}: is of step 10")


@pytest.mark.parametrize("name", ["step-x", "step-", "step-000000012.bak"])
def test_what_is_no_checkpoint_is_left_alone(unfinished: Path, name: str) -> None:
    (unfinished / "state" / name).mkdir()
    resume(unfinished)
    assert (unfinished / "state" / name).is_dir()


# -- files that contradict each other ---------------------------------------------------------------------------------


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    reseal(path.parent)


def test_a_config_that_contradicts_its_weights(finished: Path) -> None:
    changed(finished / "config.json", width=16)
    told = refused(lambda: load(finished))
    assert f"{finished / 'model.safetensors'}: " in told
    assert "has the shape [8]; the model needs [16]" in told


@pytest.mark.parametrize("where", ["finished", "checkpoint"])
def test_weights_that_lack_a_tensor_or_have_another(finished: Path, unfinished: Path, where: str) -> None:
    folder = finished if where == "finished" else checkpoints(unfinished)[-1]
    tensors = load_file(folder / "model.safetensors")
    name = next(iter(tensors))
    tensors["strange"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    reseal(folder)
    told = refused(lambda: load(finished) if where == "finished" else resume(unfinished))
    assert f"{folder / 'model.safetensors'}: has no tensor {name}, which the model needs" in told
    assert "has a tensor strange, which the model does not have" in told


def test_matrices_of_two_types(finished: Path) -> None:
    tensors = load_file(finished / "model.safetensors")
    name = next(name for name, x in tensors.items() if x.dim() > 1)
    save_file({**tensors, name: tensors[name].double()}, finished / "model.safetensors")
    reseal(finished)
    assert "has matrices of torch.float32 and torch.float64: all must be of one type" in refused(lambda: load(finished))


def test_a_vocabulary_smaller_than_the_tokenizer(finished: Path) -> None:
    config = json.loads((finished / "config.json").read_text())
    changed(finished / "config.json", target={**config["target"], "vocab": 5})
    assert f"{finished / 'tokenizer.json'}: has " in refused(lambda: load(finished))


def test_a_task_that_is_not_that_of_the_head(finished: Path) -> None:
    changed(finished / "task.json", task={"kind": "mlm"}, source_tokenizer=True)
    assert "task.kind = 'mlm' does not fit the head 'lm'" in refused(lambda: load(finished))


def test_state_of_another_model(unfinished: Path) -> None:
    state = checkpoints(unfinished)[-1]
    tensors = load_file(state / "state.safetensors")
    name = next(name for name in tensors if name.startswith("optimizer.exp_avg."))
    tensors[name] = torch.zeros(3)
    save_file(tensors, state / "state.safetensors")
    reseal(state)
    told = refused(lambda: resume(unfinished))
    assert told.startswith(f"{state / 'state.safetensors'}: does not fit the model and its optimiser")
