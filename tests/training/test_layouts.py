"""A checkpoint of any layout of processes continues in any other: the next loss is that of one process."""

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from anyformer.config import io
from anyformer.recipe import Recipe
from anyformer.runs.run import verify
from anyformer.training.checkpoint import checkpoint_path
from anyformer.training.parallel import join
from anyformer.training.train import train
from tests.training.small import PACKED, pairs, quiet, said
from tests.training.two_processes import SMOOTH, assert_alike, ends, spawn

pytestmark = pytest.mark.system
LAYOUTS = {
    "one process": (1, []),
    "2 DDP": (2, []),
    "2 FSDP2": (2, ["parallel.shard=full"]),
    "2 tensor": (2, ["parallel.tensor=2"]),
    "2 × 2": (4, ["parallel.tensor=2", "parallel.shard=full"]),
    "2 context": (2, ["parallel.context=2"]),
}
SAVED, END = 2, 4  # steps


def recipe(steps: int, layout: str = "one process") -> Recipe:
    """Without dropout, whose masks depend on the number of processes."""
    spec = pairs(
        "encoder-decoder", PACKED, valid=None, steps=steps, optimizer=SMOOTH, dropout=0.0, ema=0.9, accumulate=2
    )
    return io.override(spec, ["model.tie=output", "model.decoder.depth=2", *LAYOUTS[layout][1]])


def write(folder: Path, layout: str) -> None:
    torch.set_num_threads(1)
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        train(recipe(SAVED, layout), folder / layout, console=quiet())


def resume(folder: Path, layout: str) -> None:
    """Continue the checkpoints of all layouts."""
    torch.set_num_threads(1)
    with join(agreed=()) as ranks, mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for writer in LAYOUTS:
            out, console = folder / f"{writer}, {layout}", quiet()
            ranks.on_first(lambda: str(shutil.copytree(folder / writer, out)))  # noqa: B023  called at once
            train(recipe(END, layout), out, resume=True, console=console)
            if ranks.is_first:
                (out / "said").write_text(said(console))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        train(recipe(END), folder / "straight", console=quiet())
    for act in (write, resume):
        for layout, (count, _) in LAYOUTS.items():
            codes, _, complaints = ends(spawn(folder, act, folder, layout, count=count))
            assert codes == [0] * count, "\n".join([layout, *complaints])
    return folder


@pytest.mark.parametrize("reader", LAYOUTS)
@pytest.mark.parametrize("writer", LAYOUTS)
def test_any_layout_continues_any_other(folder: Path, writer: str, reader: str) -> None:
    out = folder / f"{writer}, {reader}"
    printed = (out / "said").read_text()
    assert f"resuming from step {SAVED}\n" in printed
    assert ("bits may differ" in printed) == (writer != reader)
    assert_alike(folder / "straight", out)
    verify(checkpoint_path(out, END))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_has_the_same_tensors_in_all_layouts(folder: Path, layout: str) -> None:
    """Names, shapes and types of weights and optimiser state do not depend on the layout."""
    one, other = (verify(checkpoint_path(folder / name, SAVED)) for name in ("one process", layout))
    assert one == other
    assert _shapes(checkpoint_path(folder / "one process", SAVED)) == _shapes(checkpoint_path(folder / layout, SAVED))


def _shapes(checkpoint: Path) -> dict[str, tuple[object, ...]]:
    files = ("model.safetensors", "state.safetensors")
    return {name: (x.shape, x.dtype) for file in files for name, x in load_file(checkpoint / file).items()}
