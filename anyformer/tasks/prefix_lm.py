"""Prefix language modelling: how a text goes on from a random place in it."""

from collections.abc import Sequence

import numpy as np

from anyformer.config import ModelConfig
from anyformer.conventions import IGNORE, PLAIN, SEEN
from anyformer.data.batch import Example, ExampleTable, Ragged
from anyformer.data.counter_rng import CounterRNG, below
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import PrefixLM
from anyformer.tasks.base import prefixed
from anyformer.tasks.dynamic_examples import DrawnTask
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

    def draw(self, texts: Ragged, chance: CounterRNG) -> ExampleTable:
        values, sizes, starts = texts.values, texts.sizes - 1, texts.starts[:-1]
        cuts = 1 + below(chance.draw(0, np.ones_like(sizes)), sizes)  # so many are seen, and the rest is asked
        at = np.arange(len(values)) - np.repeat(starts, texts.sizes)
        first, last, cut = at == 0, at == np.repeat(sizes, texts.sizes), np.repeat(cuts, texts.sizes)
        labels, marks = np.where(at < cut, IGNORE, values), np.where(at < cut, SEEN, PLAIN)
        return ExampleTable(
            Ragged(values[~last], sizes), Ragged(labels[~first], sizes), marks=Ragged(marks[~last], sizes)
        )

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """An answer follows a text that sees all of itself; a text by itself is read from left to right."""
        pieces = super().scored(texts, answers, config)
        firsts = [next(i for i, label in enumerate(piece.labels) if label != IGNORE) for piece in pieces]
        return [prefixed(piece, first + 1) for piece, first in zip(pieces, firsts, strict=True)]
