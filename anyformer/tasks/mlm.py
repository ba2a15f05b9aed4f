"""Masked language modelling: which tokens stand where a text is masked."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from anyformer.config import ConfigError, Fault
from anyformer.conventions import IGNORE
from anyformer.data.batch import Example, ExampleTable, Ragged
from anyformer.data.counter_rng import CounterRNG, below, lowest, unit
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import MaskedLanguageModel
from anyformer.tasks.base import Progress, refuse_long, token_loss
from anyformer.tasks.dynamic_examples import DrawnTask
from anyformer.tasks.fill_mask import encode_with, filled
from anyformer.tasks.sequence_level import Frame, read_rows, refuse_options


class MaskedLanguageModelling(DrawnTask):
    """Texts between <bos> and <eos>, or what the tokenizer's file puts around them. Some tokens of the text are asked,
    one at least; of these most are hidden by <mask>, some by others, and some stay (Devlin et al. 2019)."""

    source_tokenizer: TextTokenizer | None = None
    loss = staticmethod(token_loss)
    least = 1
    spec: MaskedLanguageModel

    def __init__(self, spec: MaskedLanguageModel, tokenizer: TextTokenizer):
        self.spec, self.tokenizer, self.frame = spec, tokenizer, Frame(tokenizer)
        if tokenizer.mask is None:
            raise ConfigError([Fault("tokenizer", "has no <mask>, which the task mlm needs")])
        self.mask = tokenizer.mask
        self._is_plain = np.array([i not in tokenizer.special for i in range(tokenizer.size)])
        self._plain = np.flatnonzero(self._is_plain)

    def draw(self, texts: Ragged, chance: CounterRNG) -> ExampleTable:
        """What is unknown is asked only where nothing else is there."""
        before, after = self.frame.before, self.frame.after
        known = np.flatnonzero(self._is_plain.take(texts.values))
        many = np.diff(known.searchsorted(texts.starts))
        if not many.all():
            known = np.flatnonzero(self._is_plain[texts.values] | np.repeat(many == 0, texts.sizes))
            many = np.where(many == 0, texts.sizes, many)
        asked = np.minimum(np.maximum(np.rint(self.spec.rate * texts.sizes).astype(np.int64), 1), many)
        at = known[lowest(chance.draw(0, many), many, asked)]
        truth, drawn = texts.values[at], chance.draw(1, asked)
        fate, other = unit(drawn), self._plain[below(drawn << np.uint64(32), len(self._plain))]  # upper and lower bits
        hidden = np.where(fate < self.spec.masked + self.spec.random, other, truth)
        rows = texts.framed(before, after)
        at += len(before) + (len(before) + len(after)) * np.repeat(np.arange(len(asked)), asked)  # where it is in rows
        labels = np.full_like(rows.values, IGNORE)
        labels[at] = truth
        rows.values[at] = np.where(fate < self.spec.masked, self.mask, hidden)
        return ExampleTable(rows, Ragged(labels, rows.sizes))

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """The texts with a token for each mask that is written in them by its name; a blank stays one."""
        refuse_options(options)
        name = self.tokenizer.token(self.mask)
        if faults := [
            Fault(f"text {i}", f"has no {name}: write it where a word is to be found")
            for i, text in enumerate(texts, 1)
            if text.strip() and name not in text
        ]:
            raise ConfigError(faults)
        asked = {i: self.masked(text) for i, text in enumerate(texts) if text.strip()}
        refuse_long([len(asked.get(i, ())) for i in range(len(texts))], model.config, "encoder")
        out, numbers = [""] * len(texts), list(asked)
        if progress:
            progress(len(texts) - len(asked))
        pieces = [Example(row, row) for row in asked.values()]
        for i, logits in read_rows(model, pieces, self.tokenizer.pad or 0, progress):
            said = filled(pieces[i].ids, self.mask, logits)
            out[numbers[i]] = self.tokenizer.decode(said[len(self.frame.before) : len(said) - len(self.frame.after)])
        return out

    def masked(self, text: str) -> list[int]:
        """A row of the text, in which the mask stands by its name."""
        return self.frame.row(encode_with(self.tokenizer, text, [self.mask]))
