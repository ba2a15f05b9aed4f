"""Runs that are shown while they train, by snapshots and checkpoints, and their steps afterwards."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from anyformer.config import ConfigError
from anyformer.explore.open_runs import open_runs
from anyformer.explore.server import ExploreServer
from anyformer.runs.processes import locked
from anyformer.runs.run import remove
from anyformer.training.loop import fit
from tests.explore.tab import Opener, growing
from tests.training import small


def stopped(folder: Path, batch: int) -> Path:
    """Train with default settings and fail while reading the n-th batch: the run has no checkpoint."""

    def die() -> None:
        raise RuntimeError

    job = small.make(small.pairs("decoder", steps=40, snapshots="auto"), folder)
    job.loader = small.Watched(job.loader, batch, die)
    with pytest.raises(RuntimeError):
        fit(job)
    assert not (folder / "state").exists()
    return folder


def test_a_training_without_a_checkpoint_is_shown_by_its_snapshots(tmp_path: Path) -> None:
    workspace = open_runs([stopped(tmp_path / "run", 20)])
    (about,) = workspace.about()
    steps = workspace.answer("live", {"run": "run"})["checkpoints"]
    assert about["live"]
    assert about["step"] == steps[-1] > 4
    assert steps[0] == 0
    request = {"run": "run", "text": about["example"], "kind": "decoder", "layer": 0}
    maps = [workspace.answer("heads", {**request, "step": step})["links"] for step in steps]
    assert maps[-1] == workspace.answer("heads", request)["links"] != maps[0]


def test_a_finished_training_has_many_steps_to_show(tmp_path: Path) -> None:
    small.run(small.pairs("decoder", steps=40, snapshots="auto"), tmp_path / "run")
    result = open_runs([tmp_path / "run"]).answer("live", {"run": "run"})
    assert len(result["checkpoints"]) >= 8
    assert result["checkpoints"] == sorted(set(result["checkpoints"]))
    assert result["checkpoints"][-1] == 40


def test_open_runs_waits_for_a_training_that_has_just_started(tmp_path: Path) -> None:
    folder, waited = stopped(tmp_path / "run", 5), list[Path]()
    shutil.move(folder / "snapshots", tmp_path / "kept")

    def wait(path: Path) -> None:
        waited.append(path)
        if len(waited) == 2:
            shutil.move(tmp_path / "kept", folder / "snapshots")

    with locked(folder):
        assert list(open_runs([folder], wait).runs) == ["run"]
    assert waited == [folder, folder]
    shutil.rmtree(folder / "snapshots")
    with pytest.raises(ConfigError, match="neither a manifest"):  # no training is running
        open_runs([folder], wait)
    assert len(waited) == 2


def test_the_page_offers_a_newer_step(page: Opener, server: ExploreServer) -> None:
    one = page(run="growing", view="next", text="the quick fox")
    assert "step 10" in one.text("#about")
    before, folder = one.text("#view"), server.workspace.opened("growing").folder
    newer = folder / "snapshots" / "step-000000015"
    shutil.copytree(folder / "state" / "step-000000005", newer)
    try:
        one.tab.wait_for_selector("#newer", timeout=8000)
        assert "15" in one.text("#newer")
        assert one.text("#view") == before  # unchanged until the button is pressed
        one.click("#newer")
        one.until("!document.querySelector('#newer')")
        assert one.text("#about").endswith("step 15")
        assert one.settled().text("#view") != before
        assert one.tab.locator("#newer").count() == 0
    finally:
        remove(newer)
        server.workspace.runs["growing"] = open_runs([folder]).runs["growing"]


def test_the_time_lapse_shows_steps_from_the_first_to_the_last(
    page: Opener, server: ExploreServer, tmp_path: Path
) -> None:
    folder = growing(tmp_path)
    for step in range(20, 20 * 30, 20):
        shutil.copytree(folder / "state" / "step-000000005", folder / "snapshots" / f"step-{step:09}")
    server.workspace.runs["many"] = replace(open_runs([folder]).runs["growing"], name="many")
    try:
        steps = [text.split("\n")[0] for text in page(run="many", view="live", most="1").texts(".probe b")]
    finally:
        del server.workspace.runs["many"]
    assert 10 <= len(steps) <= 16
    assert [steps[0], steps[-1]] == ["step 5", "step 580"]
