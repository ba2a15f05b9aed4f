"""Statistics of single rows, and metrics as functions of their sums.

A corpus metric such as F1 or BLEU is no mean over rows, but a function of sums over rows. With the statistics of each
row, the metric of any resampled set of rows needs no further prediction (Koehn 2004).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyformer.runs.run import Run
from anyformer.tasks.metrics import bleu_metric, edit_distance, spans

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Measure:
    """A metric of rows. `statistics` has a line for each row; `value` computes the metric from sums [..., k]."""

    name: str
    higher_is_better: bool
    statistics: Floats
    value: Callable[[Floats], Floats]

    @property
    def total(self) -> float:
        """The metric on all rows."""
        return float(self.value(self.statistics.sum(0)))


def _ratio(sums: Floats) -> Floats:
    return sums[..., 0] / np.maximum(sums[..., 1], 1e-300)


def mean(name: str, values: Sequence[float], higher_is_better: bool = True) -> Measure:
    """Return the mean of one value per row."""
    return ratio(name, values, [1.0] * len(values), higher_is_better)


def ratio(name: str, upper: Sequence[float], lower: Sequence[float], higher_is_better: bool = True) -> Measure:
    """Return the ratio of two sums over rows."""
    return Measure(name, higher_is_better, np.array([upper, lower], dtype=np.float64).T, _ratio)


def span_f1(predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> Measure:
    """Return F1 of the spans of tags, over all types."""
    both = [(spans(a), spans(b)) for a, b in zip(predicted, true, strict=True)]
    return ratio("span_f1", [2.0 * len(a & b) for a, b in both], [float(len(a) + len(b)) for a, b in both])


def word_error_rate(predicted: Sequence[str], true: Sequence[str]) -> Measure:
    """Return the edits of words per word of the targets."""
    pairs = [(a.split(), b.split()) for a, b in zip(predicted, true, strict=True)]
    edits, words = [float(edit_distance(a, b)) for a, b in pairs], [float(len(b)) for _, b in pairs]
    return ratio("word_error_rate", edits, words, higher_is_better=False)


def bleu(predicted: Sequence[str], true: Sequence[str], tokenize: str) -> Measure:
    """Return corpus BLEU: n-grams that match, n-grams, and both lengths are its statistics."""
    metric = bleu_metric(tokenize)
    scores = [metric.sentence_score(a, [b]) for a, b in zip(predicted, true, strict=True)]
    rows = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
    order = len(scores[0].counts)

    def of_sums(sums: Floats) -> Floats:
        flat = sums.reshape(-1, sums.shape[-1]).round().astype(int)
        each = [_corpus_bleu(metric, line.tolist(), order) for line in flat]
        return np.array(each).reshape(sums.shape[:-1])

    return Measure("bleu", True, np.array(rows, dtype=np.float64), of_sums)


def _corpus_bleu(metric: Any, line: list[int], order: int) -> float:
    correct, total, (length, reference) = line[:order], line[order : 2 * order], line[2 * order :]
    return float(metric.compute_bleu(correct, total, length, reference, smooth_method="exp").score)


def loss(run: Run, texts: Sequence[str], answers: Sequence[str]) -> Measure:
    """Return the loss per token of answers to texts."""
    found = run.score(texts, answers)
    return ratio("loss", [-one.total for one in found], [float(len(one.ids)) for one in found], False)


def bits_per_byte(run: Run, texts: Sequence[str], window: int) -> Measure:
    """Return the bits per byte of texts, which models with different tokenizers share."""
    found = run.score(texts, window=window)
    bits = [-one.total / math.log(2) for one in found]
    return ratio("bits_per_byte", bits, [float(len(text.encode("utf-8"))) for text in texts], False)
