"""What tasks share that say one thing of a whole row: how a text or a pair is read, and what a head makes of each.

The texts of a pair are read in one row, or apart: in a row each, one below the other.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig, Tokens
from anyformer.data.batch import Example
from anyformer.data.loader import ExampleLoader, Loader, in_order
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Classify, Embed, Padded, Regress
from anyformer.tasks.base import SLOTS, Metrics, Progress, call, left_out, refuse_long, side_of, too_long

Encoded = tuple[list[int], list[int] | None]  # a text, and its pair


class Frame:
    """`<bos> a <eos>`, or `<bos> a <sep> b <eos>`; where the tokenizer's file puts something around texts, that."""

    def __init__(self, tokenizer: TextTokenizer, pairs: bool = False):
        bos, sep, eos = ([] if id is None else [id] for id in (tokenizer.bos, tokenizer.sep, tokenizer.eos))
        self.before, self.after = tokenizer.around
        self.between, self.second = list[int](), 1  # the type of b, where the model has types
        if pairs and any(tokenizer.around_pair[:3]):
            self.before, self.between, self.after, self.second = tokenizer.around_pair
        elif not self.before and not self.after:
            self.before, self.after = bos, eos
        self.between = self.between or sep or eos
        if pairs and not self.between:
            raise ConfigError([Fault("tokenizer", "has no <sep>, which stands between the texts of a pair")])

    def row(self, text: list[int], pair: list[int] | None = None) -> list[int]:
        if pair is None:
            return [*self.before, *text, *self.after]
        return [*self.before, *text, *self.between, *pair, *self.after]

    def types(self, text: list[int], pair: list[int]) -> list[int]:
        """0 up to what stands between the texts, and another one behind it."""
        first = len(self.before) + len(text) + len(self.between)
        return [0] * first + [self.second] * (len(pair) + len(self.after))


class RowTask(ABC):
    """A task that says something of each text, or of each pair of texts."""

    source_tokenizer: TextTokenizer | None = None

    def __init__(self, tokenizer: TextTokenizer, pairs: bool, apart: bool = False):
        self.tokenizer, self.pairs, self.apart = tokenizer, pairs, apart
        self.frame = Frame(tokenizer, pairs and not apart)

    # -- what differs from task to task -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def spec(self) -> Classify | Regress | Embed: ...

    @abstractmethod
    def asked(self, label: str) -> list[int] | list[float]:
        """What a model must say of a row, by its label in the data; a `ValueError` says why there is no such."""

    @abstractmethod
    def said(self, logits: Tensor) -> str:
        """In words, from [labels] of a row; of a pair that is read apart, from [2, d]."""

    @abstractmethod
    def label(self, asked: Tensor) -> str:
        """In words, what is asked of a row."""

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor: ...

    @abstractmethod
    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """Scores, and what there is to note, of [n, labels]; of pairs that are read apart, of [2n, d]."""

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, rows: Rows, config: ModelConfig) -> list[Example]:
        read = list(self._ids(rows))
        labels = self._labels(rows, read)
        return [self._piece(row, label, config) for row, label in zip(read, labels, strict=True)]

    def _labels(self, rows: Rows, read: Sequence[Encoded]) -> Iterable[Sequence[int] | Sequence[float]]:
        """What is asked of each row."""
        return map(self.asked, rows.columns["label"])

    def _ids(self, rows: Rows, keep: bool = False) -> Iterator[Encoded]:
        encode = self.tokenizer.encode_batch
        texts = rows.encoded("text", encode, keep)
        pairs = rows.encoded("pair", encode, keep) if "pair" in rows.columns else [None] * len(texts)
        return zip(texts, pairs, strict=True)

    def _piece(self, row: Encoded, label: Sequence[int] | Sequence[float], config: ModelConfig) -> Example:
        text, pair = row
        if self.apart and pair is not None:
            return Example(self.frame.row(text), label, pair=self.frame.row(pair))
        read = config.last_input
        typed = pair is not None and isinstance(read, Tokens) and read.types > self.frame.second
        return Example(self.frame.row(text, pair), label, types=self.frame.types(text, pair or []) if typed else None)

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        labels = rows.columns.get("label", [""] * len(rows))
        both = zip(self._ids(rows, keep=batches is not None), labels, strict=True)
        whys = (self._misfit(row, label, config, batches) for row, label in both)
        return rows.without({i: why for i, why in enumerate(whys) if why})

    def _misfit(self, row: Encoded, label: str, config: ModelConfig, batches: Batches | None) -> str:
        """Why a row cannot be read; empty if it can."""
        try:
            self.asked(label)
        except ValueError as error:
            return str(error)
        for name, ids in zip(("text", "pair"), row, strict=True):
            if ids is not None and not ids:
                return f"the {name} has no tokens"
        together = [row] if not self.apart else [(ids, None) for ids in row if ids is not None]
        length = max(len(self.frame.row(*ids)) for ids in together)
        if why := too_long(length, config, side_of(config)):
            return why
        room = batches.tokens // len(together) if isinstance(batches, Padded) else length
        return f"has {length} tokens, and a padded row holds {room}" if length > room else ""

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, Padded)
        return ExampleLoader(self.encode(rows, model.config), batches, seed, self.tokenizer.pad or 0, source_pad=0)

    # -- answers ------------------------------------------------------------------------------------------------------

    def read(self, text: str, config: ModelConfig) -> Example:
        """What is read of a text, or of a pair with a tab between them; where pairs are read apart, of one text."""
        columns = {"text": [text]} if self.apart else self._columns([text])
        return self._piece(next(self._ids(_given(columns))), [0], config)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        pieces = self.encode(rows, model.config)
        found = dict(read_rows(model, pieces, self.tokenizer.pad or 0))
        logits = torch.stack([found[i] for i in range(len(pieces))])
        logits = logits.flatten(0, 1) if self.apart else logits
        labels = torch.tensor([piece.labels for piece in pieces])
        values, notes = self.measure(logits, labels)
        loss = float(self.loss(logits, labels)) / labels.numel()
        return Metrics(self.spec.kind, len(rows), {"loss": loss, **values}, {**notes, **left_out(rows)})

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """The label or number of each text; of a pair, whose texts have a tab between them. A blank has no answer: in
        training it is a bad row, so no model has seen one."""
        refuse_options(options)
        rows = list(self._ids(_given(self._columns(texts))))
        pieces = {i: self._piece(row, [0], model.config) for i, row in enumerate(rows) if [] not in row}
        lengths = [pieces[i].length if i in pieces else 0 for i in range(len(rows))]
        refuse_long(lengths, model.config, side_of(model.config))
        out, numbers = [""] * len(texts), list(pieces)
        if progress:
            progress(len(texts) - len(pieces))
        for i, logits in read_rows(model, list(pieces.values()), self.tokenizer.pad or 0, progress):
            out[numbers[i]] = self.said(logits)
        return out

    def _columns(self, texts: Sequence[str]) -> dict[str, list[str]]:
        texts = [text if text.strip() else "" for text in texts]
        if not self.pairs:
            return {"text": texts}
        cells = [text.split("\t") if text else ["", ""] for text in texts]
        wrong = (i for i, (text, found) in enumerate(zip(texts, cells, strict=True), 1) if text and not _two(found))
        if faults := [Fault(f"text {i}", "must be two texts with a tab between them") for i in wrong]:
            raise ConfigError(faults)
        return {"text": [a for a, _ in cells], "pair": [b for _, b in cells]}


def read_rows(
    model: Transformer, pieces: Sequence[Example], pad: int, progress: Progress | None = None
) -> Iterator[tuple[int, Tensor]]:
    """What the head makes of each row, and the row's number, as they come: in batches of similar length.

    Of texts that are read apart, what it makes of both.
    """
    device = next(model.parameters()).device
    for batch in in_order(pieces, SLOTS, pad, source_pad=0):
        with torch.no_grad():
            found = call(model, batch.to(device), packed=False).float().cpu()
        if len(found) > len(batch.examples):
            found = found.unflatten(0, (len(batch.examples), -1))
        yield from zip(batch.examples, found, strict=True)
        if progress:
            progress(len(batch.examples))


def as_json(vector: Tensor) -> str:
    return json.dumps(vector.tolist())


def refuse_options(options: Mapping[str, Any]) -> None:
    """Those of decoding."""
    if options:
        raise ConfigError(Fault(name, "is for models that write: this one reads once") for name in options)


def _given(columns: dict[str, list[str]]) -> Rows:
    """Texts that stand in no file."""
    return Rows(columns, "texts", range(1, len(columns["text"]) + 1))


def _two(cells: list[str]) -> bool:
    return len(cells) == 2 and all(map(str.strip, cells))
