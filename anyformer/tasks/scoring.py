"""Scores of texts (log-probabilities, perplexity), and the most probable tokens at a position or a mask."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from anyformer.config import ConfigError, Fault
from anyformer.data.tokenizer import TextTokenizer
from anyformer.generation.score import ReadMedia, TopTokens, fill_mask, score as log_probabilities, sliding, top_tokens
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.tasks.base import Writer, check_lengths


@dataclass(frozen=True)
class TextScore:
    """The log-probabilities of a text."""

    ids: tuple[int, ...]  # that were scored
    logprobs: tuple[float, ...]  # of each, natural logarithms

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability per token."""
        return math.exp(min(-self.total / len(self.ids), 700.0))


def score(
    task: Writer,
    model: Transformer,
    texts: Sequence[str],
    answers: Sequence[str] | None = None,
    *,
    window: int | None = None,
    stride: int | None = None,
) -> list[TextScore]:
    """Score each text's tokens after its first, or an answer to each text.

    With a `window` a decoder reads long texts in windows of that many tokens, `stride` apart.
    """
    if isinstance(texts, str) or isinstance(answers, str):
        raise ConfigError([Fault("texts", "must be a list of texts, not one")])
    if answers is not None and len(answers) != len(texts):
        raise ConfigError([Fault("answers", f"there are {len(answers)}, and {len(texts)} texts: each needs one")])
    if stride is not None and window is None:
        raise ConfigError([Fault("stride", f"= {stride}: needs a window")])
    if window is not None and model.encoder is not None:
        raise ConfigError([Fault("window", f"= {window}: only a decoder without an encoder reads by windows")])
    if window is not None and reader_of(task) is not None:
        raise ConfigError([Fault("window", f"= {window}: a text with images or sounds is read at once")])
    if window is not None and task.marked:
        raise ConfigError([Fault("window", f"= {window}: a prefix that sees all of itself is read at once")])
    pieces = task.scored(texts, answers, model.config)
    rows = [[*piece.ids, piece.labels[-1]] for piece in pieces]
    if window is not None:
        found = [sliding(model, row, window, stride) for row in rows]
    else:
        check_lengths([len(piece.ids) for piece in pieces], model.config, "decoder")
        sources = None if model.encoder is None else [piece.source or () for piece in pieces]
        check_lengths([] if sources is None else list(map(len, sources)), model.config, "encoder")
        seen = [sum(piece.marks or ()) for piece in pieces] if task.marked else None
        found = log_probabilities(model, rows, sources, seen, reader_of(task))
    scores = []
    for piece, each in zip(pieces, found, strict=True):
        asked = [(id, value) for id, value in zip(piece.labels, each.tolist(), strict=True) if id != IGNORE]
        scores.append(TextScore(tuple(id for id, _ in asked), tuple(value for _, value in asked)))
    return scores


def reader_of(task: Writer) -> ReadMedia | None:
    """Return what reads the images and sounds of a task's texts; None if its model reads tokens only."""
    media = (task.source_tokenizer or task.tokenizer).media
    return None if media is None else media.read


class Alternative(NamedTuple):
    """A token that may come next, or fill a mask."""

    id: int
    token: str  # as `tokenizer.token` shows it
    probability: float


def alternatives(
    task: Writer, model: Transformer, text: str, k: int = 10, *, answer: str = "", at: int | None = None
) -> list[Alternative]:
    """Return the k most probable next tokens after a text and the beginning of its answer, best first.

    `at`: after this many of the decoder's tokens rather than after all. These are the start id and the answer's in an
    encoder–decoder, and otherwise the text's, too.
    """
    (prompt,) = task.prompts([text], model.config)
    if not prompt:
        raise ConfigError([Fault("text", "is blank: it is answered by nothing")])
    before = prompt if model.encoder is None else [model.config.special.start or 0]
    row = [*before, *task.tokenizer.encode(answer)]
    if at is not None and not 1 <= at <= len(row):
        raise ConfigError([Fault("at", f"= {at}: must be from 1 to {len(row)}, the number of tokens that are read")])
    row = row[:at]
    check_lengths([len(row)], model.config, "decoder")
    source, seen = None if model.encoder is None else [prompt], [len(prompt)] if task.marked else None
    return _shown(top_tokens(model, [row], k, source, seen, reader_of(task)), 0, task.tokenizer)


class Masking(Protocol):
    """A task whose model fills masks."""

    tokenizer: TextTokenizer

    def masked(self, text: str) -> list[int]:
        """Return the ids of a text that contains the mask by name."""


def fillings(task: Masking, model: Transformer, text: str, k: int = 10, *, at: int | None = None) -> list[Alternative]:
    """Return the k most probable tokens for a mask, best first. `at`: the index of the mask."""
    row, mask = task.masked(text), task.tokenizer.mask
    count = 0 if mask is None else row.count(mask)
    if mask is None or not count:
        name = "<mask>" if mask is None else task.tokenizer.token(mask)
        raise ConfigError([Fault("text", f"has no {name}: write it where a word is missing")])
    if not 0 <= (at or 0) < count:
        raise ConfigError([Fault("at", f"= {at}: must be from 0 to {count - 1}, the number of a mask")])
    check_lengths([len(row)], model.config, "encoder")
    (found,) = fill_mask(model, [row], mask, k)
    return _shown(found, at or 0, task.tokenizer)


def _shown(found: TopTokens, place: int, tokenizer: TextTokenizer) -> list[Alternative]:
    pairs = zip(found.ids[place].tolist(), found.probabilities[place].tolist(), strict=True)
    return [Alternative(id, tokenizer.token(id), p) for id, p in pairs]
