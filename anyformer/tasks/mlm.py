"""The task mlm: predict masked tokens (BERT, Devlin et al. 2019)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import Example, ExampleTable, Ragged
from anyformer.data.counter_rng import CounterRNG, below, lowest, unit
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import MaskedLanguageModel
from anyformer.tasks.base import Progress, TokenTask, check_lengths
from anyformer.tasks.dynamic_examples import DynamicExampleTask
from anyformer.tasks.sequence_level import Frame, encode_with, filled, read_rows, refuse_decoding_options


class MaskedLanguageModelling(TokenTask, DynamicExampleTask):
    """Masked language modelling.

    Texts are between <bos> and <eos>, or the special tokens of the tokenizer's file. At least one token of a text has a
    label; of these tokens most are replaced by <mask>, some by random tokens, and the rest are unchanged.
    """

    min_tokens = 1
    spec: MaskedLanguageModel

    def __init__(self, spec: MaskedLanguageModel, tokenizer: TextTokenizer):
        self.spec, self.tokenizer, self.frame = spec, tokenizer, Frame(tokenizer)
        if tokenizer.mask is None:
            raise ConfigError([Fault("tokenizer", "has no <mask>, which the task mlm needs")])
        self.mask = tokenizer.mask
        self._is_plain = np.array([i not in tokenizer.special for i in range(tokenizer.size)])
        self._plain = np.flatnonzero(self._is_plain)

    def draw(self, texts: Ragged, rng: CounterRNG) -> ExampleTable:
        """Draw examples. Special tokens such as `<unk>` are masked only in texts that have no other tokens."""
        before, after = self.frame.before, self.frame.after
        known = np.flatnonzero(self._is_plain.take(texts.values))
        counts = np.diff(known.searchsorted(texts.starts))
        if not counts.all():
            known = np.flatnonzero(self._is_plain[texts.values] | np.repeat(counts == 0, texts.sizes))
            counts = np.where(counts == 0, texts.sizes, counts)
        chosen = np.minimum(np.maximum(np.rint(self.spec.rate * texts.sizes).astype(np.int64), 1), counts)
        at = known[lowest(rng.draw(0, counts), counts, chosen)]
        truth, drawn = texts.values[at], rng.draw(1, chosen)
        fate, other = unit(drawn), self._plain[below(drawn << np.uint64(32), len(self._plain))]  # upper and lower bits
        hidden = np.where(fate < self.spec.masked + self.spec.random, other, truth)
        rows = texts.framed(before, after)
        at += len(before) + (len(before) + len(after)) * np.repeat(
            np.arange(len(chosen)), chosen
        )  # index in framed rows
        labels = np.full_like(rows.values, IGNORE)
        labels[at] = truth
        rows.values[at] = np.where(fate < self.spec.masked, self.mask, hidden)
        return ExampleTable(rows, Ragged(labels, rows.sizes))

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the texts with a token in place of each mask, written by its name; a blank text is unchanged."""
        refuse_decoding_options(options)
        found = self.examples(texts, model.config)
        numbers, examples, out = list(found), list(found.values()), [""] * len(texts)
        if progress:
            progress(len(texts) - len(examples))
        for i, logits in read_rows(model, examples, self.tokenizer, progress):
            ids = filled(examples[i].ids, self.mask, logits)
            out[numbers[i]] = self.tokenizer.decode(ids[len(self.frame.before) : len(ids) - len(self.frame.after)])
        return out

    def examples(self, texts: Sequence[str], config: ModelConfig) -> dict[int, Example]:
        """Return the examples of texts that are not blank, by the number of the text."""
        name = self.tokenizer.token(self.mask)
        if faults := [
            Fault(f"text {i}", f"has no {name}: write it where a token is to be predicted")
            for i, text in enumerate(texts, 1)
            if text.strip() and name not in text
        ]:
            raise ConfigError(faults)
        rows = {i: self.masked(text) for i, text in enumerate(texts) if text.strip()}
        check_lengths([len(rows.get(i, ())) for i in range(len(texts))], config, "encoder")
        return {i: Example(row, row) for i, row in rows.items()}

    def read(self, text: str, config: ModelConfig, target: str | None = None) -> Example:
        row = self.masked(text)
        return Example(row, row)

    def masked(self, text: str) -> list[int]:
        """Return the row of a text; the name of the mask in it becomes the mask token."""
        return self.frame.row(encode_with(self.tokenizer, text, [self.mask]))
