"""Asynchronous saves: a step copies the state to CPU memory, and a thread writes the checkpoint as training continues.

The thread writes to a temporary folder and renames it at the end. A process that is killed meanwhile leaves the
previous checkpoint.
"""

import copy
from pathlib import Path

from torch import Tensor

from anyformer.config import io
from anyformer.config.outside import record, record_of
from anyformer.runs.run import RECIPE, write_folder, write_model
from anyformer.training.checkpoint import (
    checkpoint_path,
    environment,
    gather_state,
    gather_weights,
    prune,
    regular_checkpoints,
    write_state,
)
from anyformer.training.job import Job


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
