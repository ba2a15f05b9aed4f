"""The loop: one straight function over built objects."""

import math
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from anyformer.config import io
from anyformer.data.batch import Batch, to_device
from anyformer.data.fingerprint import Fingerprints
from anyformer.data.loader import Loader
from anyformer.data.prefetch import PrefetchLoader, can_fork, ending
from anyformer.data.readers import Rows
from anyformer.nn.aux_outputs import TrackedModule, collect, discard
from anyformer.nn.experts import Mixture
from anyformer.nn.model import Transformer
from anyformer.recipe import Packed, Padded, Recipe
from anyformer.run import RECIPE, write_folder, write_model
from anyformer.tasks.base import Metrics, Task, past_of
from anyformer.training.checkpoint import (
    TrainState,
    checkpoint_path,
    gather,
    here,
    planned,
    prune,
    weights,
    write_state,
)
from anyformer.training.compiler import options
from anyformer.training.ema import average, averaged
from anyformer.training.log import Log, Mute
from anyformer.training.objective import Objective, StepInputs
from anyformer.training.parallel import ALONE, Ranks, replicate, syncing, whole
from anyformer.training.pending_scalars import PendingScalars
from anyformer.training.schedule import rate
from anyformer.training.scheduled_sampling import forced
from anyformer.training.signals import Signals
from anyformer.training.snapshots import drop_snapshots, snapshot_steps, write_snapshot
from anyformer.training.step_graphs import Recorder
from anyformer.training.utilisation import ceiling

AHEAD = 4  # steps of a GPU: what the host does now and then, as to write a line, is not waited for


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
    precision: str  # fp32, bf16, fp16, fp8
    task: Task
    model: Transformer
    optimizer: torch.optim.Optimizer
    loader: Loader
    valid: Rows | None
    state: TrainState
    scaler: torch.amp.GradScaler
    console: Console
    ranks: Ranks = ALONE
    data: Fingerprints = field(default_factory=dict)

    @cached_property
    def objective(self) -> Objective:
        """What a step makes small."""
        train = self.recipe.train
        return Objective(self.model, self.task, train.label_smoothing, train.checkpoint_activations)

    @cached_property
    def reader(self) -> Loader:
        """The loader, ahead of a GPU, which is to wait for nobody."""
        return PrefetchLoader(self.loader) if self.device.type == "cuda" and can_fork() else self.loader

    @cached_property
    def ahead(self) -> int:
        """How many steps may run before the numbers of one are read: some on a GPU, where nothing hangs on them."""
        moves = any(isinstance(module, TrackedModule) for module in self.model.modules())
        memory = self.model.decoder is not None and self.model.decoder.segment_memory
        alone = self.device.type == "cuda" and self.ranks.size == 1 and not self.scaler.is_enabled()
        return AHEAD if alone and not moves and not memory else 0

    @cached_property
    def recorder(self) -> Recorder | None:
        """Records steps, where they ask nothing of the host."""
        spec, experts = self.recipe.train, any(isinstance(module, Mixture) for module in self.model.modules())
        asks = spec.own_tokens is not None or spec.checkpoint_activations or experts or not self.objective.says
        if asks or not self.ahead or not compiles(self.recipe, self.device):
            return None
        for group in self.optimizer.param_groups:  # a recording reads them where they are
            group["lr"] = torch.tensor(group["lr"], device=self.device)
        return Recorder(self.device)


@dataclass(frozen=True)
class Step:
    """A step that was taken, or is being taken by the device."""

    number: int
    lr: float
    batches: list[Batch]
    asked: int  # labels
    numbers: PendingScalars  # the summed loss, and the gradient's norm


def fit(job: Job) -> TrainState:
    """Trains to the last step, saving and evaluating on the way."""
    spec, state = job.recipe.train, job.state
    run, signals, open_steps, most = objective(job), Signals(), deque[Step](), job.ahead
    with signals, _log(job) as log, ending(job.reader):
        log.forget_after(state.step)
        job.ranks.first(lambda: drop_snapshots(job.out, after=state.step))
        marks = snapshot_steps(spec, sum(p.numel() * p.element_size() for p in job.model.parameters()))
        left = state.step < spec.steps and not _stale(job)
        if left and job.ranks.first(checkpoint_path(job.out, state.step).exists) and job.ranks.any(signals.came):
            raise Interrupted(f"interrupted at step {state.step}, which is saved: continue with --resume")

        def settle(left: int) -> None:
            while len(open_steps) > left:
                _account(job, open_steps.popleft(), log)

        while state.step < spec.steps and not _stale(job):
            if state.step in marks and (problem := write_snapshot(job.out, state, job.model, job.task, job.ranks)):
                log.say(problem)
            number = state.step + 1
            lr = spec.optimizer.lr * rate(spec.schedule, number, spec.steps)
            set_rate(job, lr)
            batches, place = read_batches(job.reader, state, spec.accumulate)
            job.ranks.seed(job.recipe.seed, number)
            open_steps.append(Step(number, lr, batches, *learn(job, run, batches)))
            state.step, state.place = number, place
            settle(most)
            last = number == spec.steps
            if job.valid and (last or (spec.evaluate_every and number % spec.evaluate_every == 0)):
                settle(0)
                _evaluate(job, log)
            # read once: a signal after the save is for the next step
            stop, came = _stale(job), job.ranks.any(signals.came)
            if came or last or stop or state.best_step == number or (spec.save_every and number % spec.save_every == 0):
                settle(0)
                save(job)
            if came and not last:
                raise Interrupted(f"interrupted at step {number} and saved: continue with --resume")
            if stop:
                log.say(f"stopped at step {number}: no improvement in {state.stale} evaluations")
    return state


def read_batches(loader: Loader, state: TrainState, accumulate: int) -> tuple[list[Batch], Any]:
    place, batches = state.place, []
    for _ in range(accumulate):
        batch, place = loader.read(place)
        batches.append(batch)
    return batches, place


def set_rate(job: Job, lr: float) -> None:
    for group in job.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * group["pace"])
        else:
            group["lr"] = lr * group["pace"]


def learn(job: Job, run: Any, batches: list[Batch]) -> tuple[int, PendingScalars]:
    """One step: over how many labels, and the summed loss with the gradient's norm.

    Where one of these is not finite, nothing is learnt.
    """
    asked = [batch.target_count for batch in batches]
    if not job.model.training:
        job.model.train()
    given = [job.objective.read(_forced(job, job.ranks.share(batch))) for batch in batches]
    counts = torch.tensor([max(sum(asked), 1), *asked], dtype=torch.float32)

    def work(inputs: tuple[list[StepInputs], Tensor]) -> Tensor:
        return _descend(job, run, *inputs)

    if job.recorder is not None:
        return sum(asked), PendingScalars.of(job.recorder.do(work, (given, counts)))
    return sum(asked), PendingScalars.of(work(([one.to(job.device) for one in given], to_device(counts, job.device))))


def _forced(job: Job, batch: Batch) -> Batch:
    """What a decoder reads: the target, or what it says itself."""
    spec, packed = job.recipe.train.own_tokens, isinstance(job.recipe.batches, Packed)
    if spec is None:
        return batch
    with _autocast(job):
        return forced(job.model, batch.to(job.device), packed, spec, job.state.step + 1)


def _descend(job: Job, run: Any, given: list[StepInputs], counts: Tensor) -> Tensor:
    """The step itself: the summed loss and the gradient's norm. Counted are the labels of all, then of each."""
    packed, total = isinstance(job.recipe.batches, Packed), torch.zeros((), device=job.device)
    for number, one in enumerate(given, start=1):
        with syncing(run, last=number == len(given)):
            with _autocast(job):
                before = past_of(job.model, one.batch, job.state.past)
                loss, beside, job.state.past = run(*job.objective.ask(one, packed), before)
            if number < len(given):
                collect(job.model)
            # a sum over the tokens of all batches of the step and of all processes, whose gradients are averaged:
            # never a mean of means; what stands beside is per token of all processes, as the loss
            job.scaler.scale((loss + beside * counts[number]) * job.ranks.size / counts[0]).backward()
        total += loss.detach()
    total = job.ranks.sum(total)
    return torch.stack([total, _step(job, total).detach().float()])


def _step(job: Job, total: Tensor) -> Tensor:
    """Clips and applies the gradients where they are finite; the gradient's norm."""
    job.scaler.unscale_(job.optimizer)
    limit = job.recipe.train.clip or math.inf
    norm = whole(torch.nn.utils.clip_grad_norm_(job.model.parameters(), limit))
    fine, decay = norm.isfinite() & total.isfinite(), job.recipe.train.ema
    if job.ahead:
        recorded = torch.cuda.is_current_stream_capturing()
        for group in job.optimizer.param_groups:
            group["capturable"] = recorded
        job.optimizer.found_inf = (~fine).float()  # type: ignore[attr-defined]  # its kernel then leaves all as it was
        job.optimizer.step()
        if decay is not None:
            average(job, (1 - decay) * fine)
    elif fine:
        job.scaler.step(job.optimizer)
        job.model.commit()
        if decay is not None:
            average(job, 1 - decay)
    else:
        discard(job.model)
    job.scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    return norm


def _account(job: Job, step: Step, log: Log) -> None:
    """Reads the numbers of a step."""
    total, norm = step.numbers.read()
    loss = total / max(step.asked, 1)
    if not (math.isfinite(total) and math.isfinite(norm)):
        _note_bad(job, step, loss, log)
        return
    job.state.bad_in_a_row = 0
    tokens = sum(batch.tokens for batch in step.batches)
    job.state.tokens += tokens
    log.step(step.number, loss, step.lr, norm, tokens)


def _note_bad(job: Job, step: Step, loss: float, log: Log) -> None:
    state = job.state
    state.bad_in_a_row += 1
    state.bad_in_all += 1
    state.past = None  # it may not be finite, either
    log.write(step.number, skipped=True, loss=loss if math.isfinite(loss) else str(loss))
    if state.bad_in_a_row >= job.recipe.train.max_bad_steps:
        examples = ", ".join(str(i) for batch in step.batches for i in batch.examples[:8])
        raise Diverged(
            f"{state.bad_in_a_row} steps in a row without a finite loss or gradient, last at step {step.number}, "
            f"examples {examples}: lower train.optimizer.lr, or lengthen the warm-up"
        )


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
    by = job.recipe.train.best
    value = metrics.values[by] if by == "loss" else -metrics.values[by]
    if math.isfinite(value) and (state.best is None or value < state.best):
        state.best, state.best_step, state.stale = value, state.step, 0
    else:
        state.stale += 1


def evaluate(job: Job, rows: Rows) -> Metrics:
    """By the first process, which has all weights for it."""
    job.model.eval()
    with averaged(job):
        model = _undivided(job)
        return job.ranks.first(lambda: job.task.evaluate(model, rows, job.recipe.batches))


def _undivided(job: Job) -> Transformer:
    """The model, or a copy of it (on the first process) where processes share it out."""
    if not isinstance(job.model, FSDPModule):
        return job.model
    kept = weights(job.model)
    with torch.device("meta"):
        copy = Transformer(job.model.config).eval()
    if job.ranks.leads:
        copy.load_state_dict(kept, assign=True)
        copy.to(job.device)
    return copy


def save(job: Job) -> Path:
    """A checkpoint of now, whole or not at all; older ones go."""
    path = checkpoint_path(job.out, job.state.step)
    if job.ranks.first(path.exists):
        return path
    kept, resuming = weights(job.model), gather(job.state, job.model, job.optimizer)

    def fill(folder: Path) -> None:
        write_model(folder, kept, job.model.config, job.task.spec, job.task)
        io.save(job.recipe, folder / RECIPE)
        write_state(folder, job.state, resuming, here(job.model, job.ranks), job.scaler.state_dict(), job.data)

    def write() -> None:
        write_folder(path, fill)
        spec, best = job.recipe.train, checkpoint_path(job.out, job.state.best_step)
        averaged_at_the_end = planned(job.out, spec.save_every, job.state.step)[-spec.average :]
        prune(job.out, spec.keep, [best, *averaged_at_the_end])

    job.ranks.first(write)
    return path


def _autocast(job: Job) -> Any:
    if job.precision == "fp32":
        return nullcontext()
    return torch.autocast(job.device.type, dtype=torch.float16 if job.precision == "fp16" else torch.bfloat16)


def compiles(recipe: Recipe, device: torch.device) -> bool:
    """On a GPU it pays, where batches have one shape."""
    pays = device.type == "cuda" and not isinstance(recipe.batches, Padded)
    return recipe.train.compile == "on" or (recipe.train.compile == "auto" and pays)


def objective(job: Job) -> Any:
    """What the loop calls; of a model that is shared out, blocks were compiled one by one."""
    if isinstance(job.model, FSDPModule):
        return job.objective
    if not compiles(job.recipe, job.device):
        return replicate(job.objective, job.ranks)
    how = options(job.model.config, job.precision == "fp8")
    return replicate(torch.compile(job.objective, options=how), job.ranks)


def tokens_at_peak(job: Job) -> float | None:
    """Tokens a second that would use all of the GPUs."""
    if job.device.type != "cuda":
        return None
    peak = ceiling(job.model.config, job.reader.read(job.state.place)[0], job.device, job.precision)
    return None if peak is None else peak * job.ranks.size


def _log(job: Job) -> Log:
    spec = job.recipe.train
    if not job.ranks.leads:
        return Mute()
    return Log(job.out, spec.steps, job.state.step, job.console, spec.log_every, tokens_at_peak(job))
