"""Snapshots: the weights at some steps, for `anyformer explore` to show a training as it runs and afterwards.

A snapshot is a run folder `snapshots/step-N` without optimiser state. It can be loaded, but not resumed from.
"""

from pathlib import Path

from anyformer.config import ConfigError
from anyformer.nn.model import Transformer
from anyformer.recipe import Train
from anyformer.runs.run import SNAPSHOTS, remove, remove_leftovers, snapshots, write_folder, write_model
from anyformer.tasks.base import BuiltTask
from anyformer.training.checkpoint import TrainState, gather_ema, gather_weights
from anyformer.training.parallel import Ranks

AUTO_COUNT = 12  # training waits while each is written
BYTES_PER_WEIGHT = 4  # saved in fp32


def snapshot_steps(spec: Train, parameters: int) -> frozenset[int]:
    """Return the steps of which a model has snapshots, from step 0 (untrained) to before the last step.

    Step i of n is steps · (i / n)³: attention patterns form early, so early steps are closer together.
    """
    count = min(AUTO_COUNT, _most(spec, parameters)) if spec.snapshots == "auto" else spec.snapshots
    return frozenset(round(spec.steps * (i / count) ** 3) for i in range(count)) - {spec.steps}


def limit_note(spec: Train, parameters: int) -> str:
    """Return a line about snapshots that `train.snapshot_mib` leaves out, or an empty string."""
    kept = _most(spec, parameters)
    if spec.snapshots != "auto" or kept >= AUTO_COUNT:
        return ""
    size = parameters * BYTES_PER_WEIGHT / 2**20
    return (
        f"{kept} snapshots for `explore` instead of {AUTO_COUNT}: each takes {size:,.0f} MiB, and all together may "
        f"take {spec.snapshot_mib:,} MiB (train.snapshot_mib)"
    )


def _most(spec: Train, parameters: int) -> int:
    return spec.snapshot_mib * 2**20 // (parameters * BYTES_PER_WEIGHT)


def drop_snapshots(out: Path, after: int) -> None:
    """Remove unfinished snapshots, and those of steps that a resumed training repeats."""
    remove_leftovers(out / SNAPSHOTS)
    for path in snapshots(out):
        if int(path.name.removeprefix("step-")) > after:
            remove(path)


def write_snapshot(out: Path, state: TrainState, model: Transformer, task: BuiltTask, ranks: Ranks) -> str:
    """Write the weights as they would be evaluated: their moving average, if there is one. All ranks call it.

    Return why it failed, or an empty string: training continues without a snapshot.
    """
    tensors = gather_weights(model) | gather_ema(state, model)
    path = out / SNAPSHOTS / f"step-{state.step:09d}"

    def write() -> str:
        try:
            if not path.exists():
                write_folder(path, lambda folder: write_model(folder, tensors, model.config, task.spec, task))
        except ConfigError as error:
            return f"no snapshot at step {state.step}: {error}"
        return ""

    return ranks.on_first(write)
