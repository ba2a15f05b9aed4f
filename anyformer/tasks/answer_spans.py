"""From the logits of windows to answers: the best spans of a text, restricted to it and to a length."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

CANDIDATES = 20  # first tokens and last tokens of a window that are combined to spans


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
