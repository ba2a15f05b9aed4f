"""The task span: the answer to a question as a span of a text (Rajpurkar et al. 2016, Devlin et al. 2019).

A row is a question and a window of its text. Long texts are read in windows that overlap; the best span of all windows
is the answer. In a window without the answer, and for questions without one, the first token of the row stands for it.
"""

import json
import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import Example
from anyformer.data.loader import ExampleLoader, Loader
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, ExampleBatches, QuestionAnswering
from anyformer.tasks.base import BuiltTask, Metrics, Progress, bad_row_notes
from anyformer.tasks.sequence_level import Frame, for_shape, read_rows, refuse_decoding_options

CANDIDATES = 20  # first tokens and last tokens of a window that are combined to spans


# -- from the logits of windows to answers: the best spans of a text, restricted to it and to a length ----------------


class TextToken(NamedTuple):
    """A token of a text, and the characters that it is."""

    id: int
    start: int
    end: int


class QuestionWindow(NamedTuple):
    """A part of a text that is read in one row with the question."""

    first: int  # its first token in the text
    size: int  # tokens of the text
    offset: int  # its first token in the row


class SpanAnswer(NamedTuple):
    """A span of a text. The empty answer is of no characters."""

    text: str
    start: int  # character of the text
    end: int
    score: float  # sum of two logits
    probability: float = 0.0  # among the listed answers


def windows(length: int, before: int, after: int, limit: int, overlap: int) -> list[QuestionWindow]:
    """Return the windows over a text of `length` tokens, with `before` and `after` other tokens in each row.

    Rows have at most `limit` tokens. Two consecutive windows share `overlap` tokens, at most half of a window.
    """
    size = limit - before - after
    assert size > 0, "checked for each row"
    step = size - min(overlap, size // 2)
    starts = range(0, max(1, length - size + step), step)
    return [QuestionWindow(first, min(size, length - first), before) for first in starts]


def best_answers(
    text: str,
    tokens: Sequence[TextToken],
    parts: Sequence[tuple[QuestionWindow, Tensor]],
    longest: int,
    count: int,
) -> list[SpanAnswer]:
    """Return up to `count` answers in descending order, from the logits [t, 2] of all windows of a text.

    A span begins at one of the most probable first tokens, ends at one of the most probable last tokens, has at most
    `longest` tokens, and is found once, with its best score.
    """
    found: dict[tuple[int, int], float] = {}
    for window, logits in parts:
        inside = logits[window.offset : window.offset + window.size]
        top = inside.topk(min(CANDIDATES, window.size), dim=0).indices
        values, firsts, lasts = inside.tolist(), top[:, 0].tolist(), top[:, 1].tolist()
        for first in firsts:
            for last in lasts:
                if first <= last < first + longest:
                    score, span = values[first][0] + values[last][1], (window.first + first, window.first + last)
                    found[span] = max(score, found.get(span, -math.inf))
        if not any(first <= last < first + longest for first in firsts for last in lasts):
            first = firsts[0]  # no pair fits: the most probable first token alone
            span = (window.first + first, window.first + first)
            found[span] = max(values[first][0] + values[first][1], found.get(span, -math.inf))
    ranked = sorted(found.items(), key=lambda item: -item[1])
    answers: dict[tuple[int, int], SpanAnswer] = {}
    for (first, last), score in ranked:
        start, end = trimmed(text, tokens[first].start, tokens[last].end)
        answers.setdefault((start, end), SpanAnswer(text[start:end], start, end, score))
        if len(answers) == count:
            break
    return list(answers.values())


def with_probabilities(answers: Sequence[SpanAnswer]) -> list[SpanAnswer]:
    """Return answers with the softmax of their scores."""
    top = max(answer.score for answer in answers)
    weights = [math.exp(answer.score - top) for answer in answers]
    return [a._replace(probability=w / sum(weights)) for a, w in zip(answers, weights, strict=True)]


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the bounds of a span without white space at its ends: tokens may include the space before a word."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end


def token_bounds(tokens: Sequence[TextToken], start: int, end: int) -> tuple[int, int] | None:
    """Return the first and last token that overlap characters from `start` to `end`; None if there are none."""
    inside = [i for i, token in enumerate(tokens) if token.end > start and token.start < end]
    return (inside[0], inside[-1]) if inside else None


# -- the task ---------------------------------------------------------------------------------------------------------


class TextQuestion(NamedTuple):
    """A question with its text, in tokens, and the answers: each with its first character."""

    question: list[int]
    text: str
    tokens: list[TextToken]
    answers: list[tuple[str, int]]


class SpanAnswering(BuiltTask):
    """Answers to questions, each a span of a text; with `unanswerable`, or the empty answer."""

    spec: QuestionAnswering

    def __init__(self, spec: QuestionAnswering, tokenizer: TextTokenizer):
        self.spec, self.tokenizer, self.frame = spec, tokenizer, Frame(tokenizer, pairs=True)

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the summed cross-entropies of the first and of the last token among the real tokens of a row."""
        logits = logits.float()
        logs = logits.log_softmax(dim=1)
        bounds = labels[:, None, :2]
        loss = -logs.gather(1, bounds)
        if smoothing:
            real = logits > torch.finfo(logits.dtype).min / 2
            mean = logs.masked_fill(~real, 0).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True)
            loss = (1 - smoothing) * loss - smoothing * mean
        return loss.sum()

    # -- rows ---------------------------------------------------------------------------------------------------------

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        if batches is not None:
            rows = rows.with_ids({"text": self.tokenizer.encode_batch, "pair": self._encode_texts})
        faults = (self._row_fault(question, config, batches) for question in self._questions(rows))
        return rows.without({i: why for i, why in enumerate(faults) if why})

    def _questions(self, rows: Rows) -> list[TextQuestion]:
        ids, tokens = rows.encoded("text", self.tokenizer.encode_batch), rows.encoded("pair", self._encode_texts)
        answers = [[(text, start) for text, start in json.loads(cell)] for cell in rows.columns["answers"]]
        return [TextQuestion(*row) for row in zip(ids, rows.columns["pair"], tokens, answers, strict=True)]

    def _encode_texts(self, texts: Sequence[str]) -> list[list[TextToken]]:
        return [[TextToken(*token) for token in self.tokenizer.encode_with_offsets(text)] for text in texts]

    def _row_fault(self, one: TextQuestion, config: ModelConfig, batches: Batches | None) -> str:
        """Return why a question cannot be read; empty if it can."""
        if not one.question or not one.tokens:
            return f"the {'text' if one.question else 'question'} has no tokens"
        if not one.answers and not self.spec.unanswerable:
            return "has no answer; set task.unanswerable = true to learn that some questions have none"
        limit = self._limit(config, batches)
        around = len(self.frame.row(one.question, []))
        if around >= limit:
            return f"the question leaves no space for its text: it has {around} tokens, and a row holds {limit}"
        return ""

    def _limit(self, config: ModelConfig, batches: Batches | None = None) -> int:
        """Return the largest number of tokens of a row."""
        ends = [limit for stack in config.stacks.values() for limit, _ in stack.ends]
        return min([self.spec.window, *ends, *([batches.row_limit] if batches else [])])

    def _windows(self, one: TextQuestion, config: ModelConfig, batches: Batches | None = None) -> list[QuestionWindow]:
        before = len(self.frame.before) + len(one.question) + len(self.frame.between)
        limit = self._limit(config, batches)
        return windows(len(one.tokens), before, len(self.frame.after), limit, self.spec.overlap)

    def _example(self, one: TextQuestion, window: QuestionWindow, config: ModelConfig) -> Example:
        """Return the row of a window, with the indices of the first and last token of its answer."""
        text = [token.id for token in one.tokens[window.first : window.first + window.size]]
        inputs = config.last_input
        has_types = inputs.token_types > self.frame.second
        types = self.frame.types(one.question, text) if has_types else None
        labels = self._bounds(one, window)
        return for_shape(Example(self.frame.row(one.question, text), labels, types=types), config)

    def _bounds(self, one: TextQuestion, window: QuestionWindow) -> list[int]:
        """Return the indices of the first answer in a row; 0 if it is not in this window."""
        answer = next(iter(one.answers), None)
        found = answer and token_bounds(one.tokens, answer[1], answer[1] + len(answer[0]))
        if not found or found[0] < window.first or found[1] >= window.first + window.size:
            return [0, 0]
        return [window.offset + at - window.first for at in found]

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, ExampleBatches)
        every = self._questions(rows)
        examples = [self._example(q, w, model.config) for q in every for w in self._windows(q, model.config, batches)]
        return ExampleLoader(examples, batches, seed, self.tokenizer.pad or 0, source_pad=0)

    # -- predictions --------------------------------------------------------------------------------------------------

    def read(self, text: str, config: ModelConfig, target: str | None = None) -> Example:
        """Return the row of a question and its text, separated by a tab; of a long text, its first window."""
        one = self._split([text])[0]
        if one is None:
            raise ConfigError([Fault("text", "is blank: give a question, a tab, and a text")])
        return self._example(one, self._windows(one, config)[0], config)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure exact match and F1 of the answers, as SQuAD does, and the loss of all windows."""
        every = self._questions(rows)
        total, count, predicted = 0.0, 0, [""] * len(every)
        for i, parts in self._read(model, every):
            for window, logits in parts:
                total += float(self.loss(logits[None], torch.tensor([self._bounds(every[i], window)])))
                count += 2
            predicted[i] = self._choose(every[i], parts)[0].text
        pairs = [(text, [a for a, _ in one.answers]) for text, one in zip(predicted, every, strict=True)]
        values = {
            "loss": total / count,
            "exact_match": sum(exact_match(*pair) for pair in pairs) / len(pairs),
            "f1": sum(f1(*pair) for pair in pairs) / len(pairs),
        }
        return Metrics(self.spec.kind, len(rows), values, {"windows": count // 2, **bad_row_notes(rows)})

    def predict(
        self,
        model: Transformer,
        texts: Sequence[str],
        *,
        progress: Progress | None = None,
        scores: bool = False,
        n_best: int | None = None,
        **options: Any,
    ) -> list[str]:
        """Return the answer to each question, which is separated from its text by a tab.

        With `scores`, a tab and its probability follow. With `n_best`, the result is a JSON list of answers, with the
        characters where they begin and end. A blank text has no answer.
        """
        refuse_decoding_options(options)
        if n_best is not None and not 1 <= n_best <= CANDIDATES:
            raise ConfigError([Fault("n_best", f"= {n_best}: must be from 1 to {CANDIDATES}")])
        every = self._split(texts)
        self._check(every, model.config)
        out = [("[]" if n_best else "\t" if scores else "")] * len(texts)
        numbers = [i for i, one in enumerate(every) if one is not None]
        for n, parts in self._read(model, [one for one in every if one is not None], progress):
            one = every[numbers[n]]
            assert one is not None
            answers = self._choose(one, parts)
            out[numbers[n]] = _as_json(answers[:n_best]) if n_best else _as_line(answers[0], scores)
        if progress:
            progress(len(texts) - len(numbers))
        return out

    def answers(self, model: Transformer, question: str, text: str) -> list[SpanAnswer]:
        """Return the best answers to one question, in descending order."""
        every = self._split([f"{question}\t{text}"])
        self._check(every, model.config)
        one = every[0]
        assert one is not None
        ((_, parts),) = self._read(model, [one])
        return self._choose(one, parts)

    def _split(self, texts: Sequence[str]) -> list[TextQuestion | None]:
        """Return the questions and texts of lines; None for blank ones."""
        cells = [text.split("\t", 1) if text.strip() else ["", ""] for text in texts]
        wrong = (i for i, cell in enumerate(cells, 1) if any(cell) and (len(cell) < 2 or not all(map(str.strip, cell))))
        if faults := [Fault(f"text {i}", "must be a question and a text, separated by a tab") for i in wrong]:
            raise ConfigError(faults)
        questions, tokens = (
            self.tokenizer.encode_batch([q for q, _ in cells]),
            self._encode_texts([t for _, t in cells]),
        )
        rows = zip(cells, questions, tokens, strict=True)
        return [TextQuestion(ids, cell[1], found, []) if ids and found else None for cell, ids, found in rows]

    def _check(self, every: Sequence[TextQuestion | None], config: ModelConfig) -> None:
        """Raise a `ConfigError` that names the questions which leave no space for a text."""
        limit = self._limit(config)
        long = [i for i, one in enumerate(every, 1) if one and len(self.frame.row(one.question, [])) >= limit]
        if long:
            what = f"the question leaves no space for its text: a row holds {limit} tokens"
            raise ConfigError([Fault(f"text {i}", what) for i in long])

    def _read(
        self, model: Transformer, every: Sequence[TextQuestion], progress: Progress | None = None
    ) -> Iterator[tuple[int, list[tuple[QuestionWindow, Tensor]]]]:
        """Yield the number of each question, its windows, and their logits [t, 2]."""
        rows = [(i, window) for i, one in enumerate(every) for window in self._windows(one, model.config)]
        examples = [self._example(every[i], window, model.config) for i, window in rows]
        missing = [0] * len(every)
        for i, _ in rows:
            missing[i] += 1
        parts: dict[int, list[tuple[QuestionWindow, Tensor]]] = {i: [] for i in range(len(every))}
        for n, logits in read_rows(model, examples, self.tokenizer):
            i, window = rows[n]
            parts[i].append((window, logits[: len(examples[n].ids)]))
            missing[i] -= 1
            if not missing[i]:
                yield i, parts.pop(i)
                if progress:
                    progress(1)

    def _choose(self, one: TextQuestion, parts: Sequence[tuple[QuestionWindow, Tensor]]) -> list[SpanAnswer]:
        """Return the best answers, with probabilities.

        With `unanswerable`, the empty answer has the least score of the first token over all windows, and is the first
        if that exceeds the best span by more than `threshold`.
        """
        found = best_answers(one.text, one.tokens, parts, self.spec.longest, CANDIDATES)
        if self.spec.unanswerable:
            score = min(float(logits[0].sum()) for _, logits in parts)
            at = next((i for i, a in enumerate(found) if score > a.score), len(found))
            at = 0 if score - found[0].score > self.spec.threshold else max(1, at)
            found.insert(at, SpanAnswer("", 0, 0, score))
        return with_probabilities(found)


def _as_line(answer: SpanAnswer, scores: bool) -> str:
    """Return an answer as one line."""
    text = " ".join(answer.text.split("\n"))
    return f"{text}\t{answer.probability:.4f}" if scores else text


def _as_json(answers: Sequence[SpanAnswer]) -> str:
    kept = ({**a._asdict(), "score": round(a.score, 4), "probability": round(a.probability, 6)} for a in answers)
    return json.dumps(list(kept), ensure_ascii=False)


# -- exact match and F1, as the evaluation script of SQuAD defines them (Rajpurkar et al. 2016) -----------------------

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """Return 1 if a normalised answer equals the normalised prediction, else 0; no answers: if it is empty."""
    return float(any(normalised(predicted) == normalised(answer) for answer in answers or [""]))


def f1(predicted: str, answers: Sequence[str]) -> float:
    """Return the largest F1 of the words that a prediction shares with an answer."""
    return max(_overlap(predicted, answer) for answer in answers or [""])


def _overlap(predicted: str, answer: str) -> float:
    mine, true = normalised(predicted).split(), normalised(answer).split()
    if not mine or not true:
        return float(mine == true)
    shared = sum((Counter(mine) & Counter(true)).values())
    return 2 * shared / (len(mine) + len(true))
