"""The tasks lm and prefix_lm: predict the next token, of a whole text or after a random position (Liu et al. 2018)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import Example, ExampleTable, Ragged
from anyformer.data.counter_rng import CounterRNG, below
from anyformer.data.loader import ExampleLoader, Loader, parallel_parts, windows
from anyformer.data.readers import Rows
from anyformer.data.shards import InMemory, Stream
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.conventions import IGNORE, PLAIN, SEEN
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, ExampleBatches, LanguageModel, PrefixLM, TextBatches
from anyformer.tasks.base import (
    Metrics,
    Progress,
    TokenTask,
    Writer,
    bad_row_notes,
    check_lengths,
    loss_values,
    total_loss,
    with_prefix,
)
from anyformer.tasks.dynamic_examples import DynamicExampleTask

NEW_TOKENS = 100  # of a prediction, by default
EVAL_ROWS = 64  # of a batch in evaluation
MIN_SEGMENTS = 8  # of each row in evaluation with memory: only the first of them has an empty memory


class LanguageModelling(Writer, TokenTask):
    """Language modelling.

    Documents are concatenated, each followed by <eos>, and cropped at random; or packed, separated by segments. With
    `task.framed`, documents and prompts begin with the tokens that the tokenizer's file puts before a text.
    """

    continues = True
    spec: LanguageModel | PrefixLM

    def __init__(self, spec: LanguageModel | PrefixLM, tokenizer: TextTokenizer):
        self.spec, self.tokenizer = spec, tokenizer
        self.begin = tokenizer.around[0] if spec.framed else []

    def encode(self, rows: Rows) -> list[list[int]]:
        """Return the ids of documents with their first and last tokens."""
        end = [] if self.tokenizer.eos is None or len(rows) == 1 else [self.tokenizer.eos]
        if end == self.begin:  # one token separates documents: it begins the next and ends the previous
            end = []
        return [self.begin + ids + end for ids in rows.encoded("text", self.tokenizer.encode_batch)]

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        """Return all rows: a document that is too long continues in another row."""
        if rows.stream is not None:
            rows.stream.check(self.tokenizer)
        return rows

    def stream(self, rows: Rows) -> Stream:
        """Return all documents, concatenated."""
        return rows.stream if rows.stream is not None else InMemory.of(self.encode(rows))

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        if isinstance(batches, TextBatches):
            stream = self.stream(rows)
            if fault := batches.text_fault(len(stream)):
                raise ConfigError([fault])
            return batches.loader(stream, seed)
        assert isinstance(batches, ExampleBatches)
        limit = _limit(batches.row_limit, model.config)
        examples = [
            Example(ids[at : min(at + limit, len(ids) - 1)], ids[at + 1 : at + 1 + limit])
            for ids in self.encode(rows)
            for at in range(0, len(ids) - 1, limit)  # a long document continues in another example
        ]
        return ExampleLoader(
            examples, batches, seed, pad=self.tokenizer.pad or 0, source_pad=0, media=self.tokenizer.media
        )

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure the loss of every token but the first, in separate windows as long as those of training.

        A model with memory reads consecutive windows, in fewer and longer rows.
        """
        stream = self.stream(rows)
        length = _limit(batches.row_length or 1024, model.config)
        device = next(model.parameters()).device
        assert model.decoder is not None
        if model.decoder.segment_memory:
            rows_read = max(1, min(EVAL_ROWS, len(stream) // (MIN_SEGMENTS * length)))
            evaluation = parallel_parts(stream, rows_read, length)
        else:
            evaluation = windows(stream, length, EVAL_ROWS)
        total, count = total_loss(model, evaluation, device)
        if rows.stream is not None:
            size = rows.stream.share("bytes")
        else:
            size = sum(len(text.encode("utf-8")) for text in rows.columns["text"])
        values = {**loss_values(total, count), "bits_per_byte": total / math.log(2) / size}
        return Metrics("lm", count, values, {"window": length, **_memory(model), **bad_row_notes(rows)})

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the texts with their continuations, up to <eos>, 100 new tokens or the last position.

        An empty text begins at <bos>.
        """
        from anyformer.tasks.generation import NotFinite, generate

        try:
            continuations = generate(self, model, texts, progress=progress, **options)
        except NotFinite as error:
            raise error.map_answers(lambda i, more: self._whole(texts[i], more)) from None
        return list(map(self._whole, texts, continuations))

    def _whole(self, text: str, more: str) -> str:
        """Return a text, as its tokens read, with its continuation."""
        return self.tokenizer.decode(self.tokenizer.encode(text)) + more

    # -- a writer -----------------------------------------------------------------------------------------------------

    def prompts(self, texts: Sequence[str], config: ModelConfig) -> list[list[int]]:
        prompts = [self.begin + ids for ids in self.tokenizer.encode_batch(texts)]
        if self.tokenizer.bos is None and (empty := [i for i, ids in enumerate(prompts, 1) if not ids]):
            raise ConfigError(
                Fault(f"text {i}", "is empty, and the tokenizer has no <bos> to start from") for i in empty
            )
        check_lengths([len(ids) for ids in prompts], config, "decoder")
        return [ids or [self.tokenizer.bos or 0] for ids in prompts]

    def default_budget(self, read: int, config: ModelConfig) -> int:
        return NEW_TOKENS

    def read(self, text: str, config: ModelConfig, target: str | None = None) -> Example:
        first, rest = self.tokenizer.encode_batch([text, target or ""])
        before = [*self.begin, *first]
        if not before and not text and self.tokenizer.bos is not None:
            before = [self.tokenizer.bos]  # as in generation
        whole = before + rest
        return with_prefix(Example(whole, whole), len(before)) if self.marked else Example(whole, whole)

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """Return each text after its first token; or each answer, which continues a text, or <bos> if that is empty."""
        if answers is None:
            first, rest = [self.begin] * len(texts), self.tokenizer.encode_batch(texts)
        else:
            begin = [] if self.tokenizer.bos is None else [self.tokenizer.bos]
            first = [self.begin + ids or begin for ids in self.tokenizer.encode_batch(texts)]
            rest = self.tokenizer.encode_batch(answers)
        examples = []
        for number, (before, ids) in enumerate(zip(first, rest, strict=True), 1):
            if not ids or len(before) + len(ids) < 2:
                what = "is too short: only a token after another one can be scored"
                raise ConfigError([Fault(f"{'text' if answers is None else 'answer'} {number}", what)])
            whole = [*before, *ids]
            examples.append(Example(whole[:-1], [IGNORE] * (len(before) - 1) + whole[max(len(before), 1) :]))
        return examples


def _memory(model: Transformer) -> dict[str, int]:
    """Return a note about the length of the memory, if the model has one."""
    return {"memory": model.decoder.segment_memory} if model.decoder and model.decoder.segment_memory else {}


def _limit(length: int, config: ModelConfig) -> int:
    """Return the length, at most the number of positions of the decoder."""
    assert config.decoder is not None
    limit = config.decoder.limit
    return length if limit is None else min(length, limit)


class PrefixModelling(DynamicExampleTask, LanguageModelling):
    """Prefix language modelling: only tokens after a random position have labels.

    The tokens before it attend in both directions, as those of a prompt do.
    """

    marked = True
    min_tokens = 2
    spec: PrefixLM
    encode = LanguageModelling.encode

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
