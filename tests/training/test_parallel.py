"""Two processes do what one does. Each of them runs `main`, which trains everything that is compared."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from anyformer.config import io
from anyformer.data.batch import Batch
from anyformer.data.loader import Cursor, ExampleLoader
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import Classify, Padded, Recipe, Regress
from anyformer.runs.run import checkpoints, load
from anyformer.training.checkpoint import checkpoint_path
from anyformer.training.loop import Interrupted
from anyformer.training.parallel import Ranks, join
from anyformer.training.train import train
from tests.training.jobs import changed_loss
from tests.training.small import (
    PACKED,
    PADDED,
    assert_same_run,
    distances,
    interrupt,
    labelled,
    metrics,
    pairs,
    parities,
    quiet,
    said,
    text,
)
from tests.training.two_processes import SMOOTH, assert_alike, ends, spawn

SHARDS = ("none", "full")
HALF, END = 3, 6  # steps
BAD = 2  # the step with a loss of NaN
ASKED = {"crops, averaged": "the", "texts apart": "1\t2"}
EXPERTS = (
    'model.decoder.blocks.*.feedforward={kind="experts", count=4, top_k=2, expert={kind="gated", width=8}, '
    'balance=0.5, router={kind="sigmoid", rate=0.1}}'
)


def settled(**train: Any) -> dict[str, Any]:
    return {"steps": END, "optimizer": SMOOTH, "dropout": 0.0, **train}


def rated() -> dict[str, Any]:
    """Weights that stay as they are, and those that move at rates of their own."""
    frozen = ("source", "encoder.blocks.0.mixer")
    return {"steps": END, "optimizer": SMOOTH, "freeze": frozen, "layer_decay": 0.5, "save_every": HALF}


def recipes(folder: Path) -> dict[str, Recipe]:
    """All without dropout: what one process drops, two do not."""
    apart = folder / "apart"
    apart.mkdir(exist_ok=True)
    made = {
        "padded, tied": io.override(
            pairs(valid=None, **settled(accumulate=2, save_every=HALF)), ["model.tie=output", "model.decoder.depth=2"]
        ),
        "packed, shared, recomputed": io.override(
            pairs("encoder-decoder", PACKED, **settled(ema=0.9, evaluate_every=2, checkpoint_activations=True)),
            ["model.tie=all", "model.decoder.depth=3", "model.decoder.share=true", "model.decoder.position=t5"],
        ),
        "a row at a time": io.override(
            pairs(batches=Padded(tokens=12), **settled(valid=None)), ["model.decoder.blocks.*.order=parallel"]
        ),
        "batch norms, experts": io.override(
            pairs(batches=Padded(tokens=12), **settled(valid=None, accumulate=2, checkpoint_activations=True)),
            [EXPERTS, "model.decoder.blocks.*.norm=batch"],
        ),
        "labels": io.override(
            labelled(folder, Classify(separator=","), parities(), **rated()), ["model.encoder.blocks.*.dropout=0.0"]
        ),
        "texts apart": io.override(
            labelled(apart, Regress(apart=True), distances(11), steps=END, optimizer=SMOOTH),
            ["model.encoder.blocks.*.dropout=0.0"],
        ),
        "crops, averaged": text(folder, **settled(average=2, save_every=2, clip=0.05)),
    }
    made["half precision"] = io.override(made["padded, tied"], ["train.precision=fp16"])
    return made


def with_dropout() -> Recipe:
    return pairs("encoder-decoder", PADDED, steps=END, ema=0.9, evaluate_every=3)


# -- one of two processes -------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with join(agreed=()) as ranks, mock.patch("anyformer.training.train.draw_curve", return_value=None):
        assert ranks.size == 2
        for shard in SHARDS:
            for name, recipe in recipes(folder).items():
                train(sharded(recipe, shard), folder / shard / name, console=quiet())
            go_on(folder, "one", shard, ranks)
            drop(folder / "dropout" / shard, shard, ranks)
            train_with_nan(folder / "nan" / shard, shard, ranks)
        go_on(folder, "none", "full", ranks)


def sharded(recipe: Recipe, shard: str) -> Recipe:
    return io.override(recipe, [f"parallel.shard={shard}"])


def go_on(folder: Path, before: str, shard: str, ranks: Ranks) -> None:
    """With the first half of a run that was trained otherwise."""
    out, console = folder / f"from {before}" / shard, quiet()
    ranks.on_first(lambda: first_half(folder / before / "padded, tied", out))
    train(sharded(recipes(folder)["padded, tied"], shard), out, resume=True, console=console)
    if ranks.is_first:
        (out / "said").write_text(said(console))


def first_half(run: Path, out: Path) -> None:
    shutil.copytree(run, out)
    shutil.rmtree(checkpoint_path(out, END))


def drop(out: Path, shard: str, ranks: Ranks) -> None:
    """The same training straight through, and interrupted by a signal to the second process."""
    recipe, read, left = sharded(with_dropout(), shard), ExampleLoader.read, HALF
    train(recipe, out / "straight", console=quiet())

    def watched(self: ExampleLoader, place: Cursor) -> tuple[Batch, Cursor]:
        nonlocal left
        left -= 1
        if left == 0 and not ranks.is_first:
            interrupt()
        return read(self, place)

    with mock.patch.object(ExampleLoader, "read", watched), pytest.raises(Interrupted, match=f"step {HALF} "):
        train(recipe, out / "interrupted", console=quiet())
    assert ranks.on_each((out / "interrupted" / "state").exists)
    train(recipe, out / "interrupted", resume=True, console=quiet())


def train_with_nan(out: Path, shard: str, ranks: Ranks) -> None:
    """A loss that is not finite, on the second process only."""
    with changed_loss(lambda number: float("nan") if number == BAD and not ranks.is_first else 1.0):
        train(sharded(pairs(steps=END, save_every=1, keep=END, valid=None), shard), out, console=quiet())


# -- what they did ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs of one process under `one`, and what two processes made of everything."""
    folder = tmp_path_factory.mktemp("parallel")
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for name, recipe in recipes(folder).items():
            train(recipe, folder / "one" / name, console=quiet())
    codes, _, complaints = ends(spawn(folder, main, folder))
    assert codes == [0, 0], "\n".join(complaints)
    return folder


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(
    "name",
    [
        "padded, tied",
        "packed, shared, recomputed",
        "a row at a time",
        "batch norms, experts",
        "labels",
        "texts apart",
        "crops, averaged",
    ],
)
def test_two_processes_are_one(folder: Path, shard: str, name: str) -> None:
    assert_alike(folder / "one" / name, folder / shard / name)
    tokens = {state_of(folder / how / name)["tokens"] for how in ("one", shard)}
    assert len(tokens) == 1
    assert load(folder / shard / name).predict([ASKED.get(name, "1 2 3")])


@pytest.mark.parametrize("shard", SHARDS)
def test_in_half_precision_too(folder: Path, shard: str) -> None:
    assert_alike(folder / "one" / "half precision", folder / shard / "half precision", tolerance=1e-2)
    scales = [facts(folder / how / "half precision")["scaler"]["scale"] for how in ("one", shard)]
    assert scales[0] == scales[1]


def state_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = facts(out)["state"]
    return found


def facts(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoints(out)[-1] / "state.json").read_text())
    return found


@pytest.mark.parametrize(
    ("before", "shard", "change"),
    [
        ("one", "none", "processes was 1, is 2"),
        ("one", "full", "processes was 1, is 2; shard was none, is full"),
        ("none", "full", "shard was none, is full"),
    ],
)
def test_two_go_on_where_others_were(folder: Path, before: str, shard: str, change: str) -> None:
    out = folder / f"from {before}" / shard
    assert_alike(folder / "one" / "padded, tied", out)
    told = (out / "said").read_text()
    assert f"resuming from step {HALF}\n" in told
    assert f"bits may differ from an uninterrupted run: {change}\n" in told


@pytest.mark.parametrize("shard", SHARDS)
def test_one_goes_on_where_two_were(folder: Path, shard: str, tmp_path: Path) -> None:
    recipe, out, console = recipes(folder)["padded, tied"], tmp_path / "run", quiet()
    first_half(folder / shard / "padded, tied", out)
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        train(recipe, out, resume=True, console=console)
    assert "processes was 2, is 1" in said(console)
    assert state_of(out)["step"] == END
    assert_alike(folder / "one" / "padded, tied", out)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_signal_to_one_changes_nothing(folder: Path, shard: str) -> None:
    """With dropout, to the last bit."""
    assert_same_run(folder / "dropout" / shard / "straight", folder / "dropout" / shard / "interrupted")


def test_each_process_drops_its_own(folder: Path) -> None:
    """Copies that dropped the same rows' places would still agree; what they share out must not."""
    one, two = (metrics(folder / "dropout" / shard / "straight") for shard in SHARDS)
    assert [row.get("loss") for row in one] == pytest.approx([row.get("loss") for row in two], abs=1e-4)
    drawn = []
    for rank, step in ((0, 1), (1, 1), (0, 2)):
        Ranks(rank, 2).seed(7, step)
        drawn.append(torch.rand(8))
    assert not any(torch.equal(a, b) for a, b in ((drawn[0], drawn[1]), (drawn[0], drawn[2])))
    Ranks(0, 2).seed(7, 1)
    assert torch.equal(torch.rand(8), drawn[0])


@pytest.mark.parametrize("shard", SHARDS)
def test_a_bad_step_of_one_is_skipped_by_all(folder: Path, shard: str) -> None:
    out = folder / "nan" / shard
    assert [row["step"] for row in metrics(out) if row.get("skipped")] == [BAD]
    before, after = (load_file(checkpoint_path(out, step) / "model.safetensors") for step in (BAD - 1, BAD))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(bool(x.isfinite().all()) for x in load_file(out / "model.safetensors").values())


# -- what a row each is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_row_is_read_once(rows: int, size: int) -> None:
    ids = torch.arange(rows * 3).view(rows, 3)
    batch = Batch(ids, ids + 1, None, ids + 2)
    shares = [Ranks(rank, size).split(batch) for rank in range(size)]
    assert sum(share.target_count for share in shares) == batch.target_count
    read = [row for share in shares for row in share.labels.tolist() if row[0] != IGNORE]
    assert sorted(read) == batch.labels.tolist()
    for share in shares:
        assert len(share.ids) == len(share.labels) > 0
        assert share.source is not None
        assert torch.equal(share.source, share.ids + 2)
    assert max(len(share.ids) for share in shares) - min(len(share.ids) for share in shares) <= 1
