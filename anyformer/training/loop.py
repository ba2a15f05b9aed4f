"""The loop: one straight function over built objects."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from anyformer.data.batch import Batch
from anyformer.data.loader import Loader
from anyformer.data.sources import Rows
from anyformer.nn.model import Transformer
from anyformer.recipe import Packed, Recipe
from anyformer.run import write_folder, write_model
from anyformer.tasks.base import Metrics, Task, call, token_loss
from anyformer.training.log import Log
from anyformer.training.schedule import rate
from anyformer.training.state import TrainState, checkpoint_path, planned, prune, weights, write_state


class Interrupted(Exception):
    """A signal came; what was trained is saved."""


class Diverged(RuntimeError):
    """Too many steps in a row without a finite loss."""


@dataclass
class Job:
    """Everything a loop needs, built."""

    recipe: Recipe
    out: Path
    device: torch.device
    precision: str  # fp32, bf16, fp16
    task: Task
    model: Transformer
    optimizer: torch.optim.Optimizer
    loader: Loader
    valid: Rows | None
    state: TrainState
    scaler: torch.amp.GradScaler
    console: Console


def fit(job: Job) -> TrainState:
    """Trains to the last step, saving and evaluating on the way."""
    spec, state, model = job.recipe.train, job.state, job.model
    run: Any = torch.compile(model) if _compiles(spec.compile, job.device) else model
    packed = isinstance(job.recipe.batches, Packed)
    signals = Signals()
    with signals, Log(job.out, spec.steps, state.step, job.console, spec.log_every) as log:
        log.forget_after(state.step)
        while state.step < spec.steps and not _stale(job):
            step = state.step + 1
            lr = spec.optimizer.lr * rate(spec.schedule, step, spec.steps)
            for group in job.optimizer.param_groups:
                group["lr"] = lr
            batches, place = _read(job.loader, state, spec.accumulate)
            count = sum(batch.asked for batch in batches)
            model.train()
            total = torch.zeros((), device=job.device)
            for batch in batches:
                here = batch.to(job.device)
                with _autocast(job):
                    loss = token_loss(call(run, here, packed), here.labels, spec.label_smoothing)
                # a sum over the tokens of all batches of the step: never a mean of means
                job.scaler.scale(loss / max(count, 1)).backward()
                total += loss.detach()
            norm = _step(job, total)
            state.step, state.place = step, place
            if norm is None:
                _note_bad(job, batches, float(total) / max(count, 1), log)
            else:
                state.bad_in_a_row = 0
                tokens = sum(batch.tokens for batch in batches)
                state.tokens += tokens
                _average(job)
                log.step(step, float(total) / max(count, 1), lr, norm, tokens)
            last = step == spec.steps
            if job.valid and (last or (spec.evaluate_every and step % spec.evaluate_every == 0)):
                _evaluate(job, log)
            stop, came = _stale(job), signals.came  # read once: a signal after the save is for the next step
            if came or last or stop or state.best_step == step or (spec.save_every and step % spec.save_every == 0):
                save(job)
            if came and not last:
                raise Interrupted(f"interrupted at step {step} and saved: go on with --resume")
            if stop:
                log.say(f"stopped at step {step}: no improvement in {state.stale} evaluations")
    return state


def _read(loader: Loader, state: TrainState, accumulate: int) -> tuple[list[Batch], Any]:
    place, batches = state.place, []
    for _ in range(accumulate):
        batch, place = loader.read(place)
        batches.append(batch)
    return batches, place


def _step(job: Job, total: Tensor) -> float | None:
    """Clips and applies the gradients; the gradient's norm, or None where something was not finite."""
    job.scaler.unscale_(job.optimizer)
    limit = job.recipe.train.clip or math.inf
    norm = float(torch.nn.utils.clip_grad_norm_(job.model.parameters(), limit))
    fine = math.isfinite(norm) and bool(total.isfinite())
    if fine:
        job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    return norm if fine else None


def _note_bad(job: Job, batches: list[Batch], loss: float, log: Log) -> None:
    state = job.state
    state.bad_in_a_row += 1
    state.bad_in_all += 1
    log.write(state.step, skipped=True, loss=loss if math.isfinite(loss) else str(loss))
    if state.bad_in_a_row >= job.recipe.train.max_bad_steps:
        examples = ", ".join(str(i) for batch in batches for i in batch.examples[:8])
        raise Diverged(
            f"{state.bad_in_a_row} steps in a row without a finite loss or gradient, last at step {state.step}, "
            f"examples {examples}: lower train.optimizer.lr, or lengthen the warm-up"
        )


def _average(job: Job) -> None:
    """The moving average of the weights."""
    decay = job.recipe.train.ema
    if decay is None:
        return
    for name, parameter in job.model.named_parameters():
        if name in job.state.ema:
            job.state.ema[name].lerp_(parameter.detach(), 1 - decay)
        else:
            job.state.ema[name] = parameter.detach().clone()


@contextmanager
def averaged(job: Job) -> Iterator[None]:
    """The model with its averaged weights, where there are any."""
    if not job.state.ema:
        yield
        return
    own = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    _put(job.model, job.state.ema)
    try:
        yield
    finally:
        _put(job.model, own)


@torch.no_grad()
def _put(model: Transformer, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def _stale(job: Job) -> bool:
    """Whether it is time to stop early."""
    patience = job.recipe.train.patience
    return patience is not None and job.state.stale >= patience


def _evaluate(job: Job, log: Log) -> None:
    """Looks at the validation data."""
    state = job.state
    assert job.valid is not None
    metrics = evaluate(job, job.valid)
    log.evaluation(state.step, "valid", metrics.values)
    loss = metrics.values["loss"]
    if math.isfinite(loss) and (state.best is None or loss < state.best):
        state.best, state.best_step, state.stale = loss, state.step, 0
    else:
        state.stale += 1


def evaluate(job: Job, rows: Rows) -> Metrics:
    job.model.eval()
    with averaged(job):
        return job.task.evaluate(job.model, rows, job.recipe.batches)


def save(job: Job) -> Path:
    """A checkpoint of now, whole or not at all; older ones go."""
    path = checkpoint_path(job.out, job.state.step)
    if not path.exists():

        def fill(folder: Path) -> None:
            write_model(folder, weights(job.model), job.model.config, job.recipe.task, job.task)
            write_state(folder, job.state, job.model, job.optimizer, job.scaler.state_dict())

        write_folder(path, fill)
        spec, best = job.recipe.train, checkpoint_path(job.out, job.state.best_step)
        averaged_at_the_end = planned(job.out, spec.save_every, job.state.step)[-spec.average :]
        prune(job.out, spec.keep, [best, *averaged_at_the_end])
    return path


def _autocast(job: Job) -> Any:
    if job.precision == "fp32":
        return nullcontext()
    return torch.autocast(job.device.type, dtype=torch.bfloat16 if job.precision == "bf16" else torch.float16)


def _compiles(wanted: str, device: torch.device) -> bool:
    return wanted == "on" or (wanted == "auto" and device.type == "cuda")


class Signals:
    """SIGINT and SIGTERM ask for a stop at the next step; a second one stops at once."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # signals come to the main thread only
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._take)
        return self

    def _take(self, number: int, frame: object) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
