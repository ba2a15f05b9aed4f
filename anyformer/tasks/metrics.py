"""Scores of predictions. BLEU and chrF are sacrebleu's (the `eval` extra), with its signature."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def exact_match(said: Sequence[str], asked: Sequence[str]) -> float:
    """The share of answers that are right to the last character."""
    return sum(a == b for a, b in zip(said, asked, strict=True)) / len(asked)


def f1(said: Tensor, asked: Tensor) -> float | None:
    """2 · hits / (said + asked) of a label that rows have or not, bool [n]; None if no row has it, nor was said to."""
    hits, count = int((said & asked).sum()), int(said.sum()) + int(asked.sum())
    return 2 * hits / count if count else None


Span = tuple[str, int, int]  # its type, and where it begins and ends


def spans(tags: Sequence[str]) -> set[Span]:
    """Those of one sentence: B-x begins one, I-x (and E-x, its end) goes on with one of its type or else begins one,
    S-x is one by itself; as conlleval reads them."""
    found, begin, before = set[Span](), 0, "O"
    for at, tag in enumerate([*tags, "O"]):
        goes_on = tag[0] in "IE" and before[0] in "BI" and tag[1:] == before[1:]
        if not goes_on:
            if before[0] != "O":
                found.add((before[2:], begin, at))
            begin = at
        before = tag
    return found


def span_scores(
    said: Sequence[Sequence[str]], asked: Sequence[Sequence[str]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Precision, recall and F1 of the spans of all sentences, which are right in type, beginning and end; and the F1 of
    each type."""
    counts: dict[str, list[int]] = {}  # right, said and asked
    for guess, truth in zip(map(spans, said), map(spans, asked), strict=True):
        for n, some in enumerate((guess & truth, guess, truth)):
            for name, _, _ in some:
                counts.setdefault(name, [0, 0, 0])[n] += 1
    right, guessed, true = (sum(count[n] for count in counts.values()) for n in range(3))
    values = {
        "span_precision": right / max(1, guessed),
        "span_recall": right / max(1, true),
        "span_f1": 2 * right / max(1, guessed + true),
    }
    return values, {name: 2 * hits / (a + b) for name, (hits, a, b) in sorted(counts.items())}


def pearson(a: Tensor, b: Tensor) -> float:
    """How near two lists of numbers are to a line, from -1 to 1; 0 where one of them is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0


def spearman(a: Tensor, b: Tensor) -> float:
    """The same of their ranks."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(x: Tensor) -> Tensor:
    """From 0; equal numbers share the mean of their places."""
    _, which, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts + 1) / 2)[which]


def bleu(said: Sequence[str], asked: Sequence[str], tokenize: str) -> tuple[float, dict[str, Any]]:
    """Corpus BLEU with its signature and a 95 % bootstrap interval."""
    sacrebleu = _sacrebleu()
    metric = sacrebleu.BLEU(tokenize=tokenize)
    return _score(metric, said, asked)


def chrf(said: Sequence[str], asked: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """Corpus chrF2 with its signature and a 95 % bootstrap interval."""
    sacrebleu = _sacrebleu()
    return _score(sacrebleu.CHRF(), said, asked)


def _score(metric: Any, said: Sequence[str], asked: Sequence[str]) -> tuple[float, dict[str, Any]]:
    compute = metric._compute_score_from_stats

    def with_floats(stats: Any) -> Any:
        """sacrebleu cannot average numpy's numbers with Python's, and where hardly anything is right it has both."""
        found = compute(stats)
        found.score = float(found.score)
        return found

    metric._compute_score_from_stats = with_floats
    result = metric.corpus_score(list(said), [list(asked)], n_bootstrap=1000)
    interval = float(result._ci)
    return float(result.score), {"signature": str(metric.get_signature()), "interval": interval}


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError:
        raise ImportError("BLEU and chrF need sacrebleu: pip install 'anyformer[eval]'") from None
    return sacrebleu
