"""Train the run that `anyformer explore` opens without an argument: a small decoder that sorts digits.

`make bundled-model` calls it. The recipe is `sort` at half the width, whose rows are generated. The run is stored with
its snapshots, and with weights in fp16.
"""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from torch import Tensor

from anyformer.explore.live_run import by_step
from anyformer.explore.open_runs import BUNDLED
from anyformer.runs.run import RECIPE, SNAPSHOTS, Run, load, remove, write_folder, write_model
from anyformer.training.train import train

CHANGES = ("model.width=32", "model.decoder.blocks.feedforward.width=64")
KEPT = (RECIPE, "metrics.jsonl")  # for the example text and the loss


def make_bundled(folder: Path = BUNDLED, changes: Sequence[str] = CHANGES, console: Console | None = None) -> None:
    """Train the run and write it to a folder, in place of the old one."""
    with TemporaryDirectory() as home:
        trained = train("sort", Path(home) / "sort", changes, console=console)
        steps = {path: load(path, "cpu") for path in by_step(trained.folder).values()}
        if folder.exists():
            remove(folder)
        write_folder(folder, partial(_fill, run=trained, kept=KEPT))
        for path, run in steps.items():
            write_folder(folder / SNAPSHOTS / path.name, partial(_fill, run=run))


def _fill(folder: Path, run: Run, kept: Sequence[str] = ()) -> None:
    write_model(folder, {name: _half(x) for name, x in run.model.state_dict().items()}, run.config, run.spec, run.task)
    for name in kept:
        shutil.copy(run.folder / name, folder / name)


def _half(x: Tensor) -> Tensor:
    return x.half().cpu() if x.is_floating_point() else x.cpu()


if __name__ == "__main__":
    make_bundled(console=Console())
