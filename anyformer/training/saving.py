"""Asynchronous saves: a step copies the state to CPU memory, and a thread writes the checkpoint as training continues.

The thread writes to a temporary folder and renames it at the end. A process that is killed meanwhile leaves the
previous checkpoint.

A snapshot is a run folder `snapshots/step-N` without optimiser state, for `anyformer explore` to show a training as it
runs and afterwards. It can be loaded, but not resumed from.
"""

import copy
from pathlib import Path

from torch import Tensor

from anyformer.config import ConfigError, io
from anyformer.config.outside import record, record_of
from anyformer.nn.model import Transformer
from anyformer.recipe import Train
from anyformer.runs.run import RECIPE, SNAPSHOTS, remove, remove_leftovers, snapshots, write_folder, write_model
from anyformer.tasks.base import BuiltTask
from anyformer.training.checkpoint import (
    TrainState,
    checkpoint_path,
    environment,
    gather_ema,
    gather_state,
    gather_weights,
    prune,
    regular_checkpoints,
    step_of,
    write_state,
)
from anyformer.training.job import Job
from anyformer.training.parallel import Ranks


def save(job: Job) -> Path:
    """Start to write a checkpoint of the current step, and remove old ones afterwards. All processes call it.

    The previous save ends first: at most one is in flight.
    """
    job.watchdog.enter(f"the checkpoint of step {job.state.step}")
    path = checkpoint_path(job.out, job.state.step)

    def is_saved() -> bool:
        job.writer.wait()
        return path.exists()

    if job.ranks.on_first(is_saved):
        return path
    weights, tensors = gather_weights(job.model), gather_state(job.state, job.model, job.optimizer)
    if not job.ranks.is_first:
        return path
    weights, tensors = _copied(weights, job), _copied(tensors, job)
    state, scaler, now = copy.copy(job.state), job.scaler.state_dict(), environment(job.model, job.ranks)

    def fill(folder: Path) -> None:
        write_model(folder, weights, job.model.config, job.task.spec, job.task)
        io.save(job.recipe, folder / RECIPE)
        record(job.recipe, record_of(folder / RECIPE))
        write_state(folder, state, tensors, now, scaler, job.data)

    def write() -> None:
        write_folder(path, fill)
        spec, best = job.recipe.train, checkpoint_path(job.out, state.best_step)
        averaged_at_the_end = regular_checkpoints(job.out, spec.save_every, state.step)[-spec.average :]
        prune(job.out, spec.keep, [best, *averaged_at_the_end])

    job.writer.start(write)
    return path


def finish_saves(job: Job) -> None:
    """Wait until the last checkpoint is written; raise the error of its write. All processes call it."""
    job.ranks.on_first(job.writer.wait)


def _copied(tensors: dict[str, Tensor], job: Job) -> dict[str, Tensor]:
    """Return tensors on the CPU that later steps do not change.

    Gathering has already copied the tensors of a GPU; an optimiser's step counts may be on the CPU all the same.
    """
    shared = job.device.type == "cpu"
    return {name: x.detach().clone() if shared or not x.dim() else x.cpu() for name, x in tensors.items()}


# -- snapshots ---------------------------------------------------------------------------------------------------------


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
        if step_of(path) > after:
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
