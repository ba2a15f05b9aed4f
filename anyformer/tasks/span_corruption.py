"""The task spans: predict spans that sentinels replace in a text (T5, Raffel et al. 2020)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import Example, ExampleTable, Ragged, insert_at
from anyformer.data.counter_rng import CounterRNG, lowest
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import SpanCorruption
from anyformer.tasks.base import Progress, TokenTask, Writer, check_lengths
from anyformer.tasks.dynamic_examples import DynamicExampleTask
from anyformer.tasks.sequence_level import encode_with, split_at


class SpanCorrupting(Writer, TokenTask, DynamicExampleTask):
    """Span corruption.

    The source is `the <extra_id_0> sat on <extra_id_1> <eos>`. The target, after <bos>, is
    `<extra_id_0> cat <extra_id_1> a mat <extra_id_2> <eos>`: each sentinel with its span, and one more at the end.
    """

    min_tokens = 2
    spec: SpanCorruption

    def __init__(self, spec: SpanCorruption, tokenizer: TextTokenizer):
        self.spec, self.tokenizer, self.sentinels = spec, tokenizer, tokenizer.sentinels
        if len(self.sentinels) < 2:
            what = "has no sentinels <extra_id_0>, <extra_id_1>, ..., which the task spans needs"
            raise ConfigError([Fault("tokenizer", what)])
        begin = tokenizer.bos if spec.start is None else spec.start
        if begin is None or tokenizer.eos is None:
            missing = "bos" if begin is None else "eos"
            raise ConfigError([Fault("tokenizer", f"has no <{missing}>, which the task spans needs")])
        self.begin, self.eos = begin, tokenizer.eos

    def draw(self, texts: Ragged, rng: CounterRNG) -> ExampleTable:
        rate, mean = self.spec.rate, self.spec.mean_span
        source, target = corrupt(texts, rate, mean, np.array(self.sentinels), self.eos, rng)
        return ExampleTable(target.framed([self.begin], []), target.framed([], [self.eos]), source=source)

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the texts with words in place of each sentinel, written by its name; a blank text is unchanged."""
        from anyformer.tasks.generation import NotFinite, generate

        try:
            answers = generate(self, model, texts, progress=progress, **options)
        except NotFinite as error:
            raise error.map_answers(lambda i, answer: self._whole(texts[i], answer)) from None
        return list(map(self._whole, texts, answers))

    def _whole(self, text: str, answer: str) -> str:
        """Return the text with the spans of an answer; a sentinel that the answer lacks is removed."""
        segments = split_at(self.tokenizer, answer, self.sentinels)
        spans = dict(zip(segments[-2:0:-2], segments[:1:-2], strict=True))  # reversed: the first occurrence counts
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
        rows = [[*self._encode(text), self.eos] if text.strip() else [] for text in texts]
        check_lengths(list(map(len, rows)), config, "encoder")
        return rows

    def default_budget(self, read: int, config: ModelConfig) -> int:
        return read + 20

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """Return each answer, with its sentinels and <eos>, after its text."""
        if answers is None:
            raise ConfigError([Fault("answers", "are missing: this task scores an answer to each text")])
        pairs = zip(map(self._encode, texts), map(self._encode, answers), strict=True)
        return [Example([self.begin, *target], [*target, self.eos], [*source, self.eos]) for source, target in pairs]

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text with sentinels."""
        return encode_with(self.tokenizer, text, self.sentinels)


def counts(lengths: np.ndarray, rate: float, mean_span: float, sentinels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of tokens to remove from texts of at least two, and the number of spans.

    At least one token remains, spans are separated by a token, and one sentinel marks the end.
    """
    out = np.minimum(np.maximum(np.rint(lengths * rate).astype(np.int64), 1), lengths - 1)
    most = np.minimum(lengths - out, sentinels - 1)
    return out, np.minimum(np.maximum(np.rint(out / mean_span).astype(np.int64), 1), most)


def corrupt(
    texts: Ragged, rate: float, mean_span: float, sentinels: np.ndarray, end: int, rng: CounterRNG
) -> tuple[Ragged, Ragged]:
    """Return texts with sentinels in place of random spans, then `end`; and the spans, each after its sentinel."""
    out, spans = counts(texts.sizes, rate, mean_span, len(sentinels))
    last = (spans + 1).cumsum() - 1
    removed = insert_at(segments(rng, 0, out, spans), last, np.array(0))  # no span after the last kept part
    kept = segments(rng, 1, texts.sizes - out + 2, spans + 1)
    kept[last - spans] -= 1  # a text may begin or end with a span: the first and last kept parts may be empty
    kept[last] -= 1
    is_removed = np.repeat(np.arange(2 * len(kept)) % 2 == 1, np.stack((kept, removed), axis=1).ravel())
    names = sentinels[np.arange(len(kept)) - np.repeat(last - spans, spans + 1)]
    target = insert_at(texts.values[is_removed], (removed + 1).cumsum() - removed - 1, names)
    names[last] = end
    source = insert_at(texts.values[~is_removed], (kept + 1).cumsum() - 1, names)
    return Ragged(source, texts.sizes - out + spans + 1), Ragged(target, out + spans + 1)


def segments(rng: CounterRNG, use: int, totals: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return random lengths: for each text, `totals` tokens in `parts` non-empty parts, uniform over partitions."""
    inside = lowest(rng.draw(use, totals - 1), totals - 1, parts - 1)
    ends = np.zeros(totals.sum(), dtype=np.bool_)
    ends[inside + np.repeat(np.arange(len(totals)), parts - 1)] = True
    ends[totals.cumsum() - 1] = True  # the last part ends at the end of the text
    return np.diff(np.flatnonzero(ends), prepend=-1)
