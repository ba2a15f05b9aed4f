"""Dry run of a training: data, model, memory and time, from a few real steps; nothing is written."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from torch import Tensor

from anyformer.data.batch import Batch
from anyformer.data.conversations import texts_of
from anyformer.data.loader import CropLoader, EpochLoader, OrderedLoader
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.inspection.count import Table, count
from anyformer.nn.model import Transformer
from anyformer.recipe import Lengths, Recipe
from anyformer.tasks.base import BuiltTask
from anyformer.training.checkpoint import START
from anyformer.training.first_rows import ExampleSummary, first_rows
from anyformer.training.job import Job
from anyformer.training.machine import peak_tokens_per_second, threads
from anyformer.training.make_task import TEXT_COLUMNS, fit_config, make_task
from anyformer.training.out_of_memory import BUILD_ADVICE, advise_out_of_memory, train_advice
from anyformer.training.prepare import build, fit_rows, read_rows
from anyformer.training.saving import snapshot_steps
from anyformer.training.step import StepResult, TrainingStep, stored_code

SAMPLED_BATCHES = 50  # for their size and padding
MIN_TIMED_STEPS = 3
MIN_TIMED_SECONDS = 2.0
LONG_STEP_SECONDS = 20.0  # a step that takes longer is timed once, also the first one
MAX_COUNTED_ROWS = 10_000  # of each split, whose unknown tokens are counted
LINE_WIDTH = 100  # of an example


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step. Activations are those of `count`; all others are measured in this process."""

    weights: int
    gradients: int
    optimizer: int
    average: int  # moving average of the weights
    frozen: int  # weights of the model whose logits are part of the loss: a teacher, or the start of the model
    activations: int
    loss: int  # gradients between the logits and the loss, in fp32
    measured: int | None  # peak memory of the GPU

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimiser": self.optimizer,
            "average": self.average,
            "frozen model": self.frozen,
            "activations": self.activations,
            "loss": self.loss,
        }


@dataclass(frozen=True)
class TrainingPlan:
    """Facts of a training run before it starts."""

    recipe: Recipe
    device: str
    precision: str
    rows: int
    bad: int
    valid: int | None  # rows
    tokens: int  # in an epoch
    vocabularies: dict[str, int]  # number of ids of each tokenizer, by side
    unknown: dict[str, dict[str, float]]  # share of tokens that are <unk>, by split and side
    table: Table  # of the largest batch
    shape: str
    batch: tuple[float, float, float]  # means: rows, tokens of a target row, tokens of a source row
    batch_tokens: float  # without padding
    padding: float  # share of all positions
    epochs: float
    memory: StepMemory
    snapshots: int  # number of steps whose weights are kept for `explore`
    seconds: float  # per step
    tokens_per_second: float  # without padding; with the tokens of sampled answers
    peak_share: float | None  # MFU
    steps: int  # of the recipe, or as many as its minutes suffice for
    examples: tuple[ExampleSummary, ...]

    def render(self) -> str:
        return "\n".join(_lines(self))


def plan(
    recipe: Recipe, console: Console | None = None, fit: Callable[[Lengths], Recipe] | None = None
) -> TrainingPlan:
    """Read the data, build tokenizer and model, and take a few steps; nothing is written but compiled code.

    `fit` returns the recipe that is measured, with other batches, model and training, by the lengths of examples.
    """
    console = console or Console(stderr=True)
    with console.status("reading the data"), advise_out_of_memory(lambda: "while the data is read"):
        splits = read_rows(recipe)
    with console.status("building tokenizer and model"), advise_out_of_memory(lambda: BUILD_ADVICE):
        task = make_task(recipe, splits["train"], console)
        train, valid = fit_rows(recipe, task, splits, console)
        if fit is not None:
            recipe = fit(_lengths(recipe, task, train))
        job = build(recipe, Path(), task, train, valid, console)
    advice = advise_out_of_memory(lambda: train_advice(job))
    with console.status("taking a few steps"), advice, threads(job.threads), stored_code(job):
        return _measure(job, train)


def _lengths(recipe: Recipe, task: BuiltTask, rows: Rows) -> Lengths:
    """Return the lengths in tokens of the examples that a recipe's loader reads."""
    with torch.device("meta"):
        model = Transformer(fit_config(recipe, task))
    loader = task.loader(rows, recipe.batches, recipe.seed, model)
    if isinstance(loader, EpochLoader):
        longest = loader.sizes.max(axis=1)
        return Lengths(int(longest.sum()), int(longest.max()))
    assert isinstance(loader, CropLoader | OrderedLoader)
    return Lengths(len(loader.ids), len(loader.ids))


def _measure(job: Job, train: Rows) -> TrainingPlan:
    batches = list(itertools.islice(_batches(job), SAMPLED_BATCHES))
    largest = max(batches, key=lambda batch: batch.slots)
    table = _count(job, largest)
    per_slot, trained = _time(job, batches)
    slots, tokens = sum(batch.slots for batch in batches), sum(batch.tokens for batch in batches)
    per_step = job.recipe.train.accumulate * slots / len(batches)
    speed, share = trained * tokens / slots / per_slot, None
    if job.device.type == "cuda":
        peak = peak_tokens_per_second(job.model.config, largest, job.device, job.precision)
        share = None if peak is None else speed / peak
    spec, seconds = job.recipe.train, per_slot * per_step
    steps = spec.steps if spec.minutes is None else max(1, round(60 * spec.minutes / seconds))
    epoch_tokens, epochs = _epochs(job, steps)
    sides = _sides(job.task)
    return TrainingPlan(
        recipe=job.recipe,
        device=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        precision=job.precision,
        rows=len(train),
        bad=len(train.bad),
        valid=None if job.valid is None else len(job.valid),
        tokens=epoch_tokens,
        vocabularies={side: tokenizer.size for side, tokenizer in sides.items()},
        unknown={split: _unknown(job.task, rows) for split, rows in (("train", train), ("valid", job.valid)) if rows},
        table=table,
        shape=job.model.config.shape,
        batch=_sizes(batches),
        batch_tokens=tokens / len(batches),
        padding=1 - tokens / slots,
        epochs=epochs,
        memory=_memory(job, table, largest),
        snapshots=len(snapshot_steps(job.recipe.train, table.parameters)),
        seconds=seconds,
        tokens_per_second=speed,
        peak_share=share,
        steps=steps,
        examples=tuple(first_rows(job, batches[0])),
    )


def _sides(task: BuiltTask) -> dict[str, TextTokenizer]:
    """Return the tokenizers of a task by side; a single one has an empty name."""
    if task.source_tokenizer is None:
        return {"": task.tokenizer}
    return {"source": task.source_tokenizer, "target": task.tokenizer}


def _unknown(task: BuiltTask, rows: Rows) -> dict[str, float]:
    """Return the share of unknown tokens in the first rows, by side, for tokenizers that have such a token."""
    shares = {}
    for side, tokenizer in _sides(task).items():
        names = [side] if side else [name for name in TEXT_COLUMNS if name in rows.columns]
        cells = ((name, cell) for name in names for cell in rows.columns.get(name, [])[:MAX_COUNTED_ROWS])
        texts = [text.replace("\n", " ") for name, cell in cells for text in texts_of(name, cell)]
        ids = [id for row in tokenizer.encode_batch(texts) for id in row]
        if tokenizer.unk is not None and ids:
            shares[side] = ids.count(tokenizer.unk) / len(ids)
    return shares


def _batches(job: Job) -> Iterator[Batch]:
    cursor = START
    while True:
        batch, cursor = job.loader.read(cursor)
        yield batch


def _sizes(batches: list[Batch]) -> tuple[float, float, float]:
    """Return the means of rows, of tokens of a target row, and of tokens of a source row."""
    rows = sum(len(batch.ids) for batch in batches)
    target = sum(batch.ids.numel() for batch in batches)
    source = sum(batch.source.numel() for batch in batches if batch.source is not None)
    return rows / len(batches), target / rows, source / rows


def _epochs(job: Job, steps: int) -> tuple[int, float]:
    """Return the tokens of an epoch, and the number of epochs."""
    read = steps * job.recipe.train.accumulate
    match job.loader:
        case EpochLoader() as examples:
            return int(examples.sizes.sum()), read / len(examples.plan(0))
        case CropLoader(ids=ids, spec=spec):
            return len(ids), read * spec.rows * spec.length / len(ids)
        case OrderedLoader(ids=ids, count=count):
            return len(ids), read / count
        case other:
            raise AssertionError(f"no such loader: {other}")


def _time(job: Job, batches: list[Batch]) -> tuple[float, float]:
    """Return the seconds per position of a batch, and the tokens that are trained per token of a batch.

    The second number is 1, except where steps sample answers.
    """
    take_step, pending = TrainingStep(job), deque[tuple[Batch, StepResult]]()
    warmup = len(batches) if job.device.type == "cuda" else 1  # a GPU compiles and captures its steps first
    times, read, trained = list[float](), 0, 0
    began = last = time.perf_counter()
    for batch in itertools.cycle(batches):
        pending.append((batch, take_step([batch])))
        if len(pending) <= job.steps_in_flight:
            continue
        done, result = pending.popleft()
        result.scalars.read()
        now = time.perf_counter()
        seconds, last = now - last, now
        times.append(seconds / done.slots)
        read, trained = read + done.tokens, trained + result.tokens
        if seconds > LONG_STEP_SECONDS and not job.compiled:
            return times[-1], trained / read
        if len(times) == warmup:
            began = now
        if len(times) >= warmup + MIN_TIMED_STEPS and now - began > MIN_TIMED_SECONDS:
            break
    quartile = sorted(times[warmup:])[(len(times) - warmup) // 4]  # the lower: other programs only slow steps down
    return quartile, trained / read


# -- memory -----------------------------------------------------------------------------------------------------------


def _count(job: Job, batch: Batch) -> Table:
    (rows, length), value = batch.ids.shape, 4 if job.precision == "fp32" else 2
    source = None if batch.source is None else batch.source.shape[1]
    return count(job.model.config, length, batch=rows, source_length=source, bytes_per_value=value)


def _memory(job: Job, table: Table, batch: Batch) -> StepMemory:
    weights = sum(p.nbytes for p in job.model.parameters())
    states = (x for values in job.optimizer.state.values() for x in values.values() if isinstance(x, Tensor))
    activations = table.activation_bytes
    if job.recipe.train.checkpoint_activations:
        activations = _checkpointed_bytes(job, table, batch)
    return StepMemory(
        weights=weights,
        gradients=sum(p.nbytes for p in job.model.parameters() if p.requires_grad),
        optimizer=sum(x.nbytes for x in states),
        average=weights if job.recipe.train.ema is not None else 0,
        frozen=0 if job.frozen is None else sum(p.nbytes for p in job.frozen.parameters()),
        activations=activations,
        loss=2 * 4 * _logit_count(job, batch),
        measured=torch.cuda.max_memory_allocated(job.device) if job.device.type == "cuda" else None,
    )


def _logit_count(job: Job, batch: Batch) -> int:
    """Return the number of logits of a batch."""
    head, config = job.model.config.head, job.model.config
    return (len(batch.ids) if head.per_row else batch.ids.numel()) * head.values(config.width, config.vocab)


def _checkpointed_bytes(job: Job, table: Table, batch: Batch) -> int:
    """Return the bytes of the input of each layer, and of the activations of one layer at a time."""
    config, inputs = job.model.config, [batch.ids] if batch.source is None else [batch.source, batch.ids]
    layer_inputs = sum(
        stack.depth * config.width * x.numel() * table.bytes_per_value
        for stack, x in zip(config.stacks.values(), inputs, strict=True)
    )
    return layer_inputs + sum(row.activation_bytes // row.layers for row in table.rows)


# -- rendering --------------------------------------------------------------------------------------------------------


def _lines(plan: TrainingPlan) -> Iterator[str]:
    spec, memory = plan.recipe, plan.memory
    rows, target, source = plan.batch
    roles = {*spec.task.columns}
    thing = "pair" if {"source", "pair"} & roles else "conversation" if "messages" in roles else "text"
    bad = f", {plan.bad:,} bad rows skipped" if plan.bad else ""
    valid = "" if plan.valid is None else f"; for validation {_plural(plan.valid, thing)}"
    yield f"data       {_plural(plan.rows, thing)}{bad}, {plan.tokens:,} tokens{valid}"
    kinds = {"source": (spec.source_tokenizer or spec.tokenizer).kind}
    sizes = (f"{_side(side)}{kinds.get(side, spec.tokenizer.kind)}, {n:,} ids" for side, n in plan.vocabularies.items())
    shares = [f"{split}{_side(side, ' ')} {x:.2%}" for split, each in plan.unknown.items() for side, x in each.items()]
    unknown = f"; unknown tokens: {', '.join(shares)}" if shares else ""
    yield f"tokenizer  {'; '.join(sizes)}{unknown}"
    yield f"model      {plan.shape}, {plan.table.parameters:,} parameters: {_parts(plan.table)}"
    width = f"{source:.0f} + {target:.0f}" if source else f"{target:.0f}"
    yield (
        f"batches    {spec.batches.kind}, on average {rows:.0f} rows of {width} tokens, {plan.padding:.1%} padding, "
        f"{plan.batch_tokens:,.0f} tokens"
    )
    each = spec.train.accumulate
    read = plan.steps * each * plan.batch_tokens
    several = f" of {each} batches" if each > 1 else ""
    yield f"training   {plan.steps:,} steps{several} = {plan.epochs:.3g} epochs = {_short(read)} tokens"
    listed = ", ".join(f"{name} {_bytes(size)}" for name, size in memory.parts.items() if size)
    measured = f"; peak of the device {_bytes(memory.measured)}" if memory.measured else ""
    yield f"memory     at least {_bytes(memory.total)}: {listed}{measured}"
    yield f"disk       {_disk(plan)}"
    share = f", {plan.peak_share:.1%} of the peak" if plan.peak_share is not None else ""
    excluded = "" if plan.valid is None or spec.train.minutes is not None else "; without evaluations"
    yield (
        f"time       about {duration(plan.steps * plan.seconds)} in {plan.precision} on {plan.device}: "
        f"{duration(plan.seconds)} a step, {plan.tokens_per_second:,.0f} tokens/s{share}{excluded}"
    )
    for example in plan.examples:
        yield ""
        for name, text in (("source", example.source), ("input", example.inputs), ("labels", example.labels)):
            if text is not None:
                yield f"{name:<9}  {_clipped(text)}"


def _disk(plan: TrainingPlan) -> str:
    """Return the files of a run: the result, its checkpoints with optimiser state, and snapshots."""
    memory, spec = plan.memory, plan.recipe.train
    checkpoint = memory.weights + memory.optimizer + memory.average
    result, snapshots = memory.weights, plan.snapshots * memory.weights
    several = spec.save_every is not None or (spec.evaluate_every is not None and plan.valid is not None)
    kept = spec.keep + (plan.valid is not None) if several else 1  # the newest and the best, or that of the end
    return (
        f"about {_bytes(result + kept * checkpoint + snapshots)}: result {_bytes(result)}, checkpoints {kept} × "
        f"{_bytes(checkpoint)}, snapshots {plan.snapshots} × {_bytes(memory.weights)}"
    )


def _side(side: str, before: str = "") -> str:
    return f"{before}{side}{'' if before else ' '}" if side else ""


def _parts(table: Table) -> str:
    sums: dict[str, int] = {}
    for row in table.rows:
        name = "embeddings" if row.part.endswith("embeddings") else row.part.partition(" ")[0]
        sums[name] = sums.get(name, 0) + row.parameters
    return ", ".join(f"{name} {n:,}" for name, n in sums.items() if n)


def _plural(n: int, thing: str) -> str:
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


def _clipped(text: str) -> str:
    """Return the beginning and the end of a text in `LINE_WIDTH` cells; Korean and Chinese letters take two."""
    if cell_len(text) <= LINE_WIDTH:
        return text
    tail = set_cell_size(text[::-1], LINE_WIDTH // 4)[::-1].strip()
    return f"{set_cell_size(text, LINE_WIDTH - LINE_WIDTH // 4 - 3).strip()} … {tail}"


def _short(n: float) -> str:
    units = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
    return next((f"{n / size:.3g} {unit}" for unit, size in units if n >= size), f"{n:.0f}")


def _bytes(n: float) -> str:
    size, unit = (n / 2**30, "GiB") if n >= 2**30 else (n / 2**20, "MiB")
    return f"{size:.{0 if size >= 10 else 1}f} {unit}"


def duration(seconds: float) -> str:
    """Return a time with its unit."""
    units = (("h", 3600, 6000), ("min", 60, 100), ("s", 1, 1), ("ms", 1e-3, 0))
    size, unit = next((seconds / length, unit) for unit, length, least in units if seconds >= least)
    return f"{size:.{0 if size >= 10 else 1}f} {unit}"
