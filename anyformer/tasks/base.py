"""The base of tasks, and what they share: the call of a model on a batch, the total loss, checks of lengths."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.attention.cache.segment_memory import Past
from anyformer.attention.layout import Layout, make_layout
from anyformer.attention.media_batch import MediaBatch
from anyformer.config import ConfigError, Fault, ModelConfig, Side
from anyformer.config.spec import MAX_WORD, shorten, visible
from anyformer.data.batch import Batch, Example
from anyformer.data.loader import Loader
from anyformer.data.readers import MAX_BAD_ROWS_SHOWN, Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.conventions import IGNORE, PLAIN, SEEN
from anyformer.kernels.cross_entropy import token_loss as token_loss
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.heads import LossTarget
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask, Augment, Batches

if TYPE_CHECKING:
    from anyformer.data.media import MediaStore


@dataclass(frozen=True)
class Metrics:
    """Results of an evaluation. The best checkpoint is chosen by `loss`, per token or label, or by `train.best`."""

    task: str
    count: int  # examples, or tokens for a language model
    values: dict[str, float]
    notes: dict[str, Any]  # signatures, intervals, and the bad rows


MAX_INFERENCE_TOKENS = 8192  # tokens of a batch in evaluation and prediction, padding included

INPUTS = ("source", "text", "pair")  # columns of texts that a model reads

Progress = Callable[[int], None]
"""Called with the number of texts that have been processed since the last call."""


class BuiltTask(ABC):
    """A task with its tokenizers."""

    spec: AnyTask  # completed from the training rows: names of labels, mean and deviation
    tokenizer: TextTokenizer
    source_tokenizer: TextTokenizer | None = None
    dense_loss = False  # whether the loss reads whole logits, with a row for each text or token

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss summed over all labels that are not IGNORE, in fp32."""

    @abstractmethod
    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        """Return the rows that the task and the model can read; the others become bad rows.

        With `batches`, rows must also fit into them, and the result holds their token ids for `loader`.
        """

    @abstractmethod
    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        """Return a loader of rows that `filter_rows` has returned."""

    @abstractmethod
    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure a model on rows that `filter_rows` has returned."""

    @abstractmethod
    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return a prediction for each text; options are those of `generation.generate`."""

    def read(self, text: str, config: ModelConfig, target: str | None = None) -> Example:
        """Return the example of one text to look into; of a model that writes, with a target after it."""
        raise ConfigError([Fault("task.kind", f"= '{self.spec.kind}': its texts cannot be looked into")])

    def format_label(self, label: Tensor) -> str | None:
        """Return the labels of a row as text; None: they are tokens."""
        return None

    def part(self, name: str | None) -> "BuiltTask":
        """Return one task of a mixture by its name; without one, the task itself."""
        if name is not None:
            raise ConfigError([Fault("task", f"= '{name}': the run is of one task, {self.spec.kind}")])
        return self


class Writer(ABC):
    """A task whose model generates text.

    Its methods import what generates (`tasks/generation.py`) when they are called: training imports none of it.
    """

    tokenizer: TextTokenizer
    source_tokenizer: TextTokenizer | None = None
    continues = False  # an answer continues the text, rather than being a separate text
    marked = False  # the whole prompt sees all of itself

    @abstractmethod
    def prompts(self, texts: Sequence[str], config: ModelConfig) -> list[list[int]]:
        """Return the prompt of each text in ids; an empty one for a text whose answer is empty."""

    @abstractmethod
    def default_budget(self, read: int, config: ModelConfig) -> int:
        """Return the maximum number of new tokens for a prompt of `read` tokens, where none is given."""

    @abstractmethod
    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """Return the texts, or answers to them, as training examples."""

    def read(self, text: str, config: ModelConfig, target: str | None = None) -> Example:
        return self.scored([text], [target or ""], config)[0]


def ending_ids(tokenizer: TextTokenizer, config: ModelConfig) -> list[int]:
    """Return the ids that end a generated text: those of the tokenizer and of the model."""
    ends = (tokenizer.eos, config.special.eos, *config.special.stops)
    return list(dict.fromkeys(id for id in ends if id is not None))


def before_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """Return ids up to the first that ends a text, without this one."""
    return list(itertools.takewhile(lambda id: id not in ends, ids))


def open_media(task: BuiltTask, config: ModelConfig, augment: Augment | None = None) -> "MediaStore | None":
    """Let a task read images and sounds in texts, if its model does; return the store that it reads them with."""
    from anyformer.data.augment import Augmentation
    from anyformer.data.media import MediaStore

    reader = task.source_tokenizer or task.tokenizer
    changes = None if augment is None else Augmentation(augment)
    reader.media = MediaStore.of(config, changes, getattr(task.spec, "pictures", None))
    return reader.media


def media_of(task: BuiltTask | Writer) -> "MediaStore | None":
    """Return the store that a task reads images and sounds with, if its model reads any."""
    return (task.source_tokenizer or task.tokenizer).media


def read_media(
    task: BuiltTask | Writer, ids: Tensor, marks: Tensor | None = None
) -> tuple[Tensor, MediaBatch | None, Tensor | None]:
    """Return ids [b, t] without references, their segments, and marks of groups (see `MediaStore.read`)."""
    if (store := media_of(task)) is None:
        return ids, None, marks
    ids, media, marks = store.read(ids, marks)
    return ids, media, None if marks is None else marks.to(ids.device)


def readable(rows: Rows, media: "MediaStore | None") -> Rows:
    """Return the rows whose references to images and sounds can all be read; the others become bad rows."""
    if media is None:
        return rows
    bad: dict[int, str] = {}
    for role in INPUTS:
        for i, text in enumerate(rows.columns.get(role, ())):
            if why := media.fault(text):
                bad.setdefault(i, why)
    return rows.without(dict(sorted(bad.items())))


def rows_have_media(task: BuiltTask | Writer, rows: Rows) -> bool:
    """Return whether every input of rows refers to an image, sound or vector."""
    from anyformer.data.media import references_end

    columns = [rows.columns[role] for role in INPUTS if role in rows.columns]
    texts = itertools.chain(*columns) if getattr(task, "apart", False) else map("\t".join, zip(*columns, strict=True))
    return bool(columns) and all(map(references_end, texts))


def check_media(task: BuiltTask | Writer, texts: Sequence[str]) -> None:
    """Refuse texts without an image or sound where every training row had one: their answers would mean nothing."""
    store = media_of(task)
    if store is None or not store.required:
        return
    from anyformer.data.media import references_end

    kinds = " or ".join(store.spec.kinds)
    what = f"names no {kinds}, and every training row had one: give a file, as in <{store.spec.kinds[0]}:FILE>"
    if faults := [
        Fault(f"text {i}", f"{visible(shorten(text, MAX_WORD))!r} {what}")
        for i, text in enumerate(texts, 1)
        if text.strip() and not references_end(text)
    ]:
        raise ConfigError(faults[:MAX_BAD_ROWS_SHOWN])


class TokenTask(BuiltTask):
    """Base of tasks whose loss is the cross-entropy over the vocabulary, which an output head can compute itself."""

    loss = staticmethod(token_loss)


def side_of(config: ModelConfig) -> Side:
    """Return the stack that reads the texts, in a model with one stack."""
    return "decoder" if config.decoder else "encoder"


def length_fault(length: int, config: ModelConfig, side: Side) -> str:
    """Return why a stack cannot read `length` tokens; empty if it can."""
    ends = config.stacks[side].ends
    if not ends or length <= ends[0][0]:
        return ""
    limit, positions = ends[0]
    return f"has {length} tokens, and the {side} has {limit} {positions}"


def example_fault(example: Example, config: ModelConfig, batches: Batches | None) -> str:
    """Return why a model that writes cannot read an example, or why no row of the batches holds it; empty if it can."""
    if example.source is not None and (why := length_fault(len(example.source), config, "encoder")):
        return f"the source {why}"
    if why := length_fault(len(example.ids), config, "decoder"):
        return why if example.source is None else f"the target {why}"
    return row_fault(example.length, batches)


def row_fault(length: int, batches: Batches | None) -> str:
    """Return why no row of the batches, if there are any, holds an example of `length` tokens; empty if one does."""
    if batches is None:
        return ""
    limit = batches.row_limit
    return f"has {length} tokens, and a {batches.kind} row holds {limit}" if length > limit else ""


def check_lengths(lengths: Sequence[int], config: ModelConfig, side: Side) -> None:
    """Raise a `ConfigError` that names the texts which a stack cannot read."""
    if not lengths or not length_fault(max(lengths), config, side):
        return
    faults = [Fault(f"text {i}", why) for i, n in enumerate(lengths, 1) if (why := length_fault(n, config, side))]
    if len(faults) > MAX_BAD_ROWS_SHOWN:
        faults[MAX_BAD_ROWS_SHOWN:] = [Fault("", f"... and {len(faults) - MAX_BAD_ROWS_SHOWN} more")]
    raise ConfigError(faults)


def bad_row_notes(rows: Rows) -> dict[str, Any]:
    """Return notes about the rows that an evaluation left out or cut, if any."""
    notes: dict[str, Any] = {"cut": rows.cut} if rows.cut else {}
    if rows.bad:
        notes["left_out"] = {"rows": len(rows.bad), "first": [str(bad) for bad in rows.bad[:MAX_BAD_ROWS_SHOWN]]}
    return notes


def inputs_of(batch: Batch, packed: bool) -> tuple[Inputs, ...]:
    """Return a model's arguments for a batch whose rows are padded on the right, or packed: `model(*inputs)`."""
    layout, media = _layout(batch, batch.segments, packed), None if batch.media is None else batch.media.decode()
    if batch.source is None:
        return (Inputs(batch.ids, layout, batch.types, batch.spelled, media),)
    source = Inputs(batch.source, _layout(batch, batch.source_segments, packed), media=media)
    return source, Inputs(batch.ids, layout)


def call(model: Transformer, batch: Batch, packed: bool) -> Tensor:
    """Return the logits of a batch."""
    logits: Tensor = model(*inputs_of(batch, packed))
    return logits


def past_of(model: Transformer, batch: Batch, before: Past | None) -> Past | None:
    """Return the segment memory that a batch continues from, or an empty one; None for a model without memory."""
    if model.decoder is None or not model.decoder.segment_memory:
        return None
    return before if before is not None and batch.follows_previous else model.new_past(len(batch.ids))


def _layout(batch: Batch, segments: Tensor | None, packed: bool) -> Layout | None:
    """Return a layout whose known facts make a dense mask unnecessary: padding is on the right, or rows are packed."""
    if segments is None:
        rows, length = batch.ids.shape
        return None if batch.marks is None else make_layout(rows, length, batch.ids.device, marks=batch.marks)
    if packed:
        return Layout.packed_rows(segments, documents=batch.documents)._replace(marks=batch.marks)
    return Layout.right_padded(segments)._replace(marks=batch.marks)


def with_prefix(example: Example, length: int) -> Example:
    """Return an example whose first `length` tokens are seen by all of its tokens."""
    return example._replace(marks=[SEEN] * length + [PLAIN] * (len(example.ids) - length))


@torch.no_grad()
def total_loss(model: Transformer, batches: Iterable[Batch], device: torch.device) -> tuple[float, int]:
    """Return the summed loss of a model in eval mode, and the number of tokens."""
    total, count = 0.0, 0
    past: Past | None = None
    for batch in batches:
        moved = batch.to(device)
        before, inputs = past_of(model, moved, past), inputs_of(moved, packed=False)
        if before is None:
            loss = model(*inputs, loss_target=LossTarget(moved.labels))
        else:
            loss, past = model(*inputs, past=before, loss_target=LossTarget(moved.labels))
        total += float(loss)
        count += batch.target_count
    return total, count


def loss_values(total: float, count: int) -> dict[str, float]:
    """Return the mean loss of some tokens, and its perplexity."""
    return {"loss": total / count, "perplexity": math.exp(min(total / count, 700.0))}


@torch.no_grad()
def token_values(model: Transformer, batches: Iterable[Batch]) -> tuple[dict[str, float], int]:
    """Return loss, perplexity and accuracy of the labels of batches, and how many there are."""
    device = next(model.parameters()).device
    total, correct, count = 0.0, 0, 0
    for batch in batches:
        moved = batch.to(device)
        logits = call(model, moved, packed=False)
        total += float(token_loss(logits, moved.labels))
        correct += int(((logits.argmax(dim=-1) == moved.labels) & (moved.labels != IGNORE)).sum())
        count += batch.target_count
    return {**loss_values(total, count), "accuracy": correct / count}, count


def token_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label [..., t] under logits [b, t, v], at least in fp32; 0 for IGNORE."""
    each = F.cross_entropy(at_least_fp32(logits.flatten(0, 1)), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return -each.view(labels.shape)


class PredictOnly(BuiltTask):
    """A task without training; messages call its model "an imported" and the name in `imported`."""

    imported: str

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        raise self._untrained()

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        raise self._untrained()

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        raise self._untrained()

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        raise self._untrained()

    def _untrained(self) -> ConfigError:
        what = f"an imported {self.imported} only predicts; choose a task with data"
        return ConfigError([Fault("task.kind", f"= '{self.spec.kind}': {what}")])
