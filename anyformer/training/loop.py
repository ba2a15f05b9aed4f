"""The training loop: steps, evaluations, snapshots and checkpoints, until the last step or a signal."""

import math
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule

from anyformer.attention.attend import without_plans
from anyformer.data.batch import Batch
from anyformer.data.loader import Cursor, Loader
from anyformer.data.prefetch import ending
from anyformer.data.readers import Rows
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.recipe import Train, is_lower_better
from anyformer.tasks.base import Metrics
from anyformer.training.checkpoint import TrainState, checkpoint_path, gather_weights
from anyformer.training.job import Job
from anyformer.training.log import Log, SilentLog
from anyformer.training.machine import peak_tokens_per_second, threads
from anyformer.training.pace import TimedPace
from anyformer.training.ranks.tensor import SplitTransformer
from anyformer.training.saving import drop_snapshots, finish_saves, limit_note, save, snapshot_steps, write_snapshot
from anyformer.training.signals import Signals
from anyformer.training.step import StepResult, TrainingStep, ema_weights, record_code, set_learning_rate, stored_code


class Interrupted(Exception):
    """Training was stopped by a signal, and is saved."""


class Diverged(RuntimeError):
    """Too many consecutive steps had a non-finite loss or gradient."""


@dataclass(frozen=True)
class PendingStep:
    """A step that was started, and whose loss has not been read yet."""

    number: int
    place: float  # in the schedule
    lr: float
    batches: list[Batch]
    result: StepResult


def fit(job: Job, began: float | None = None) -> TrainState:
    """Train to the last step, with evaluations and checkpoints on the way.

    `began`: when the process began to train, by `time.monotonic`; None: now.
    """
    began = time.monotonic() if began is None else began
    spec, state = job.recipe.train, job.state
    take_step, pending, signals = TrainingStep(job), deque[PendingStep](), Signals()
    first = state.step + 1
    with signals, threads(job.threads), stored_code(job), _open_log(job) as log, ending(job.reader), job.writer:
        log.drop_after(state.step)
        job.ranks.on_first(lambda: drop_snapshots(job.out, after=state.step))
        parameters = count(job.model.config).parameters
        snapshots = snapshot_steps(spec, parameters)
        if note := limit_note(spec, parameters):
            log.print(note)
        timed = spec.minutes is not None
        pace = TimedPace(job.out, spec, state.step, began) if timed and job.ranks.is_first else None
        unfinished = state.progress < spec.steps and not _should_stop(job)
        saved = unfinished and job.ranks.on_first(checkpoint_path(job.out, state.step).exists)
        if saved and job.ranks.any(signals.received):
            raise Interrupted(f"interrupted at step {state.step}, which is saved: continue with --resume")

        def finish_steps(left: int) -> None:
            while len(pending) > left:
                _finish_step(job, pending.popleft(), log)

        ends = spec.schedule.cycle_ends(spec.steps)
        passed = state.progress - 1  # the place before that of the newest step
        while state.progress < spec.steps and not _should_stop(job):
            due = not snapshots.isdisjoint(steps_between(passed, state.progress))
            if due and (problem := write_snapshot(job.out, state, job.model, job.task, job.ranks)):
                log.print(problem)
            number = state.step + 1
            job.watchdog.enter(f"step {number}")
            passed, place = state.progress, float(number)
            if timed:
                place = job.ranks.on_first(partial(_enter, pace, number, passed))
            state.progress = min([place, *(end for end in ends if passed < end)])  # a cycle ends with its lowest rate
            lr = spec.optimizer.lr * spec.schedule.at(state.progress, spec.steps)
            set_learning_rate(job, lr)
            batches, cursor = read_batches(job.reader, state, spec.accumulate)
            job.ranks.seed(job.recipe.seed, number)
            pending.append(PendingStep(number, state.progress, lr, batches, take_step(batches)))
            state.step, state.cursor = number, cursor
            finish_steps(left=job.steps_in_flight)
            if number == first:
                record_code(job)
            last, every = state.progress == spec.steps, spec.evaluate_every
            if job.valid and (state.progress in ends or (every and passed // every < state.progress // every)):
                finish_steps(left=0)
                with nullcontext() if pace is None else pace.pausing():
                    _validate(job, log)
            # read once: a signal after the save counts for the next step
            stop, interrupted = _should_stop(job), job.ranks.any(signals.received or job.writer.failed)
            if interrupted:
                job.ranks.on_first(job.writer.check)
            if interrupted or stop or last or _is_save_step(spec, state):
                finish_steps(left=0)
                save(job)
            if interrupted and not last:
                finish_saves(job)
                raise Interrupted(f"interrupted at step {number} and saved: continue with --resume")
            if stop:
                log.print(f"stopped at step {number}: no improvement in {state.stale} evaluations")
        job.watchdog.enter(f"the checkpoint of step {state.step}")
        finish_saves(job)
    return state


def read_batches(loader: Loader, state: TrainState, accumulate: int) -> tuple[list[Batch], Cursor]:
    """Return the micro-batches of the next step, and the cursor after them."""
    cursor, batches = state.cursor, []
    for _ in range(accumulate):
        batch, cursor = loader.read(cursor)
        batches.append(batch)
    return batches, cursor


def _is_save_step(spec: Train, state: TrainState) -> bool:
    """Return whether a checkpoint is due before the last step: at the best one, and every `save_every` steps."""
    regular = spec.save_every is not None and state.step % spec.save_every == 0
    return regular or state.step == state.best_step


def _enter(pace: TimedPace | None, number: int, before: float) -> float:
    assert pace is not None  # the first process has it
    return pace.enter(number, before)


def steps_between(place: float, other: float) -> range:
    """Return the steps of the schedule after one place, up to another."""
    return range(math.floor(place) + 1, math.floor(other) + 1)


def _finish_step(job: Job, step: PendingStep, log: Log) -> None:
    """Read the loss of a step and log it."""
    total, norm, *reward = step.result.scalars.read()
    loss = total / max(step.result.labels, 1)
    if not (math.isfinite(total) and math.isfinite(norm)):
        _note_bad_step(job, step, loss, log)
        return
    job.state.bad_in_a_row = 0
    job.state.tokens += step.result.tokens
    log.step(step.number, loss, step.lr, norm, step.result.tokens, reward[0] if reward else None, step.place)


def _note_bad_step(job: Job, step: PendingStep, loss: float, log: Log) -> None:
    state = job.state
    state.bad_in_a_row += 1
    state.bad_in_all += 1
    state.segment_memory = None  # it may hold NaN or Inf, too
    log.write(step.number, skipped=True, loss=loss if math.isfinite(loss) else str(loss))
    if state.bad_in_a_row >= job.recipe.train.max_bad_steps:
        examples = ", ".join(str(i) for batch in step.batches for i in batch.examples[:8])
        raise Diverged(
            f"{state.bad_in_a_row} steps in a row without a finite loss or gradient, last at step {step.number}, "
            f"examples {examples}: lower train.optimizer.lr, or lengthen the warm-up"
        )


def _should_stop(job: Job) -> bool:
    """Return whether `patience` evaluations brought no improvement (early stopping)."""
    patience = job.recipe.train.patience
    return patience is not None and job.state.stale >= patience


def _validate(job: Job, log: Log) -> None:
    """Evaluate on the validation data, and note whether this is the best step."""
    state = job.state
    assert job.valid is not None
    job.watchdog.enter(f"the evaluation of step {state.step}")
    with log.evaluating(state.step, place=state.progress):
        metrics = evaluate(job, job.valid)
    log.evaluation(state.step, "valid", metrics.values)
    metric = job.recipe.train.best
    value = metrics.values[metric] if is_lower_better(metric) else -metrics.values[metric]
    if math.isfinite(value) and (state.best is None or value < state.best):
        state.best, state.best_step, state.stale = value, state.step, 0
    else:
        state.stale += 1


def evaluate(job: Job, rows: Rows) -> Metrics:
    """Evaluate the averaged weights, if there are any, on some rows; the first process does it for all.

    Losses are computed in the precision of training; texts are generated in that of the weights.
    """
    job.model.eval()
    with ema_weights(job), job.autocast(), without_plans():
        model = _gathered_model(job)
        return job.ranks.on_first(lambda: job.task.evaluate(model, rows, job.recipe.batches))


def _gathered_model(job: Job) -> Transformer:
    """Return the model; of a sharded or split one, a copy with all weights on the first process."""
    if not isinstance(job.model, FSDPModule | SplitTransformer):
        return job.model
    weights = gather_weights(job.model)
    with torch.device("meta"):
        copy = Transformer(job.model.config).eval()
    if job.ranks.is_first:
        copy.load_state_dict(weights, assign=True)
        copy.to(job.device)
    return copy


def _open_log(job: Job) -> Log:
    spec = job.recipe.train
    if not job.ranks.is_first:
        return SilentLog()
    at_peak, place = tokens_at_peak(job), job.state.progress
    return Log(job.out, spec.steps, job.state.step, job.console, spec.log_every, at_peak, place, spec.loggers)


def tokens_at_peak(job: Job) -> float | None:
    """Return the tokens per second at an MFU of 1 on all GPUs; None on a CPU, or if it is unknown."""
    if job.device.type != "cuda":
        return None
    batch, _ = job.reader.read(job.state.cursor)
    peak = peak_tokens_per_second(job.model.config, batch, job.device, job.precision)
    return None if peak is None else peak * job.ranks.size
