"""What a training would do and take, from its data, its model and a few real steps; nothing is written."""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from torch import Tensor

from anyformer.config import Classifier, Embedder, TokenLabels
from anyformer.conventions import IGNORE, PADDING
from anyformer.data.batch import Batch
from anyformer.data.loader import CropLoader, ExampleLoader, OrderedLoader
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.inspection.count import Table, count
from anyformer.recipe import Recipe, columns
from anyformer.tasks.base import Task
from anyformer.tasks.sequence_level import SequenceLevelTask
from anyformer.tasks.tag import Tagging
from anyformer.training.checkpoint import START
from anyformer.training.loop import Job, compiles, learn, objective
from anyformer.training.out_of_memory import TO_BUILD_WITH_LESS, enough, to_train_with_less
from anyformer.training.prepare import build, fit_rows, make_task, read_rows
from anyformer.training.utilisation import ceiling

LOOKED_AT = 50  # batches, for their size and padding
TIMED = 3  # steps, or more in so many seconds
ENOUGH = 0.5
COUNTED = 10_000  # rows of each split whose unknown tokens are counted
TEXTS = ("text", "pair", "source", "target", "words")  # columns that a tokenizer reads
SHOWN = 3  # rows of the first batch
WIDTH = 100  # of a line of text


@dataclass(frozen=True)
class Memory:
    """Bytes. All but the activations are as they are in this process; those are as `count` has them."""

    weights: int
    gradients: int
    optimizer: int
    average: int  # of the weights
    activations: int
    loss: int  # the gradients on the way from the logits to the loss, in fp32
    measured: int | None  # the most that a GPU held at once

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.average + self.activations + self.loss


@dataclass(frozen=True)
class ExampleSummary:
    """A row as the model sees it."""

    source: str | None  # what an encoder reads
    reads: str
    says: str  # what it must say, where something is asked


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    device: str
    precision: str
    rows: int
    bad: int
    valid: int | None  # rows
    tokens: int  # in an epoch
    vocabularies: dict[str, int]  # ids of each tokenizer, by the side that it is for
    unknown: dict[str, dict[str, float]]  # the share of tokens that are <unk>, by split and side
    table: Table  # of the largest batch
    shape: str
    batch: tuple[float, float, float]  # on average: rows, tokens of a target row, of a source row
    batch_tokens: float  # without padding
    padding: float  # share of the slots
    epochs: float
    memory: Memory
    seconds: float  # a step
    peak_share: float | None  # of the hardware
    examples: tuple[ExampleSummary, ...]

    def render(self) -> str:
        return "\n".join(_lines(self))


def plan(recipe: Recipe, console: Console | None = None) -> Plan:
    """Reads the data, makes tokenizer and model, and takes some steps that leave nothing behind."""
    console = console or Console(stderr=True)
    with console.status("reading the data"), enough(lambda: "while the data is read"):
        splits = read_rows(recipe)
    with console.status("making tokenizer and model"), enough(lambda: TO_BUILD_WITH_LESS):
        task = make_task(recipe, splits["train"], console)
        train, valid = fit_rows(recipe, task, splits, console)
        job = build(recipe, Path(), task, train, valid, console)
    with console.status("taking a few steps"), enough(lambda: to_train_with_less(job)):
        return _look(job, train)


def _look(job: Job, train: Rows) -> Plan:
    batches = list(itertools.islice(_batches(job), LOOKED_AT))
    largest = max(batches, key=lambda batch: batch.slots)
    table = _count(job, largest)
    per_slot = _time(job, batches)
    slots, tokens = sum(batch.slots for batch in batches), sum(batch.tokens for batch in batches)
    per_step = job.recipe.train.accumulate * slots / len(batches)
    share = None
    if job.device.type == "cuda":
        most = ceiling(job.model.config, largest, job.device, job.precision)
        share = None if most is None else tokens / slots / per_slot / most
    whole, epochs = _epochs(job)
    sides = _sides(job.task)
    return Plan(
        recipe=job.recipe,
        device=torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        precision=job.precision,
        rows=len(train),
        bad=len(train.bad),
        valid=None if job.valid is None else len(job.valid),
        tokens=whole,
        vocabularies={side: tokenizer.size for side, tokenizer in sides.items()},
        unknown={split: _unknown(job.task, rows) for split, rows in (("train", train), ("valid", job.valid)) if rows},
        table=table,
        shape=job.model.config.shape,
        batch=_sizes(batches),
        batch_tokens=tokens / len(batches),
        padding=1 - tokens / slots,
        epochs=epochs,
        memory=_memory(job, table, largest),
        seconds=per_slot * per_step,
        peak_share=share,
        examples=tuple(_examples(job, batches[0])),
    )


def _sides(task: Task) -> dict[str, TextTokenizer]:
    """Return the tokenizers of a task by side; one that is for both has no name."""
    if task.source_tokenizer is None:
        return {"": task.tokenizer}
    return {"source": task.source_tokenizer, "target": task.tokenizer}


def _unknown(task: Task, rows: Rows) -> dict[str, float]:
    """Return the share of unknown tokens in the first rows, by side, where a tokenizer has such a token."""
    found = {}
    for side, tokenizer in _sides(task).items():
        names = [side] if side else [name for name in TEXTS if name in rows.columns]
        texts = [text for name in names for text in rows.columns.get(name, [])[:COUNTED]]
        ids = [id for row in tokenizer.encode_batch([text.replace("\n", " ") for text in texts]) for id in row]
        if tokenizer.unk is not None and ids:
            found[side] = ids.count(tokenizer.unk) / len(ids)
    return found


def _batches(job: Job) -> Iterator[Batch]:
    place = START
    while True:
        batch, place = job.loader.read(place)
        yield batch


def _sizes(batches: list[Batch]) -> tuple[float, float, float]:
    rows = sum(len(batch.ids) for batch in batches)
    target = sum(batch.ids.numel() for batch in batches)
    source = sum(batch.source.numel() for batch in batches if batch.source is not None)
    return rows / len(batches), target / rows, source / rows


def _epochs(job: Job) -> tuple[int, float]:
    """Tokens in an epoch, and how many epochs the steps are."""
    read = job.recipe.train.steps * job.recipe.train.accumulate
    match job.loader:
        case ExampleLoader() as pieces:
            return int(pieces.sizes.sum()), read / len(pieces.plan(0))
        case CropLoader(ids=ids, spec=spec):
            return len(ids), read * spec.rows * spec.length / len(ids)
        case OrderedLoader(ids=ids, count=count):
            return len(ids), read / count
        case other:
            raise AssertionError(f"no such loader: {other}")


def _time(job: Job, batches: list[Batch]) -> float:
    """Seconds for a slot of a batch, in steps that change the weights as training would."""
    run = objective(job)
    warm = 3 if compiles(job.recipe, job.device) else 1  # compiling takes a step for each new kind of shape
    found: list[float] = []
    began = time.perf_counter()
    for batch in itertools.cycle(batches):
        start = time.perf_counter()
        learn(job, run, [batch])[1].read()
        found.append((time.perf_counter() - start) / batch.slots)
        if len(found) == warm:
            began = time.perf_counter()
        if len(found) >= warm + TIMED and time.perf_counter() - began > ENOUGH:
            break
    return statistics.median(found[warm:])  # another program's moment does not count


# -- memory -----------------------------------------------------------------------------------------------------------


def _count(job: Job, batch: Batch) -> Table:
    (rows, length), value = batch.ids.shape, 4 if job.precision == "fp32" else 2
    source = None if batch.source is None else batch.source.shape[1]
    return count(job.model.config, length, batch=rows, source_length=source, bytes_per_value=value)


def _memory(job: Job, table: Table, batch: Batch) -> Memory:
    weights = sum(p.nbytes for p in job.model.parameters())
    kept = (x for values in job.optimizer.state.values() for x in values.values() if isinstance(x, Tensor))
    activations = table.activation_bytes
    if job.recipe.train.checkpoint_activations:
        activations = _recomputed(job, table, batch)
    return Memory(
        weights=weights,
        gradients=sum(p.nbytes for p in job.model.parameters() if p.requires_grad),
        optimizer=sum(x.nbytes for x in kept),
        average=weights if job.recipe.train.ema is not None else 0,
        activations=activations,
        loss=2 * 4 * _logits(job, batch),
        measured=torch.cuda.max_memory_allocated(job.device) if job.device.type == "cuda" else None,
    )


def _logits(job: Job, batch: Batch) -> int:
    """How many a batch has."""
    head, config = job.model.config.head, job.model.config
    if isinstance(head, Embedder):
        return len(batch.ids) * config.width
    if isinstance(head, TokenLabels):
        return batch.ids.numel() * head.labels * (head.labels + 1 if head.crf else 1)
    return len(batch.ids) * head.labels if isinstance(head, Classifier) else batch.ids.numel() * config.vocab


def _recomputed(job: Job, table: Table, batch: Batch) -> int:
    """The input of each layer, and one layer's activations at a time."""
    config, read = job.model.config, [batch.ids] if batch.source is None else [batch.source, batch.ids]
    inputs = sum(
        stack.depth * config.width * x.numel() * table.bytes_per_value
        for stack, x in zip(config.stacks.values(), read, strict=True)
    )
    return inputs + sum(row.activation_bytes // row.layers for row in table.rows)


# -- the first rows ---------------------------------------------------------------------------------------------------


def _examples(job: Job, batch: Batch) -> Iterator[ExampleSummary]:
    task, target = job.task, job.task.tokenizer
    source = task.source_tokenizer or target
    texts = len(batch.ids) // len(batch.labels)  # of an example: two of a pair that is read apart
    for i in range(min(SHOWN, len(batch.labels))):
        at = None if batch.segments is None else batch.segments[i]
        if at is not None and bool((at == PADDING).all()):
            return  # rows that fill up the batch
        there = None
        if batch.source is not None:
            there = spell(source, batch.source[i], None if batch.source_segments is None else batch.source_segments[i])
        asked = batch.labels[i]
        says = task.format_label(asked) if isinstance(task, SequenceLevelTask | Tagging) else spell(target, asked, at)
        own = slice(texts * i, texts * (i + 1))
        segments = [None] * texts if batch.segments is None else batch.segments[own]
        reads = (spell(target, *row) for row in zip(batch.ids[own], segments, strict=True))
        yield ExampleSummary(there, " | ".join(reads), says)


def spell(tokenizer: TextTokenizer, ids: Tensor, segments: Tensor | None) -> str:
    """A row as text: special tokens by name, ¦ between packed pieces, … for what is not asked; padding is left out."""
    names = tokenizer.special
    words: list[str] = []
    pieces = ids.tolist(), [0] * len(ids) if segments is None else segments.tolist()
    for segment, members in itertools.groupby(zip(*pieces, strict=True), key=lambda pair: pair[1]):
        if segment == PADDING:
            continue
        words += ["¦"] if words else []
        for named, run in itertools.groupby((i for i, _ in members), key=lambda i: i in names or i == IGNORE):
            if not named:
                words.append(tokenizer.decode(run).replace("\n", "⏎").strip(" "))
            else:
                words += dict.fromkeys("…" if i == IGNORE else tokenizer.token(i) for i in run)
    return " ".join(filter(None, words))


# -- rendering --------------------------------------------------------------------------------------------------------


def _lines(found: Plan) -> Iterator[str]:
    spec, memory = found.recipe, found.memory
    rows, target, source = found.batch
    thing = "pair" if {"source", "pair"} & {*columns(spec.task)} else "text"
    bad = f", {found.bad:,} bad left out" if found.bad else ""
    valid = "" if found.valid is None else f"; to validate {_many(found.valid, thing)}"
    yield f"data       {_many(found.rows, thing)}{bad}, {found.tokens:,} tokens{valid}"
    kinds = {"source": (spec.source_tokenizer or spec.tokenizer).kind}
    sizes = (f"{_of(side)}{kinds.get(side, spec.tokenizer.kind)}, {n:,} ids" for side, n in found.vocabularies.items())
    shares = [f"{split}{_of(side, ' ')} {x:.2%}" for split, each in found.unknown.items() for side, x in each.items()]
    unknown = f"; unknown tokens: {', '.join(shares)}" if shares else ""
    yield f"tokenizer  {'; '.join(sizes)}{unknown}"
    yield f"model      {found.shape}, {found.table.parameters:,} parameters: {_parts(found.table)}"
    width = f"{source:.0f} + {target:.0f}" if source else f"{target:.0f}"
    yield (
        f"batches    {spec.batches.kind}, on average {rows:.0f} rows of {width} tokens, {found.padding:.1%} padding, "
        f"{found.batch_tokens:,.0f} tokens"
    )
    each = spec.train.accumulate
    read = spec.train.steps * each * found.batch_tokens
    several = f" of {each} batches" if each > 1 else ""
    yield f"training   {spec.train.steps:,} steps{several} = {found.epochs:.3g} epochs = {_short(read)} tokens"
    named = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimiser": memory.optimizer,
        "average": memory.average,
        "activations": memory.activations,
        "loss": memory.loss,
    }
    listed = ", ".join(f"{name} {_bytes(size)}" for name, size in named.items() if size)
    measured = f"; the device held {_bytes(memory.measured)}" if memory.measured else ""
    yield f"memory     at least {_bytes(memory.total)}: {listed}{measured}"
    share = f", {found.peak_share:.1%} of the peak" if found.peak_share is not None else ""
    speed = each * found.batch_tokens / found.seconds
    on_top = "" if found.valid is None else "; evaluations come on top"
    yield (
        f"time       about {_duration(spec.train.steps * found.seconds)} in {found.precision} on {found.device}: "
        f"{_duration(found.seconds)} a step, {speed:,.0f} tokens/s{share}{on_top}"
    )
    for example in found.examples:
        yield ""
        for name, text in (("source", example.source), ("reads", example.reads), ("says", example.says)):
            if text is not None:
                yield f"{name:<9}  {_clipped(text)}"


def _of(side: str, before: str = "") -> str:
    return f"{before}{side}{'' if before else ' '}" if side else ""


def _parts(table: Table) -> str:
    sums: dict[str, int] = {}
    for row in table.rows:
        name = "embeddings" if row.part.endswith("embeddings") else row.part.partition(" ")[0]
        sums[name] = sums.get(name, 0) + row.parameters
    return ", ".join(f"{name} {n:,}" for name, n in sums.items() if n)


def _many(n: int, thing: str) -> str:
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


def _clipped(text: str) -> str:
    """The beginning and the end of a text, to a width in cells: Korean and Chinese letters take two each."""
    if cell_len(text) <= WIDTH:
        return text
    tail = set_cell_size(text[::-1], WIDTH // 4)[::-1].strip()
    return f"{set_cell_size(text, WIDTH - WIDTH // 4 - 3).strip()} … {tail}"


def _short(n: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f}"


def _bytes(n: float) -> str:
    size, unit = (n / 2**30, "GiB") if n >= 2**30 else (n / 2**20, "MiB")
    return f"{size:.{0 if size >= 10 else 1}f} {unit}"


def _duration(seconds: float) -> str:
    size, unit = next(
        (seconds / length, unit)
        for unit, length, least in (("h", 3600, 6000), ("min", 60, 100), ("s", 1, 1), ("ms", 1e-3, 0))
        if seconds >= least
    )
    return f"{size:.{0 if size >= 10 else 1}f} {unit}"
