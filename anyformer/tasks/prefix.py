"""Prefix language modelling: how a text goes on from a random place in it."""

from collections.abc import Sequence

from numpy.random import Generator

from anyformer.config import ModelConfig
from anyformer.data.batch import IGNORE, Ids, Piece
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import PrefixLM
from anyformer.tasks.base import prefixed
from anyformer.tasks.drawn import DrawnTask
from anyformer.tasks.lm import LanguageModelling


class PrefixModelling(DrawnTask, LanguageModelling):
    """A language model that is asked only what follows a random place; what comes before sees all of itself, and so
    does a prompt."""

    marked = True
    least = 2
    spec: PrefixLM
    encode = LanguageModelling.encode

    def __init__(self, spec: PrefixLM, tokenizer: TextTokenizer):
        super().__init__(spec, tokenizer)

    def draw(self, ids: Ids, generator: Generator) -> Piece:
        cut = int(generator.integers(1, len(ids)))
        return prefixed(Piece(ids[:-1], [IGNORE] * (cut - 1) + [*ids[cut:]]), cut)

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Piece]:
        """An answer follows a text that sees all of itself; a text by itself is read from left to right."""
        pieces = super().scored(texts, answers, config)
        firsts = [next(i for i, label in enumerate(piece.labels) if label != IGNORE) for piece in pieces]
        return [prefixed(piece, first + 1) for piece, first in zip(pieces, firsts, strict=True)]
