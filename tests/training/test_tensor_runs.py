"""Training by recipe with weights that are split among processes: runs, checkpoints and their resumption."""

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from anyformer.config import io
from anyformer.recipe import OwnTokens, Recipe
from anyformer.runs.run import load
from anyformer.training.checkpoint import checkpoint_path
from anyformer.training.parallel import Ranks, join
from anyformer.training.train import train
from tests.training.small import PACKED, assert_same_run, pairs, quiet, said
from tests.training.two_processes import SMOOTH, assert_alike, ends, spawn

HALF, END = 2, 4
EXPERTS = (
    'model.decoder.blocks.*.feedforward={kind="experts", count=4, top_k=2, expert={kind="gated", width=8}, '
    'balance=0.5, router={kind="sigmoid", rate=0.1}}'
)
VOCAB = "model.target.vocab=16"


def recipes() -> dict[str, Recipe]:
    """Without dropout: the masks of one process are others."""
    each = {"steps": END, "optimizer": SMOOTH, "dropout": 0.0}
    return {
        "padded, tied": io.override(
            pairs(valid=None, **each, accumulate=2, save_every=HALF, ema=0.9), [VOCAB, "model.tie=output"]
        ),
        "packed, shared": io.override(
            pairs("encoder-decoder", PACKED, **each, ema=0.9, evaluate_every=HALF, checkpoint_activations=True),
            [VOCAB, "model.source.vocab=16", "model.tie=all", "model.decoder.share=true", "model.decoder.position=t5"],
        ),
        "experts, own tokens": io.override(
            pairs(valid=None, **each, own_tokens=OwnTokens(share=1.0)),
            [VOCAB, EXPERTS, "model.decoder.blocks.*.norm=batch"],
        ),
    }


def in_bf16() -> Recipe:
    return io.override(recipes()["packed, shared"], ["train.precision=bf16", "train.evaluate_every=4"])


def with_dropout() -> Recipe:
    return io.override(pairs(steps=END, valid=None, save_every=HALF, dropout=0.3), [VOCAB])


def divided(recipe: Recipe, *settings: str) -> Recipe:
    return io.override(recipe, ["parallel.tensor=2", *settings])


def first_half(run: Path, out: Path) -> None:
    shutil.copytree(run, out)
    shutil.rmtree(checkpoint_path(out, END))


# -- one of several processes -----------------------------------------------------------------------------------------


def split(folder: Path) -> None:
    torch.set_num_threads(1)
    with join(agreed=()) as ranks, mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for name, recipe in recipes().items():
            train(divided(recipe), folder / "split" / name, console=quiet())
        train(divided(with_dropout()), folder / "dropout", console=quiet())
        train(divided(in_bf16()), folder / "split" / "bf16", console=quiet())
        for before, after, recipe in (
            ("one/padded, tied", "resumed", recipes()["padded, tied"]),
            ("split/padded, tied", "resumed split", recipes()["padded, tied"]),
            ("dropout", "dropout resumed", with_dropout()),
        ):
            resume(folder / before, folder / after, divided(recipe), ranks)


def resume(run: Path, out: Path, recipe: Recipe, ranks: Ranks) -> None:
    console = quiet()
    ranks.on_first(lambda: first_half(run, out))
    train(recipe, out, resume=True, console=console)
    assert "resuming" in said(console)


def layouts() -> dict[str, Recipe]:
    """Four processes: by the name of the layout and of the recipe."""
    found = {}
    for shard in ("none", "full"):
        for name, recipe in recipes().items():
            found[f"{shard}/{name}"] = divided(recipe, f"parallel.shard={shard}")
            if recipe.train.own_tokens is None:
                found[f"context {shard}/{name}"] = divided(recipe, f"parallel.shard={shard}", "parallel.context=2")
    return found


def split_and_sharded(folder: Path) -> None:
    torch.set_num_threads(1)
    with join(agreed=()) as ranks, mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for name, recipe in layouts().items():
            train(recipe, folder / name, console=quiet())
            if name.endswith("/padded, tied"):
                resume(folder / "one" / "padded, tied", folder / f"resumed {name}", recipe, ranks)


# -- what they did ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs of one process."""
    folder = tmp_path_factory.mktemp("tensor")
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for name, recipe in recipes().items():
            train(recipe, folder / "one" / name, console=quiet())
        train(in_bf16(), folder / "one" / "bf16", console=quiet())
    return folder


def test_two_processes_train_as_one(folder: Path, tmp_path: Path) -> None:
    codes, _, complaints = ends(spawn(tmp_path, split, folder))
    assert codes == [0, 0], "\n".join(complaints)
    for name in recipes():
        assert_alike(folder / "one" / name, folder / "split" / name)
        assert load(folder / "split" / name).predict(["1 2 3"])
    assert_alike(folder / "one" / "bf16", folder / "split" / "bf16", tolerance=2e-2)
    assert_alike(folder / "one" / "padded, tied", folder / "resumed")
    assert_same_run(folder / "split" / "padded, tied", folder / "resumed split")
    assert_same_run(folder / "dropout", folder / "dropout resumed")
    out, recipe = tmp_path / "resumed by one", recipes()["padded, tied"]
    first_half(folder / "split" / "padded, tied", out)
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        train(recipe, out, resume=True, console=quiet())
    assert_alike(folder / "one" / "padded, tied", out)


@pytest.mark.system
def test_four_processes_train_as_one(folder: Path, tmp_path: Path) -> None:
    codes, _, complaints = ends(spawn(tmp_path, split_and_sharded, folder, count=4))
    assert codes == [0] * 4, "\n".join(complaints)
    for name in layouts():
        one = folder / "one" / name.rpartition("/")[2]
        assert_alike(one, folder / name)
        if name.endswith("/padded, tied"):
            assert_alike(one, folder / f"resumed {name}")
