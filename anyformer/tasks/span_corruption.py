"""Span corruption: what is missing from a text, of which spans were left out (T5, Raffel et al. 2020)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import Example, ExampleTable, Ragged, inserted
from anyformer.data.counter_rng import CounterRNG, lowest
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import SpanCorruption
from anyformer.tasks.base import Progress, refuse_long, token_loss
from anyformer.tasks.dynamic_examples import DrawnTask
from anyformer.tasks.fill_mask import encode_with, split_at
from anyformer.tasks.generation import NotFinite, generate


class SpanCorrupting(DrawnTask):
    """`the <extra_id_0> sat on <extra_id_1> <eos>` is read; `<extra_id_0> cat <extra_id_1> a mat <extra_id_2> <eos>` is
    said after <bos>: each sentinel with the span that it stands for, and one more to end the last."""

    source_tokenizer: TextTokenizer | None = None
    continues = marked = False
    loss = staticmethod(token_loss)
    least = 2
    spec: SpanCorruption

    def __init__(self, spec: SpanCorruption, tokenizer: TextTokenizer):
        self.spec, self.tokenizer, self.sentinels = spec, tokenizer, tokenizer.sentinels
        if len(self.sentinels) < 2:
            what = "has no sentinels <extra_id_0>, <extra_id_1>, ..., which the task spans needs"
            raise ConfigError([Fault("tokenizer", what)])
        begin = tokenizer.bos if spec.start is None else spec.start
        if begin is None or tokenizer.eos is None:
            lost = "bos" if begin is None else "eos"
            raise ConfigError([Fault("tokenizer", f"has no <{lost}>, which the task spans needs")])
        self.begin, self.eos = begin, tokenizer.eos

    def draw(self, texts: Ragged, chance: CounterRNG) -> ExampleTable:
        rate, mean = self.spec.rate, self.spec.mean_span
        source, target = corrupt(texts, rate, mean, np.array(self.sentinels), self.eos, chance)
        return ExampleTable(target.framed([self.begin], []), target.framed([], [self.eos]), source=source)

    def _piece(self, source: list[int], target: list[int]) -> Example:
        return Example([self.begin, *target], [*target, self.eos], [*source, self.eos])

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """The texts with words in the place of each sentinel that is written in them by its name; a blank stays one."""
        try:
            said = generate(self, model, texts, progress=progress, **options)
        except NotFinite as error:
            raise error.but(lambda i, answer: self._whole(texts[i], answer)) from None
        return list(map(self._whole, texts, said))

    def _whole(self, text: str, answer: str) -> str:
        """The text with the spans of an answer; nothing for a sentinel of which it does not speak."""
        said = split_at(self.tokenizer, answer, self.sentinels)
        spans = dict(zip(said[-2:0:-2], said[:1:-2], strict=True))  # the first time that a sentinel is there counts
        parts = split_at(self.tokenizer, text, self.sentinels)
        tidy = str.strip if self.tokenizer.spaced else str
        return "".join(tidy(spans.get(part, "")) if i % 2 else part for i, part in enumerate(parts))

    # -- a writer -----------------------------------------------------------------------------------------------------

    def prompts(self, texts: Sequence[str], config: ModelConfig) -> list[list[int]]:
        first = self.tokenizer.token(self.sentinels[0])
        faults = [
            Fault(f"text {i}", f"has no sentinel: write {first} where words are missing, then the next, and so on")
            for i, text in enumerate(texts, 1)
            if text.strip() and len(split_at(self.tokenizer, text, self.sentinels)) == 1
        ]
        if faults:
            raise ConfigError(faults)
        rows = [[*self._named(text), self.eos] if text.strip() else [] for text in texts]
        refuse_long(list(map(len, rows)), config, "encoder")
        return rows

    def room(self, read: int, config: ModelConfig) -> int:
        return read + 20

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """Each answer, with its sentinels, and its <eos>, after its text."""
        if answers is None:
            raise ConfigError([Fault("answers", "are missing: this task's model scores an answer to each text")])
        pairs = zip(map(self._named, texts), map(self._named, answers), strict=True)
        return [self._piece(source, target) for source, target in pairs]

    def _named(self, text: str) -> list[int]:
        return encode_with(self.tokenizer, text, self.sentinels)


def counts(lengths: np.ndarray, rate: float, mean_span: float, sentinels: int) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens are left out of texts of at least two, and in how many spans: one token stays, another stands
    between each two spans, and one sentinel is for the end."""
    out = np.minimum(np.maximum(np.rint(lengths * rate).astype(np.int64), 1), lengths - 1)
    most = np.minimum(lengths - out, sentinels - 1)
    return out, np.minimum(np.maximum(np.rint(out / mean_span).astype(np.int64), 1), most)


def corrupt(
    texts: Ragged, rate: float, mean_span: float, sentinels: np.ndarray, end: int, chance: CounterRNG
) -> tuple[Ragged, Ragged]:
    """Texts with sentinels in the place of random spans, and an end; and these spans, each behind its sentinel."""
    out, spans = counts(texts.sizes, rate, mean_span, len(sentinels))
    last = (spans + 1).cumsum() - 1
    leave = inserted(segments(chance, 0, out, spans), last, np.array(0))  # after what stays last, nothing
    stay = segments(chance, 1, texts.sizes - out + 2, spans + 1)
    stay[last - spans] -= 1  # a text may begin or end with a span: what stands there may be empty
    stay[last] -= 1
    gone = np.repeat(np.arange(2 * len(stay)) % 2 == 1, np.stack((stay, leave), axis=1).ravel())
    names = sentinels[np.arange(len(stay)) - np.repeat(last - spans, spans + 1)]
    target = inserted(texts.values[gone], (leave + 1).cumsum() - leave - 1, names)
    names[last] = end
    source = inserted(texts.values[~gone], (stay + 1).cumsum() - 1, names)
    return Ragged(source, texts.sizes - out + spans + 1), Ragged(target, out + spans + 1)


def segments(chance: CounterRNG, use: int, totals: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """For each text a random one of all ways to cut so many tokens into so many parts, none of them empty."""
    inside = lowest(chance.draw(use, totals - 1), totals - 1, parts - 1)
    ends = np.zeros(totals.sum(), dtype=np.bool_)
    ends[inside + np.repeat(np.arange(len(totals)), parts - 1)] = True
    ends[totals.cumsum() - 1] = True  # whatever is drawn, the last part ends where all do
    return np.diff(np.flatnonzero(ends), prepend=-1)
