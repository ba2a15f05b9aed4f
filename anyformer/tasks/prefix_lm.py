"""The task prefix_lm: continue a text from a random position (Liu et al. 2018)."""

from collections.abc import Sequence

import numpy as np

from anyformer.config import ModelConfig
from anyformer.data.batch import Example, ExampleTable, Ragged
from anyformer.data.counter_rng import CounterRNG, below
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.conventions import IGNORE, PLAIN, SEEN
from anyformer.recipe import PrefixLM
from anyformer.tasks.base import with_prefix
from anyformer.tasks.dynamic_examples import DynamicExampleTask
from anyformer.tasks.lm import LanguageModelling


class PrefixModelling(DynamicExampleTask, LanguageModelling):
    """Prefix language modelling: only tokens after a random position have labels.

    The tokens before it attend in both directions, as those of a prompt do.
    """

    marked = True
    min_tokens = 2
    spec: PrefixLM
    encode = LanguageModelling.encode

    def __init__(self, spec: PrefixLM, tokenizer: TextTokenizer):
        super().__init__(spec, tokenizer)

    def draw(self, texts: Ragged, rng: CounterRNG) -> ExampleTable:
        values, sizes, starts = texts.values, texts.sizes - 1, texts.starts[:-1]
        cuts = 1 + below(rng.draw(0, np.ones_like(sizes)), sizes)  # length of each prefix
        at = np.arange(len(values)) - np.repeat(starts, texts.sizes)
        first, last, cut = at == 0, at == np.repeat(sizes, texts.sizes), np.repeat(cuts, texts.sizes)
        labels, marks = np.where(at < cut, IGNORE, values), np.where(at < cut, SEEN, PLAIN)
        return ExampleTable(
            Ragged(values[~last], sizes), Ragged(labels[~first], sizes), marks=Ragged(marks[~last], sizes)
        )

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """Return each answer after its text as the prefix; a text alone has a prefix of one token."""
        examples = super().scored(texts, answers, config)
        firsts = [next(i for i, label in enumerate(example.labels) if label != IGNORE) for example in examples]
        return [with_prefix(example, first + 1) for example, first in zip(examples, firsts, strict=True)]
