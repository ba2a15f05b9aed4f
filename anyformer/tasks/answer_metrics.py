"""Exact match and F1 of answers, as the evaluation script of SQuAD defines them (Rajpurkar et al. 2016)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

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
