"""Several processes train as one with each optimiser, and continue its checkpoints: copies, shards, split weights."""

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from anyformer.config import ConfigError, io
from anyformer.recipe import SGD, Adafactor, Muon, Optimizer, Recipe
from anyformer.training.checkpoint import checkpoint_path
from anyformer.training.parallel import join
from anyformer.training.train import train
from tests.training.small import PACKED, assert_same_run, pairs, quiet
from tests.training.two_processes import assert_alike, ends, spawn

pytestmark = pytest.mark.system
LAYOUTS = {
    "2 DDP": (2, []),
    "2 FSDP2": (2, ["parallel.shard=full"]),
    "2 tensor": (2, ["parallel.tensor=2"]),
    "2 × 2": (4, ["parallel.tensor=2", "parallel.shard=full"]),
}
OPTIMISERS: dict[str, Optimizer] = {
    # a large eps: rounding of tiny gradients does not decide signs
    "muon": Muon(lr=1e-2, adam_lr=5e-3, eps=1e-2),
    "sgd": SGD(lr=1e-1, weight_decay=0.1),
    "adafactor": Adafactor(lr=1e-2, weight_decay=0.1),  # with whole weights only
}
EXPERTS = 'model.decoder.blocks.*.feedforward={kind="experts", count=4, top_k=2, expert={kind="gated", width=8}}'
HALF, END = 2, 4


def recipe(name: str, layout: list[str] | None = None) -> Recipe:
    """Fused projections, a layer with experts and tied embeddings; without dropout, whose masks differ."""
    settings = {"steps": END, "save_every": HALF, "ema": 0.9, "accumulate": 2, "optimizer": OPTIMISERS[name]}
    spec = pairs("encoder-decoder", PACKED, valid=None, dropout=0.0, **settings)
    vocabulary = ["model.source.vocab=16", "model.target.vocab=16", "model.tie=output"]
    return io.override(spec, [*vocabulary, EXPERTS, *(layout or [])])


def names(layout: str) -> list[str]:
    return [name for name in OPTIMISERS if name != "adafactor" or layout == "2 DDP"]


def main(folder: Path, layout: str) -> None:
    torch.set_num_threads(1)
    with join(agreed=()) as ranks, mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for name in names(layout):
            spec = recipe(name, LAYOUTS[layout][1])
            train(spec, folder / layout / name, console=quiet())
            for before in ("one", layout):
                out = folder / layout / f"{name}, continued from {before}"
                ranks.on_first(lambda: first_half(folder / before / name, out))  # noqa: B023  called at once
                train(spec, out, resume=True, console=quiet())


def first_half(run: Path, out: Path) -> None:
    shutil.copytree(run, out)
    shutil.rmtree(checkpoint_path(out, END))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimisers")
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for name in OPTIMISERS:
            train(recipe(name), folder / "one" / name, console=quiet())
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_processes_are_one(folder: Path, layout: str) -> None:
    count = LAYOUTS[layout][0]
    codes, _, complaints = ends(spawn(folder, main, folder, layout, count=count))
    assert codes == [0] * count, "\n".join([layout, *complaints])
    for name in names(layout):
        assert_alike(folder / "one" / name, folder / layout / name, tolerance=1e-4)
        assert_alike(folder / "one" / name, folder / layout / f"{name}, continued from one", tolerance=1e-4)
        assert_same_run(folder / layout / name, folder / layout / f"{name}, continued from {layout}")


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "2 DDP"])
def test_adafactor_is_refused_with_divided_weights(layout: str) -> None:
    with pytest.raises(ConfigError, match=r"train.optimizer.kind = 'adafactor': needs whole weights"):
        recipe("adafactor", LAYOUTS[layout][1])
