"""Base of sequence-level tasks (classify, regress, embed): one prediction for each text or pair of texts.

The two texts of a pair are read in one row, or with `apart` in two consecutive rows.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import Example
from anyformer.data.loader import ExampleLoader, Loader, longest_first
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, ExampleBatches, Task
from anyformer.tasks.base import (
    MAX_INFERENCE_TOKENS,
    BuiltTask,
    Metrics,
    Progress,
    bad_row_notes,
    call,
    check_lengths,
    length_fault,
    side_of,
)

Encoded = tuple[list[int], list[int] | None]  # a text, and its pair


class Frame:
    """Special tokens around texts: as the tokenizer's file has them, or `<bos> a <eos>` and `<bos> a <sep> b <eos>`."""

    def __init__(self, tokenizer: TextTokenizer, pairs: bool = False):
        bos, sep, eos = ([] if id is None else [id] for id in (tokenizer.bos, tokenizer.sep, tokenizer.eos))
        self.before, self.after = tokenizer.around
        self.between, self.second = list[int](), 1  # token type of b, in models with types
        if pairs and any(tokenizer.around_pair[:3]):
            self.before, self.between, self.after, self.second = tokenizer.around_pair
        elif not self.before and not self.after:
            self.before, self.after = bos, eos
        self.between = self.between or sep or eos
        if pairs and not self.between:
            raise ConfigError([Fault("tokenizer", "has no <sep> to separate the texts of a pair")])

    def row(self, text: list[int], pair: list[int] | None = None) -> list[int]:
        """Return the ids of a text or of a pair, with special tokens."""
        if pair is None:
            return [*self.before, *text, *self.after]
        return [*self.before, *text, *self.between, *pair, *self.after]

    def types(self, text: list[int], pair: list[int]) -> list[int]:
        """Return token types: 0 for the first text and its separator, `second` for the rest."""
        first = len(self.before) + len(text) + len(self.between)
        return [0] * first + [self.second] * (len(pair) + len(self.after))


class SequenceLevelTask(BuiltTask):
    """A task with one prediction for each text, or for each pair of texts."""

    def __init__(self, spec: Task, tokenizer: TextTokenizer):
        self.spec, self.tokenizer, self.pairs = spec, tokenizer, "pair" in spec.columns
        self.apart, self.max_length = getattr(spec, "apart", False), getattr(spec, "max_length", None)
        self.frame = Frame(tokenizer, self.pairs and not self.apart)

    # -- what differs from task to task -------------------------------------------------------------------------------

    @abstractmethod
    def parse_label(self, label: str) -> list[int] | list[float]:
        """Return the label of a row as numbers, from its text in the data. Raise a `ValueError` if it is not valid."""

    @abstractmethod
    def format_prediction(self, logits: Tensor) -> str:
        """Return the prediction of a row as text, from its logits [labels].

        With `apart`, the two texts of a pair are encoded separately, and the argument is their vectors [2, d].
        """

    @abstractmethod
    def format_label(self, label: Tensor) -> str:
        """Return the label of a row as text."""

    @abstractmethod
    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """Return metrics and notes, from [n, labels]; with `apart`, from the vectors [2n, d]."""

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, rows: Rows, config: ModelConfig) -> list[Example]:
        """Return the examples of rows."""
        ids = list(self._ids(rows))
        labels = self._labels(rows, ids)
        return [self._example(row, label, config) for row, label in zip(ids, labels, strict=True)]

    def _labels(self, rows: Rows, ids: Sequence[Encoded]) -> Iterable[Sequence[int] | Sequence[float]]:
        """Return the labels of rows."""
        return map(self.parse_label, rows.columns["label"])

    def _ids(self, rows: Rows) -> Iterator[Encoded]:
        return map(self._cut, self._all_ids(rows))

    def _all_ids(self, rows: Rows) -> Iterator[Encoded]:
        encode = self.tokenizer.encode_batch
        texts = rows.encoded("text", encode)
        pairs = rows.encoded("pair", encode) if "pair" in rows.columns else [None] * len(texts)
        return zip(texts, pairs, strict=True)

    def _cut(self, row: Encoded) -> Encoded:
        """Return a row cut to `max_length` tokens; of a pair, the longer text is cut first."""
        text, pair = row
        if self.max_length is None or len(self.frame.row(text, pair)) <= self.max_length:
            return row
        left = max(2, self.max_length - len(self.frame.row([], None if pair is None else [])))
        if pair is None:
            return text[:left], None
        first = min(len(text), max(left // 2, left - len(pair)))
        return text[:first], pair[: left - first]

    def _example(self, row: Encoded, label: Sequence[int] | Sequence[float], config: ModelConfig) -> Example:
        text, pair = row
        if self.apart and pair is not None:
            return Example(self.frame.row(text), label, pair=self.frame.row(pair))
        inputs = config.last_input
        has_types = pair is not None and inputs.token_types > self.frame.second
        types = self.frame.types(text, pair or []) if has_types else None
        return Example(self.frame.row(text, pair), label, types=types)

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        if batches is not None:
            rows = rows.with_ids({r: self.tokenizer.encode_batch for r in ("text", "pair") if r in rows.columns})
        labels, whole = rows.columns.get("label", [""] * len(rows)), list(self._all_ids(rows))
        read = list(map(self._cut, whole))
        faults = (self._row_fault(row, label, config, batches) for row, label in zip(read, labels, strict=True))
        good = rows.without({i: why for i, why in enumerate(faults) if why})
        return replace(good, cut=sum(row != all_of_it for row, all_of_it in zip(read, whole, strict=True)))

    def _row_fault(self, row: Encoded, label: str, config: ModelConfig, batches: Batches | None) -> str:
        """Return why a row cannot be read; empty if it can."""
        try:
            self.parse_label(label)
        except ValueError as error:
            return str(error)
        for name, ids in zip(("text", "pair"), row, strict=True):
            if ids is not None and not ids:
                return f"the {name} has no tokens"
        rows = [row] if not self.apart else [(ids, None) for ids in row if ids is not None]
        length = max(len(self.frame.row(*ids)) for ids in rows)
        if why := length_fault(length, config, side_of(config)):
            return why
        limit = batches.row_limit // len(rows) if batches else length
        return f"has {length} tokens, and a padded row holds {limit}" if length > limit else ""

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, ExampleBatches)
        examples, pad = self.encode(rows, model.config), self.tokenizer.pad or 0
        return ExampleLoader(examples, batches, seed, pad, source_pad=0, media=self.tokenizer.media, row_labels=True)

    # -- predictions --------------------------------------------------------------------------------------------------

    def read(self, text: str, config: ModelConfig, target: str | None = None) -> Example:
        """Return the example of a text, or of a pair separated by a tab; with `apart`, of a single text."""
        columns = {"text": [text]} if self.apart else self._columns([text])
        return self._example(next(self._ids(_as_rows(columns))), [0], config)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        examples = self.encode(rows, model.config)
        outputs = dict(read_rows(model, examples, self.tokenizer))
        logits = torch.stack([outputs[i] for i in range(len(examples))])
        logits = logits.flatten(0, 1) if self.apart else logits
        labels = torch.tensor([example.labels for example in examples])
        values, notes = self.measure(logits, labels)
        loss = float(self.loss(logits, labels)) / labels.numel()
        return Metrics(self.spec.kind, len(rows), {"loss": loss, **values}, {**notes, **bad_row_notes(rows)})

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the label or number of each text, or of each pair separated by a tab.

        A blank text has an empty prediction: in training it is a bad row, so no model has seen one.
        """
        refuse_decoding_options(options)
        out = [""] * len(texts)
        for i, logits in self._outputs(model, texts, progress):
            out[i] = self.format_prediction(logits)
        return out

    def _outputs(
        self, model: Transformer, texts: Sequence[str], progress: Progress | None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each text that is not blank, and the output of the head."""
        examples = self.examples(texts, model.config)
        numbers = list(examples)
        if progress:
            progress(len(texts) - len(examples))
        for i, logits in read_rows(model, list(examples.values()), self.tokenizer, progress):
            yield numbers[i], logits

    def examples(self, texts: Sequence[str], config: ModelConfig) -> dict[int, Example]:
        """Return the examples of texts that are not blank, by the number of the text."""
        rows = list(self._ids(_as_rows(self._columns(texts))))
        examples = {i: self._example(row, [0], config) for i, row in enumerate(rows) if [] not in row}
        check_lengths([examples[i].length if i in examples else 0 for i in range(len(rows))], config, side_of(config))
        return examples

    def _columns(self, texts: Sequence[str]) -> dict[str, list[str]]:
        texts = [text if text.strip() else "" for text in texts]
        if not self.pairs:
            return {"text": texts}
        cells = [text.split("\t") if text else ["", ""] for text in texts]
        wrong = (
            i for i, cell in enumerate(cells, 1) if any(cell) and (len(cell) != 2 or not all(map(str.strip, cell)))
        )
        if faults := [Fault(f"text {i}", "must be two texts separated by a tab") for i in wrong]:
            raise ConfigError(faults)
        return {"text": [a for a, _ in cells], "pair": [b for _, b in cells]}


def for_shape(example: Example, config: ModelConfig) -> Example:
    """Return the example as a model reads it.

    An encoder–decoder reads a text twice: the encoder the whole text, the decoder one token later (BART). It begins
    with the start token, or with the last token of the text if there is none (mBART).
    """
    if config.shape != "encoder-decoder":
        return example
    row = list(example.ids)
    start = row[-1] if config.special.start is None else config.special.start
    return example._replace(ids=[start, *row[:-1]], source=row)


def read_rows(
    model: Transformer, examples: Sequence[Example], tokenizer: TextTokenizer, progress: Progress | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each row and the output of the head, batch by batch, rows of similar length together.

    For texts that are read apart, the output has both: [2, d].
    """
    device = next(model.parameters()).device
    for batch in longest_first(examples, MAX_INFERENCE_TOKENS, tokenizer.pad or 0, 0, tokenizer.media):
        with torch.no_grad():
            output = call(model, batch.to(device), packed=False).float().cpu()
        if len(output) > len(batch.examples):
            output = output.unflatten(0, (len(batch.examples), -1))
        yield from zip(batch.examples, output, strict=True)
        if progress:
            progress(len(batch.examples))


def as_json(vector: Tensor) -> str:
    """Return a vector as a JSON list."""
    return json.dumps(vector.tolist())


def refuse_decoding_options(options: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if there are options of decoding."""
    if options:
        raise ConfigError(Fault(name, "is for models that generate text, and this one does not") for name in options)


def _as_rows(columns: dict[str, list[str]]) -> Rows:
    """Return rows of texts that are not from a file."""
    return Rows(columns, "texts", range(1, len(columns["text"]) + 1))


# -- texts that contain special tokens by name, such as masks and sentinels, which a model fills -----------------------


def split_at(tokenizer: TextTokenizer, text: str, special: Iterable[int]) -> list[str]:
    """Split a text at the names of special ids: text, name, text, name, ..., text."""
    return re.split("(" + "|".join(re.escape(tokenizer.token(id)) for id in special) + ")", text)


def encode_with(tokenizer: TextTokenizer, text: str, special: Iterable[int]) -> list[int]:
    """Encode a text in which the names of special ids are replaced by these.

    If the tokenizer's words include the space before them, a special id replaces that space, too. If it adds a space
    before a text, the space after a special id is dropped first.
    """
    names = {tokenizer.token(id): id for id in special}
    parts = split_at(tokenizer, text, names.values())
    out: list[int] = []
    for i, part in enumerate(parts):
        if i % 2:
            out.append(names[part])
            continue
        if tokenizer.spaced and i + 1 < len(parts):
            part = part.removesuffix(" ")
        if tokenizer.lead and i:
            part = part.removeprefix(" ")
        out += tokenizer.encode_batch([part])[0]  # which reads references, too
    return out


def filled(row: Sequence[int], mask: int, logits: Tensor) -> list[int]:
    """Return a row with the top-1 id at each mask; logits [n, v] may include padding after the row."""
    best = logits.argmax(dim=-1).tolist()
    return [best[i] if id == mask else id for i, id in enumerate(row)]
