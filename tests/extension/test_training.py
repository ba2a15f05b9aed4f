"""Optimisers, schedules and loggers from outside the package train, resume, and are forecast like ours."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

import anyformer as af
from anyformer.cli import app
from anyformer.config import ConfigError, import_file, io
from anyformer.nn.inspection.memory import trained_weights, training_memory
from anyformer.recipe import Logger, Optimizer, Recipe, Schedule
from tests.extension.test_extension import anyformer
from tests.inspection.test_optimizer_cost import MODELS, stored
from tests.training.small import PADDED, assert_same_run, make, pairs, quiet, run, said, stop_at

FILE = Path(__file__).with_name("my_training.py")
MINE = ["train.optimizer={kind='lion', lr=1e-3}", "train.schedule=power", "train.loggers=['csv']"]


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")
    import_file(FILE)


def recipe(*changes: str, **train: Any) -> Recipe:
    return io.override(pairs("decoder", PADDED, **train), changes)


def optimizer(kind: str) -> Optimizer:
    return recipe(f"train.optimizer={{kind='{kind}', lr=1e-3}}").train.optimizer


def table(folder: Path) -> list[list[str]]:
    return [line.split(",") for line in (folder / "csv.csv").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["lion", "signs"])
def test_a_resumed_run_is_the_same_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    mine = [f"train.optimizer={{kind='{kind}', lr=1e-3}}", *MINE[1:]]
    spec = recipe(*mine, save_every=3, steps=8, ema=0.9)
    run(spec, tmp_path / "straight")
    assert stop_at(spec, tmp_path / "stopped", 5)
    run(spec, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    assert table(tmp_path / "stopped") == table(tmp_path / "straight")
    assert [int(step) for step, _ in table(tmp_path / "straight")] == list(range(1, 9))


@pytest.mark.parametrize("kind", ["lion", "signs"])
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "adapted"])
def test_the_state_is_counted(name: str, kind: str) -> None:
    assert optimizer(kind).state(trained_weights(MODELS[name])) == stored(MODELS[name], optimizer(kind))


def test_forecasts_follow_the_state() -> None:
    model = af.presets.gpt2(depth=2, width=64, heads=4, vocab=97)
    peaks = {kind: training_memory(model, 16, optimizer=optimizer(kind)).peak for kind in ("adamw", "lion", "signs")}
    weights = af.count(model, length=16).parameters
    assert peaks["adamw"] - peaks["lion"] == peaks["lion"] - peaks["signs"] == 4 * weights


def test_rules_of_ours_name_an_optimiser_from_outside() -> None:
    with pytest.raises(ConfigError, match=r"no learning rates for 'lion'; use 'adamw', 'adam' or 'muon'"):
        recipe(MINE[0], "train.scale={kind='mup', base_width=8}")


@pytest.mark.parametrize("part", [Optimizer, Schedule, Logger])
def test_the_schema_knows_them(part: type[af.config.Part]) -> None:
    schema = json.dumps(io.schema(Recipe))
    assert all(f'"{one.model_fields["kind"].default}"' in schema for one in part.choices())


@pytest.mark.system
def test_commands_use_them(tmp_path: Path) -> None:
    out = tmp_path / "run"
    few = ["train.steps=2", "data.train.count=64", "data.valid.count=16", "data.test.count=16"]
    done = anyformer("--import", FILE, "train", "sort", *few, *MINE, "--out", out)
    assert done.returncode == 0, done.stderr
    assert table(out)
    recorded = json.loads((out / "recipe.parts.json").read_text())
    assert recorded.keys() == {"Optimizer lion", "Schedule power", "Logger csv"}
    assert (out / FILE.name).read_bytes() == FILE.read_bytes()
    assert not (out / "parts.json").exists()  # the model needs none of them
    code = f"import anyformer as af; print(af.load({str(out)!r}).predict(['n1 n3 n2'])); af.evaluate({str(out)!r})"
    own = {key: value for key, value in os.environ.items() if key != "ANYFORMER_IMPORT"}
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=own)
    assert alone.stdout, alone.stderr  # it is loaded without them
    assert f"needs the part 'lion' (Optimizer) of {FILE.name}: give it with --import {FILE.name}" in alone.stderr


def test_a_plan_counts_what_they_store() -> None:
    def memory(*changes: str) -> float:
        changes = ("model.target.vocab=65", *changes)
        done = CliRunner().invoke(app, ["plan", "shakespeare-gpu", *changes, "--gpus", "1", "--json"])
        assert done.exit_code == 0, done.output
        return float(json.loads(done.output)["rows"][0]["memory"])

    assert memory(MINE[0]) < memory()


@pytest.mark.system
def test_a_lab_compares_them(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text(
        f"""base = "sort"
seeds = [0]
budget = {{ kind = "steps", count = 20 }}
set = ["data.train.count=64", "data.valid.count=16", "data.test.count=16", "model.width=16", "train.schedule=constant"]
[[axes]]
name = "optimizer"
values = ["adamw", "lion"]
settings = [["train.optimizer={{kind='adamw', lr=1e-3}}"], ["{MINE[0]}"]]
"""
    )
    done = CliRunner().invoke(app, ["lab", "run", str(grid), "--out", str(tmp_path / "lab")])
    assert done.exit_code == 0, done.output
    assert "lion" in done.output


# -- a logger that fails ----------------------------------------------------------------------------------------------


class Broken(Logger):
    """Fails where it is told to."""

    kind: Literal["broken"] = "broken"
    where: str = "open"

    def open(self, path: Path, step: int) -> list[int]:
        self._at("open")
        return []

    def write(self, to: list[int], step: int, values: dict[str, Any]) -> None:
        to.append(step)
        self._at(f"step {step}")

    def close(self, to: list[int]) -> None:
        self._at("close")

    def _at(self, place: str) -> None:
        if place == self.where:
            raise OSError(f"no connection at {place}")


@pytest.mark.parametrize("where", ["open", "step 2", "close"])
def test_an_error_of_a_logger_ends_that_logger_alone(where: str, tmp_path: Path) -> None:
    from anyformer.training.loop import fit

    af.register(Broken)
    spec = recipe(f"train.loggers=[{{kind='broken', where='{where}'}}, 'csv']", steps=4)
    fit(make(spec, tmp_path / "run", console=(console := quiet())))
    assert said(console).count("train.loggers: 'broken' failed, and gets no further lines: OSError: no conn") == 1
    assert f"at {where}" in said(console)
    assert [int(step) for step, _ in table(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_run_goes_on_without_its_loggers(tmp_path: Path) -> None:
    af.register(Broken)
    assert stop_at(recipe("train.loggers=['broken']", steps=4), tmp_path / "run", 2)
    run(recipe("train.loggers=[]", steps=4), tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=r"train.loggers.1 = 'csv': is there already"):
        recipe("train.loggers=['csv', {kind='csv', column='lr'}]")


def test_what_a_logger_wrote_before_the_first_checkpoint_keeps_no_folder(tmp_path: Path) -> None:
    spec = recipe(*MINE)
    for _ in range(2):
        make(spec, tmp_path / "run")
        (tmp_path / "run" / "csv.csv").write_text("1,0.5\n")
