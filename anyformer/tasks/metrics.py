"""Metrics of predictions. BLEU and chrF are computed by sacrebleu (the `eval` extra), with its signature."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def exact_match(predicted: Sequence[str], true: Sequence[str]) -> float:
    """Return the fraction of predictions that equal their target, character by character."""
    return sum(a == b for a, b in zip(predicted, true, strict=True)) / len(true)


def word_error_rate(predicted: Sequence[str], true: Sequence[str]) -> float:
    """Return the words that must be replaced, inserted or deleted to turn predictions into targets, per target word."""
    pairs = [(a.split(), b.split()) for a, b in zip(predicted, true, strict=True)]
    return sum(edit_distance(a, b) for a, b in pairs) / max(1, sum(len(b) for _, b in pairs))


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the edit distance of two sequences (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def f1(predicted: Tensor, true: Tensor) -> float | None:
    """Return F1 = 2 · hits / (predicted + true) of one label, bool [n]; None if it neither occurs nor was predicted."""
    hits, count = int((predicted & true).sum()), int(predicted.sum()) + int(true.sum())
    return 2 * hits / count if count else None


Span = tuple[str, int, int]  # type, begin, end


def spans(tags: Sequence[str]) -> set[Span]:
    """Return the spans of a sentence, as conlleval reads them.

    B-x begins a span. I-x and E-x continue one of the same type, or else begin one. S-x is a span of one word.
    """
    found, begin, before = set[Span](), 0, "O"
    for at, tag in enumerate([*tags, "O"]):
        continues = tag[0] in "IE" and before[0] in "BI" and tag[1:] == before[1:]
        if not continues:
            if before[0] != "O":
                found.add((before[2:], begin, at))
            begin = at
        before = tag
    return found


def span_scores(
    predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return precision, recall and F1 of all spans, and the F1 of each type.

    A span is correct if its type, begin and end are.
    """
    counts: dict[str, list[int]] = {}  # correct, predicted and true
    for guess, truth in zip(map(spans, predicted), map(spans, true), strict=True):
        for n, some in enumerate((guess & truth, guess, truth)):
            for name, _, _ in some:
                counts.setdefault(name, [0, 0, 0])[n] += 1
    correct, guessed, in_truth = (sum(count[n] for count in counts.values()) for n in range(3))
    values = {
        "span_precision": correct / max(1, guessed),
        "span_recall": correct / max(1, in_truth),
        "span_f1": 2 * correct / max(1, guessed + in_truth),
    }
    return values, {name: 2 * hits / (a + b) for name, (hits, a, b) in sorted(counts.items())}


def pearson(a: Tensor, b: Tensor) -> float:
    """Return the linear correlation, from -1 to 1; 0 if one of the variables is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0


def spearman(a: Tensor, b: Tensor) -> float:
    """Return the rank correlation: `pearson` of the ranks."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(x: Tensor) -> Tensor:
    """Return ranks from 0; equal values have the mean of their ranks."""
    _, which, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts + 1) / 2)[which]


def bleu(predicted: Sequence[str], true: Sequence[str], tokenize: str) -> tuple[float, dict[str, Any]]:
    """Return corpus BLEU with its signature and a 95 % bootstrap interval."""
    return _score(bleu_metric(tokenize), predicted, true)


def bleu_metric(tokenize: str) -> Any:
    """Return sacrebleu's BLEU."""
    return _sacrebleu().BLEU(tokenize=tokenize)


def chrf(predicted: Sequence[str], true: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Return corpus chrF2 with its signature and a 95 % bootstrap interval."""
    sacrebleu = _sacrebleu()
    return _score(sacrebleu.CHRF(), predicted, true)


def _score(metric: Any, predicted: Sequence[str], true: Sequence[str]) -> tuple[float, dict[str, Any]]:
    compute = metric._compute_score_from_stats

    def with_floats(stats: Any) -> Any:
        """Convert the score to a Python float: for low scores, sacrebleu mixes both kinds and cannot average them."""
        result = compute(stats)
        result.score = float(result.score)
        return result

    metric._compute_score_from_stats = with_floats
    result = metric.corpus_score(list(predicted), [list(true)], n_bootstrap=1000)
    interval = float(result._ci)
    return float(result.score), {"signature": str(metric.get_signature()), "interval": interval}


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError:
        raise ImportError("BLEU and chrF need sacrebleu: pip install 'anyformer[eval]'") from None
    return sacrebleu
