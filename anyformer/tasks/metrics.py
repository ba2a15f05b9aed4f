"""Scores of predictions. BLEU and chrF are sacrebleu's (the `eval` extra), with its signature."""

from collections.abc import Sequence
from typing import Any


def exact_match(said: Sequence[str], asked: Sequence[str]) -> float:
    """The share of answers that are right to the last character."""
    return sum(a == b for a, b in zip(said, asked, strict=True)) / len(asked)


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
    result = metric.corpus_score(list(said), [list(asked)], n_bootstrap=1000)
    interval = float(result._ci)
    return float(result.score), {"signature": str(metric.get_signature()), "interval": interval}


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError:
        raise ImportError("BLEU and chrF need sacrebleu: pip install 'anyformer[eval]'") from None
    return sacrebleu
