"""The task tag: a label for each word of a sentence, such as its part of speech, or spans such as names.

Words are encoded one by one; the label of a word is at its first token.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.spec import MAX_WORD, did_you_mean, shorten
from anyformer.data.batch import Batch, Example
from anyformer.data.loader import ExampleLoader, Loader, longest_first
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, ExampleBatches, Tag
from anyformer.tasks import crf
from anyformer.tasks.base import (
    MAX_INFERENCE_TOKENS,
    BuiltTask,
    Metrics,
    Progress,
    bad_row_notes,
    call,
    check_lengths,
    length_fault,
    row_fault,
    side_of,
    token_loss,
)
from anyformer.tasks.metrics import span_scores
from anyformer.tasks.sequence_level import Frame, refuse_decoding_options

Encoded = list[list[int]]  # the ids of each word
IOB = re.compile("O|[BI]-.+")
SPANS = re.compile("O|[BIES]-.+")  # also schemes that mark the ends of spans


class TagTask(BuiltTask):
    """Tagging by a softmax for each word, or by a CRF over all words of a sentence."""

    spec: Tag
    dense_loss = True  # without a CRF

    def __init__(self, spec: Tag, tokenizer: TextTokenizer):
        self.spec, self.tokenizer, self.frame = spec, tokenizer, Frame(tokenizer)
        self._numbers = {name: i for i, name in enumerate(spec.labels)}

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the summed cross-entropy of words; for the potentials of a CRF, that of label sequences."""
        if logits.dim() == 4:
            return crf.loss(logits, labels, labels != IGNORE)
        return token_loss(logits, labels, smoothing)

    def best(self, logits: Tensor, labels: Tensor) -> list[list[str]]:
        """Return the most probable labels of the words of each row; words are where labels are not IGNORE."""
        words = labels != IGNORE
        if logits.dim() == 4:
            best = crf.best(logits, words)
        else:
            best = [row[at].tolist() for row, at in zip(logits.argmax(-1), words, strict=True)]
        return [[self.spec.labels[i] for i in row] for row in best]

    def format_label(self, label: Tensor) -> str:
        """Return the labels of a row as text."""
        return " ".join(self.spec.labels[i] for i in label.tolist() if i != IGNORE)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def encode(self, rows: Rows, config: ModelConfig) -> list[Example]:
        """Return the examples of sentences."""
        sentences = _words(rows.columns["words"])
        labels = ([self._numbers[tag] for tag in tags.split("\n")] for tags in rows.columns["tags"])
        every = zip(sentences, rows.encoded("words", self._encode_cells), labels, strict=True)
        return [self._example(words, ids, numbers, config) for words, ids, numbers in every]

    def _encode_cells(self, cells: Sequence[str]) -> list[Encoded]:
        return self._ids(_words(cells))

    def _ids(self, sentences: Sequence[Sequence[str]]) -> list[Encoded]:
        """Return the ids of words. One that the tokenizer normalises to nothing, such as U+200B, is unknown."""
        unknown = [] if self.tokenizer.unk is None else [self.tokenizer.unk]
        return [[ids or unknown for ids in sentence] for sentence in self.tokenizer.encode_words(sentences)]

    def _example(self, words: Sequence[str], ids: Encoded, numbers: Sequence[int], config: ModelConfig) -> Example:
        row = self.frame.row([id for word in ids for id in word])
        before, after = ([IGNORE] * len(frame) for frame in (self.frame.before, self.frame.after))
        inside = [n for word, number in zip(ids, numbers, strict=True) for n in (number, *[IGNORE] * (len(word) - 1))]
        longest, spelled = config.last_input.spelled_bytes, None
        if longest is not None:
            spelled = np.zeros((len(row), longest), dtype=np.uint16)
            at = len(before)
            for word, word_ids in zip(words, ids, strict=True):
                spelling = spell(word, longest)
                spelled[at : at + len(word_ids), : len(spelling)] = spelling
                at += len(word_ids)
        return Example(row, [*before, *inside, *after], spelled=spelled)

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        if batches is not None:
            rows = rows.with_ids({"words": self._encode_cells})
        words, tags = _words(rows.columns["words"]), _words(rows.columns["tags"])
        every = zip(words, tags, rows.encoded("words", self._encode_cells), strict=True)
        faults = (self._row_fault(*row, config, batches) for row in every)
        return rows.without({i: why for i, why in enumerate(faults) if why})

    def _row_fault(
        self, words: list[str], tags: list[str], ids: Encoded, config: ModelConfig, batches: Batches | None
    ) -> str:
        """Return why a sentence cannot be read; empty if it can."""
        if len(words) != len(tags):
            return f"has {_plural(len(words), 'word')} and {_plural(len(tags), 'tag')}"
        if why := _word_fault(words, ids):
            return why
        for number, (word, tag) in enumerate(zip(words, tags, strict=True), 1):
            if tag not in self._numbers:
                known = did_you_mean(tag, self._numbers)
                return f"word {number}, {_short(word)}: the tag {_short(tag)} does not occur in training: {known}"
        length = len(self.frame.row([id for word in ids for id in word]))
        return length_fault(length, config, side_of(config)) or row_fault(length, batches)

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, ExampleBatches)
        return ExampleLoader(self.encode(rows, model.config), batches, seed, self.tokenizer.pad or 0, source_pad=0)

    # -- predictions --------------------------------------------------------------------------------------------------

    def read(self, text: str, config: ModelConfig, target: str | None = None) -> Example:
        """Return the example of a text, whose words are separated by tabs if it has any, else by spaces."""
        (words,) = sentences = [split(text)]
        (ids,) = self._ids(sentences)
        return self._example(words, ids, [0] * len(ids), config)

    def words(self, text: str, example: Example) -> tuple[list[int], list[str]]:
        """Return the words of a text, and the index of the first token of each."""
        return self.first_tokens(example), split(text)

    def first_tokens(self, example: Example) -> list[int]:
        """Return the index of the first token of each word."""
        return [at for at, label in enumerate(example.labels) if label != IGNORE]

    def examples(self, texts: Sequence[str], config: ModelConfig) -> dict[int, Example]:
        """Return the examples of texts that are not blank, by the number of the text."""
        sentences = [split(text) for text in texts]
        rows = self._ids(sentences)
        wrong = ((i, _word_fault(words, ids)) for i, (words, ids) in enumerate(zip(sentences, rows, strict=True), 1))
        if faults := [Fault(f"text {i}", why) for i, why in wrong if why]:
            raise ConfigError(faults)
        numbers = [i for i, words in enumerate(sentences) if words]
        found = {i: self._example(sentences[i], rows[i], [0] * len(rows[i]), config) for i in numbers}
        check_lengths([len(found[i].ids) if i in found else 0 for i in range(len(texts))], config, side_of(config))
        return found

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure the accuracy of words, and precision, recall and F1 of spans."""
        total, best = 0.0, dict[int, list[str]]()
        for batch, logits in self._read(model, self.encode(rows, model.config)):
            total += float(self.loss(logits, batch.labels))
            best |= dict(zip(batch.examples, self.best(logits, batch.labels), strict=True))
        true = [tags.split("\n") for tags in rows.columns["tags"]]
        predicted = [best[i] for i in range(len(true))]
        correct = [a == b for row in zip(predicted, true, strict=True) for a, b in zip(*row, strict=True)]
        values = {"loss": total / len(correct), "accuracy": sum(correct) / len(correct)}
        notes: dict[str, Any] = {"words": len(correct)}
        if self.spec.spans:
            spans, each = span_scores(predicted, true)
            values, notes = values | spans, notes | {"f1": each}
        return Metrics(self.spec.kind, len(rows), values, {**notes, **bad_row_notes(rows)})

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the tags of the words of each text. Words and tags are separated by tabs if the text has any, else by
        spaces. A blank text has no tags."""
        refuse_decoding_options(options)
        found = self.examples(texts, model.config)
        numbers, examples, out = list(found), list(found.values()), [""] * len(texts)
        if progress:
            progress(len(texts) - len(numbers))
        for batch, logits in self._read(model, examples):
            for n, tags in zip(batch.examples, self.best(logits, batch.labels), strict=True):
                out[numbers[n]] = ("\t" if "\t" in texts[numbers[n]] else " ").join(tags)
            if progress:
                progress(len(batch.examples))
        return out

    @torch.no_grad()
    def _read(self, model: Transformer, examples: Sequence[Example]) -> Iterator[tuple[Batch, Tensor]]:
        """Yield each batch of sentences of similar length, and the output of the head."""
        device = next(model.parameters()).device
        for batch in longest_first(examples, MAX_INFERENCE_TOKENS, self.tokenizer.pad or 0, source_pad=0):
            moved = batch.to(device)
            yield moved, call(model, moved, packed=False).float()


def split(text: str) -> list[str]:
    """Return the words of a text."""
    if not text.strip():
        return []
    return text.split("\t") if "\t" in text else [word for word in text.split(" ") if word]


def spell(word: str, longest: int) -> list[int]:
    """Return the bytes of a word, each + 1; of a longer word, its first and last bytes, half each."""
    raw = word.encode()
    if len(raw) > longest:
        last = longest // 2
        raw = raw[: longest - last] + raw[len(raw) - last :]
    return [byte + 1 for byte in raw]


def tags_of(spec: Tag, cells: Sequence[str]) -> dict[str, Any]:
    """Return the names of labels, those given or those of the training rows, and whether they mark spans."""
    labels = spec.labels or tuple(sorted({tag for cell in cells for tag in cell.split("\n") if tag}))
    if len(labels) < 2:
        tags = f"all have the tag {_short(labels[0])}" if labels else "none has a tag"
        raise ConfigError([Fault("data.train", f"has fewer than two tags: of the words of all rows, {tags}")])
    odd = next((label for label in labels if not SPANS.fullmatch(label)), None)
    if spec.spans and odd is not None:
        raise ConfigError(
            [Fault("task.spans", f"= true: {_short(odd)} is not a label of spans, such as O, B-x or I-x")]
        )
    spans = all(map(IOB.fullmatch, labels)) if spec.spans is None else spec.spans
    return {"labels": labels, "spans": spans}


def _word_fault(words: Sequence[str], ids: Encoded) -> str:
    """Return why a word cannot be read; empty if all can."""
    for number, (word, word_ids) in enumerate(zip(words, ids, strict=True), 1):
        if not word:
            return f"word {number} is empty"
        if not word_ids:
            return f"word {number}, {_short(word)}: has no tokens, and the tokenizer has no <unk>"
    return ""


def _words(cells: Sequence[str]) -> list[list[str]]:
    return [cell.split("\n") for cell in cells]


def _short(text: str) -> str:
    return repr(shorten(text, MAX_WORD))


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
