"""What tasks share that say one thing of a whole row: how a text or a pair is read, and what a head makes of each."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig, Side, Tokens
from anyformer.data.batch import Piece
from anyformer.data.loader import Loader, PieceLoader, in_order
from anyformer.data.sources import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Classify, Padded, Regress
from anyformer.tasks.base import Metrics, Progress, call, left_out, refuse_long, too_long

SLOTS = 8192  # of a batch that is read without learning

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

    def __init__(self, spec: Classify | Regress, tokenizer: TextTokenizer):
        self.tokenizer, self.pairs, self.frame = tokenizer, spec.pairs, Frame(tokenizer, spec.pairs)

    # -- what differs from task to task -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def spec(self) -> Classify | Regress: ...

    @abstractmethod
    def asked(self, label: str) -> list[int] | list[float]:
        """What a model must say of a row, by its label in the data; a `ValueError` says why there is no such."""

    @abstractmethod
    def said(self, logits: Tensor) -> str:
        """In words, from [labels] of a row."""

    @abstractmethod
    def label(self, asked: Tensor) -> str:
        """In words, what is asked of a row."""

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor: ...

    @abstractmethod
    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """Scores, and what there is to note."""

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, rows: Rows, config: ModelConfig) -> list[Piece]:
        labels = map(self.asked, rows.columns["label"])
        return [self._piece(row, label, config) for row, label in zip(self._ids(rows.columns), labels, strict=True)]

    def _ids(self, columns: dict[str, list[str]]) -> Iterator[Encoded]:
        texts = self.tokenizer.encode_batch(columns["text"])
        pairs = self.tokenizer.encode_batch(columns["pair"]) if self.pairs else [None] * len(texts)
        return zip(texts, pairs, strict=True)

    def _piece(self, row: Encoded, label: Sequence[int] | Sequence[float], config: ModelConfig) -> Piece:
        text, pair = row
        read = config.last_input
        typed = pair is not None and isinstance(read, Tokens) and read.types > self.frame.second
        return Piece(self.frame.row(text, pair), label, types=self.frame.types(text, pair or []) if typed else None)

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        both = zip(self._ids(rows.columns), rows.columns["label"], strict=True)
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
        length = len(self.frame.row(*row))
        if why := too_long(length, config, _side(config)):
            return why
        room = batches.tokens if isinstance(batches, Padded) else length
        return f"has {length} tokens, and a padded row holds {room}" if length > room else ""

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, Padded)
        return PieceLoader(self.encode(rows, model.config), batches, seed, self.tokenizer.pad or 0, source_pad=0)

    # -- answers ------------------------------------------------------------------------------------------------------

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        pieces = self.encode(rows, model.config)
        found = dict(read_rows(model, pieces, self.tokenizer.pad or 0))
        logits = torch.stack([found[i] for i in range(len(pieces))])
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
        rows = list(self._ids(self._columns(texts)))
        pieces = {i: self._piece(row, [0], model.config) for i, row in enumerate(rows) if [] not in row}
        lengths = [len(pieces[i].ids) if i in pieces else 0 for i in range(len(rows))]
        refuse_long(lengths, model.config, _side(model.config))
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
    model: Transformer, pieces: Sequence[Piece], pad: int, progress: Progress | None = None
) -> Iterator[tuple[int, Tensor]]:
    """What the head makes of each row, and the row's number, as they come: in batches of similar length."""
    device = next(model.parameters()).device
    for batch in in_order(pieces, SLOTS, pad, source_pad=0):
        with torch.no_grad():
            found = call(model, batch.to(device), packed=False).float().cpu()
        yield from zip(batch.examples, found, strict=True)
        if progress:
            progress(len(batch.examples))


def refuse_options(options: Mapping[str, Any]) -> None:
    """Those of decoding."""
    if options:
        raise ConfigError(Fault(name, "is for models that write: this one reads once") for name in options)


def _side(config: ModelConfig) -> Side:
    return "decoder" if config.decoder else "encoder"


def _two(cells: list[str]) -> bool:
    return len(cells) == 2 and all(map(str.strip, cells))
