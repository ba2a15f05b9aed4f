"""Tagging: a label for each word of a sentence, such as its part of speech, or where names begin and go on.

Words are encoded one by one, and a word's label is asked at its first token.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyformer.config import ByteSpelling, ConfigError, Fault, ModelConfig, Tokens
from anyformer.config.spec import MAX_WORD, did_you_mean, shorten
from anyformer.conventions import IGNORE
from anyformer.data.batch import Batch, Example
from anyformer.data.loader import ExampleLoader, Loader, in_order
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Packed, Padded, Tag
from anyformer.tasks import crf
from anyformer.tasks.base import SLOTS, Metrics, Progress, call, left_out, refuse_long, side_of, token_loss, too_long
from anyformer.tasks.metrics import span_scores
from anyformer.tasks.sequence_level import Frame, refuse_options

Encoded = list[list[int]]  # the ids of each word
IOB = re.compile("O|[BI]-.+")
SPANS = re.compile("O|[BIES]-.+")  # those that tell where spans end, too


class Tagging:
    """By a softmax for each word, or by a CRF for all words of a sentence."""

    source_tokenizer: TextTokenizer | None = None

    def __init__(self, spec: Tag, tokenizer: TextTokenizer):
        self._spec, self.tokenizer, self.frame = spec, tokenizer, Frame(tokenizer)
        self._numbers = {name: i for i, name in enumerate(spec.labels)}

    @property
    def spec(self) -> Tag:
        return self._spec

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy of each word; of the potentials of a CRF, of the whole rows of labels."""
        return (
            crf.loss(logits, labels, labels != IGNORE) if logits.dim() == 4 else token_loss(logits, labels, smoothing)
        )

    def best(self, logits: Tensor, labels: Tensor) -> list[list[str]]:
        """What is said of the words of each row, which are where labels ask for something."""
        words = labels != IGNORE
        if logits.dim() == 4:
            found = crf.best(logits, words)
        else:
            found = [row[at].tolist() for row, at in zip(logits.argmax(-1), words, strict=True)]
        return [[self.spec.labels[i] for i in row] for row in found]

    def label(self, asked: Tensor) -> str:
        """In words, what is asked of a row."""
        return " ".join(self.spec.labels[i] for i in asked.tolist() if i != IGNORE)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, rows: Rows, config: ModelConfig) -> list[Example]:
        sentences = _words(rows.columns["words"])
        asked = ([self._numbers[tag] for tag in tags.split("\n")] for tags in rows.columns["tags"])
        every = zip(sentences, rows.encoded("words", self._cells), asked, strict=True)
        return [self._piece(words, ids, numbers, config) for words, ids, numbers in every]

    def _cells(self, cells: Sequence[str]) -> list[Encoded]:
        return self._ids(_words(cells))

    def _ids(self, sentences: Sequence[Sequence[str]]) -> list[Encoded]:
        """A word of which nothing is left, such as one of a space without width, is unknown."""
        nothing = [] if self.tokenizer.unk is None else [self.tokenizer.unk]
        return [[ids or nothing for ids in sentence] for sentence in self.tokenizer.encode_words(sentences)]

    def _piece(self, words: Sequence[str], ids: Encoded, numbers: Sequence[int], config: ModelConfig) -> Example:
        row = self.frame.row([id for word in ids for id in word])
        before, after = ([IGNORE] * len(part) for part in (self.frame.before, self.frame.after))
        within = [n for word, number in zip(ids, numbers, strict=True) for n in (number, *[IGNORE] * (len(word) - 1))]
        read, spelled = config.last_input, None
        if isinstance(read, Tokens) and isinstance(read.spelling, ByteSpelling):
            spelled = np.zeros((len(row), read.spelling.longest), dtype=np.uint16)
            at = len(before)
            for word, pieces in zip(words, ids, strict=True):
                found = spell(word, read.spelling.longest)
                spelled[at : at + len(pieces), : len(found)] = found
                at += len(pieces)
        return Example(row, [*before, *within, *after], spelled=spelled)

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        words, tags = _words(rows.columns["words"]), _words(rows.columns["tags"])
        every = zip(words, tags, rows.encoded("words", self._cells, keep=batches is not None), strict=True)
        whys = (self._misfit(*row, config, batches) for row in every)
        return rows.without({i: why for i, why in enumerate(whys) if why})

    def _misfit(
        self, words: list[str], tags: list[str], ids: Encoded, config: ModelConfig, batches: Batches | None
    ) -> str:
        """Why a sentence cannot be read; empty if it can."""
        if len(words) != len(tags):
            return f"has {_many(len(words), 'word')} and {_many(len(tags), 'tag')}"
        if why := _wrong(words, ids):
            return why
        for number, (word, tag) in enumerate(zip(words, tags, strict=True), 1):
            if tag not in self._numbers:
                known = did_you_mean(tag, self._numbers)
                return f"word {number}, {_short(word)}: the tag {_short(tag)} is not known from training: {known}"
        length = len(self.frame.row([id for word in ids for id in word]))
        if why := too_long(length, config, side_of(config)):
            return why
        match batches:
            case Padded(kind=kind, tokens=room) | Packed(kind=kind, length=room) if length > room:
                return f"has {length} tokens, and a {kind} row holds {room}"
            case _:
                return ""

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, Padded | Packed)
        return ExampleLoader(self.encode(rows, model.config), batches, seed, self.tokenizer.pad or 0, source_pad=0)

    # -- answers ------------------------------------------------------------------------------------------------------

    def read(self, text: str, config: ModelConfig) -> Example:
        """What is read of a text, whose words are apart by tabs if it has one, else by spaces."""
        (words,) = sentences = [split(text)]
        (ids,) = self._ids(sentences)
        return self._piece(words, ids, [0] * len(ids), config)

    def first_tokens(self, piece: Example) -> list[int]:
        """Return where the words of a piece begin."""
        return [at for at, label in enumerate(piece.labels) if label != IGNORE]

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """The share of words that are right, and how well spans are found."""
        total, found = 0.0, dict[int, list[str]]()
        for batch, logits in self._read(model, self.encode(rows, model.config)):
            total += float(self.loss(logits, batch.labels))
            found |= dict(zip(batch.examples, self.best(logits, batch.labels), strict=True))
        asked = [tags.split("\n") for tags in rows.columns["tags"]]
        said = [found[i] for i in range(len(asked))]
        right = [a == b for row in zip(said, asked, strict=True) for a, b in zip(*row, strict=True)]
        values = {"loss": total / len(right), "accuracy": sum(right) / len(right)}
        notes: dict[str, Any] = {"words": len(right)}
        if self.spec.spans:
            spans, each = span_scores(said, asked)
            values, notes = values | spans, notes | {"f1": each}
        return Metrics(self.spec.kind, len(rows), values, {**notes, **left_out(rows)})

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """The tags of the words of each text, which are apart by tabs if it has one, else by spaces; as the tags are.
        A blank has none."""
        refuse_options(options)
        sentences = [split(text) for text in texts]
        rows = self._ids(sentences)
        wrong = ((i, _wrong(words, ids)) for i, (words, ids) in enumerate(zip(sentences, rows, strict=True), 1))
        if faults := [Fault(f"text {i}", why) for i, why in wrong if why]:
            raise ConfigError(faults)
        there = [i for i, words in enumerate(sentences) if words]
        pieces = [self._piece(sentences[i], rows[i], [0] * len(rows[i]), model.config) for i in there]
        lengths = dict(zip(there, (len(piece.ids) for piece in pieces), strict=True))
        refuse_long([lengths.get(i, 0) for i in range(len(texts))], model.config, side_of(model.config))
        out = [""] * len(texts)
        if progress:
            progress(len(texts) - len(there))
        for batch, logits in self._read(model, pieces):
            for n, tags in zip(batch.examples, self.best(logits, batch.labels), strict=True):
                out[there[n]] = ("\t" if "\t" in texts[there[n]] else " ").join(tags)
            if progress:
                progress(len(batch.examples))
        return out

    @torch.no_grad()
    def _read(self, model: Transformer, pieces: Sequence[Example]) -> Iterator[tuple[Batch, Tensor]]:
        """Each batch of sentences of similar length, and what the head makes of it."""
        device = next(model.parameters()).device
        for batch in in_order(pieces, SLOTS, self.tokenizer.pad or 0, source_pad=0):
            here = batch.to(device)
            yield here, call(model, here, packed=False).float()


def split(text: str) -> list[str]:
    """The words of a text."""
    if not text.strip():
        return []
    return text.split("\t") if "\t" in text else [word for word in text.split(" ") if word]


def spell(word: str, longest: int) -> list[int]:
    """The bytes of a word + 1: all, or as many from its beginning as from its end."""
    raw = word.encode()
    if len(raw) > longest:
        last = longest // 2
        raw = raw[: longest - last] + raw[len(raw) - last :]
    return [byte + 1 for byte in raw]


def tagged(spec: Tag, cells: Sequence[str]) -> Tag:
    """The task with the names of its labels: those that it was given, or those of the training rows, sorted; and
    whether they are of spans."""
    labels = spec.labels or tuple(sorted({tag for cell in cells for tag in cell.split("\n") if tag}))
    if len(labels) < 2:
        there = f"all have the tag {_short(labels[0])}" if labels else "none has a tag"
        raise ConfigError([Fault("data.train", f"there is nothing to tell apart: of the words of all rows {there}")])
    odd = next((label for label in labels if not SPANS.fullmatch(label)), None)
    if spec.spans and odd is not None:
        raise ConfigError([Fault("task.spans", f"= true: {_short(odd)} is no label of spans, which are O, B-x, I-x")])
    spans = all(map(IOB.fullmatch, labels)) if spec.spans is None else spec.spans
    return spec.model_copy(update={"labels": labels, "spans": spans})


def _wrong(words: Sequence[str], ids: Encoded) -> str:
    """Why a word cannot be read; empty if all can."""
    for number, (word, pieces) in enumerate(zip(words, ids, strict=True), 1):
        if not word.strip():
            return f"word {number} is empty"
        if not pieces:
            return f"word {number}, {_short(word)}: has no tokens, and the tokenizer has none for unknown ones"
    return ""


def _words(cells: Sequence[str]) -> list[list[str]]:
    return [cell.split("\n") for cell in cells]


def _short(text: str) -> str:
    return repr(shorten(text, MAX_WORD))


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
