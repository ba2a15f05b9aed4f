"""Snapshots: the weights at some steps, for `anyformer explore` to show a training as it runs and afterwards.

A snapshot is a run folder `snapshots/step-N` without optimiser state. It can be loaded, but not resumed from.
"""

from pathlib import Path

from anyformer.config import ConfigError
from anyformer.nn.model import Transformer
from anyformer.recipe import Train
from anyformer.run import SNAPSHOTS, remove, snapshots, sweep, write_folder, write_model
from anyformer.tasks.base import Task
from anyformer.training.checkpoint import TrainState, weights
from anyformer.training.parallel import Ranks, whole

COUNT = 12
MAX_BYTES = 2**28  # of all snapshots of a run, where their number is "auto": training waits for their writing


def snapshot_steps(spec: Train, nbytes: int) -> frozenset[int]:
    """Return the steps that are kept of a model of `nbytes`, from step 0 (untrained) to before the last step.

    Step i of n is steps · (i / n)³: attention patterns form early, so early steps are closer together.
    """
    count = min(COUNT, MAX_BYTES // nbytes) if spec.snapshots == "auto" else spec.snapshots
    return frozenset(round(spec.steps * (i / count) ** 3) for i in range(count)) - {spec.steps}


def drop_snapshots(out: Path, after: int) -> None:
    """Remove unfinished snapshots, and those of steps that a resumed training repeats."""
    sweep(out / SNAPSHOTS)
    for path in snapshots(out):
        if int(path.name.removeprefix("step-")) > after:
            remove(path)


def write_snapshot(out: Path, state: TrainState, model: Transformer, task: Task, ranks: Ranks) -> str:
    """Write the weights that are evaluated now: the moving average where there is one. All ranks take part.

    Return why it failed, or an empty string: training continues without a snapshot.
    """
    kept = weights(model) | {name: whole(x) for name, x in state.ema.items()}
    path = out / SNAPSHOTS / f"step-{state.step:09d}"

    def write() -> str:
        try:
            if not path.exists():
                write_folder(path, lambda folder: write_model(folder, kept, model.config, task.spec, task))
        except ConfigError as error:
            return f"no snapshot at step {state.step}: {error}"
        return ""

    return ranks.first(write)
