"""Runs of four processes, two for the parts of each row and two for different rows, equal those of one process."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from anyformer.config import ConfigError, io
from anyformer.runs.run import checkpoints, load
from anyformer.training.parallel import join
from anyformer.training.train import train
from tests.training.small import pairs, quiet
from tests.training.test_parallel import HALF, SHARDS, facts, first_half, recipes
from tests.training.two_processes import SMOOTH, assert_alike, ends, spawn

ROOT = Path(__file__).parents[2]
NAMES = ("padded, tied", "packed, shared, recomputed", "batch norms, experts", "labels", "crops, averaged")


def main(folder: Path) -> None:
    with join(agreed=()) as ranks, mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for shard in SHARDS:
            split = ["parallel.context=2", f"parallel.shard={shard}"]
            for name in NAMES:
                train(recipes(folder)[name], folder / shard / name, split, console=quiet())
            out = folder / "resumed" / shard
            ranks.on_first(lambda out=out: first_half(folder / "one" / NAMES[0], out))  # type: ignore[misc]
            train(recipes(folder)[NAMES[0]], out, split, resume=True, console=quiet())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs of one process under `one`, and those of four by how weights are shared out."""
    folder = tmp_path_factory.mktemp("context")
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for name in NAMES:
            train(recipes(folder)[name], folder / "one" / name, console=quiet())
    codes, _, complaints = ends(spawn(folder, main, folder, count=4))
    assert codes == [0] * 4, "\n".join(complaints)
    return folder


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", NAMES)
def test_four_processes_are_one(folder: Path, shard: str, name: str) -> None:
    assert_alike(folder / "one" / name, folder / shard / name)
    tokens = {facts(folder / how / name)["state"]["tokens"] for how in ("one", shard)}
    assert len(tokens) == 1


@pytest.mark.parametrize("shard", SHARDS)
def test_they_resume_where_one_was(folder: Path, shard: str) -> None:
    assert_alike(folder / "one" / NAMES[0], folder / "resumed" / shard)


def test_torchrun_trains_evaluates_and_resumes(tmp_path: Path) -> None:
    recipe, out = tmp_path / "small.toml", tmp_path / "run"
    settings = {"dropout": 0.0, "optimizer": SMOOTH, "steps": 2 * HALF, "save_every": HALF, "evaluate_every": HALF}
    io.save(pairs("encoder-decoder", **settings), recipe)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "anyformer", "train"]
    run = [sys.executable, *words, recipe, "--out", out, "parallel.context=2"]
    for steps in (HALF, 2 * HALF):
        more = [f"train.steps={steps}", *(["--resume"] if steps > HALF else [])]
        done = subprocess.run([*run, *more], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
    assert len(checkpoints(out)) == 2
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        train(str(recipe), tmp_path / "one", console=quiet())
    assert_alike(tmp_path / "one", out)
    assert load(out).predict(["1 2 3"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("model.encoder.depth=2 model.encoder.pooling={stages=[1,1]}", "model.encoder.pooling"),
        ("model.decoder.memory=4", "model.decoder.memory = 4"),
        ("model.decoder.blocks.0.mixer=recurrent", "model.decoder.blocks.0.mixer = 'recurrent'"),
        (
            "model.decoder.blocks.0.mixer={kind='gated_delta',heads=2}",
            "model.decoder.blocks.0.mixer = 'gated_delta' reads one token after the other",
        ),
        ("train.own_tokens={share=0.5}", "train.own_tokens"),
        ("train.compile=on", "train.compile = 'on'"),
    ],
)
def test_what_needs_whole_rows_is_refused(change: str, why: str) -> None:
    recipe = io.override(
        pairs("encoder-decoder" if "encoder" in change else "decoder"),
        ["parallel.context=2", "model.decoder.position=none"],
    )
    with pytest.raises(ConfigError) as raised:
        io.override(recipe, change.split())
    assert any(f.path == "parallel.context" and why in str(f) for f in raised.value.faults), str(raised.value)
