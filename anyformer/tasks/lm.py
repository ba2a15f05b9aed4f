"""Language modelling: the next token of a text."""

import math
from collections.abc import Sequence
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.conventions import IGNORE
from anyformer.data.batch import Example
from anyformer.data.loader import CropLoader, ExampleLoader, Loader, OrderedLoader, side_by_side, windows
from anyformer.data.readers import Rows
from anyformer.data.shards import InMemory, Stream
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Crops, LanguageModel, Ordered, Packed, Padded, PrefixLM
from anyformer.tasks.base import Metrics, Progress, left_out, refuse_long, token_loss, total_loss
from anyformer.tasks.generation import NotFinite, generate

NEW_TOKENS = 100  # that a prediction adds
ROWS = 64  # read at once in an evaluation
FOLLOWING = 8  # pieces, at least, in each row that a memory reads: only the first of them goes on from nothing


class LanguageModelling:
    """Documents one after the other, each ended by <eos>; cropped at random, or kept apart by segments. With
    `task.framed` each begins with what the tokenizer's file puts before a text, and so does a prompt."""

    source_tokenizer: TextTokenizer | None = None
    continues = True
    marked = False
    loss = staticmethod(token_loss)
    spec: LanguageModel | PrefixLM

    def __init__(self, spec: LanguageModel | PrefixLM, tokenizer: TextTokenizer):
        self.spec, self.tokenizer = spec, tokenizer
        self.begin = tokenizer.around[0] if spec.framed else []

    def encode(self, rows: Rows, keep: bool = False) -> list[list[int]]:
        end = [] if self.tokenizer.eos is None or len(rows) == 1 else [self.tokenizer.eos]
        if end == self.begin:  # what begins a text ends the one before
            end = []
        return [self.begin + ids + end for ids in rows.encoded("text", self.tokenizer.encode_batch, keep)]

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        """All rows: a document that is too long goes on in another row."""
        if rows.stream is not None:
            rows.stream.check(self.tokenizer)
        return rows

    def stream(self, rows: Rows) -> Stream:
        """All documents, one after the other."""
        return rows.stream if rows.stream is not None else InMemory.of(self.encode(rows))

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        if isinstance(batches, Crops):
            stream = self.stream(rows)
            if len(stream) <= batches.length:
                raise ConfigError([Fault("batches.length", f"= {batches.length}: the text has {len(stream)} tokens")])
            return CropLoader(stream, batches, seed)
        if isinstance(batches, Ordered):
            stream, least = self.stream(rows), batches.rows * batches.length + 1
            if len(stream) < least:
                what = f"with length = {batches.length} it takes {least} tokens, and the text has {len(stream)}"
                raise ConfigError([Fault("batches.rows", f"= {batches.rows}: {what}")])
            return OrderedLoader(stream, batches)
        most = _within(batches.length if isinstance(batches, Packed) else batches.tokens, model.config)
        pieces = [
            Example(ids[at : min(at + most, len(ids) - 1)], ids[at + 1 : at + 1 + most])
            for ids in self.encode(rows)
            for at in range(0, len(ids) - 1, most)  # what no row can hold goes on in another one
        ]
        return ExampleLoader(pieces, batches, seed, pad=self.tokenizer.pad or 0, source_pad=0)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Every token but the first, in windows as long as those of training, side by side.

        A model with memory reads windows one after the other, in fewer and longer rows.
        """
        stream = self.stream(rows)
        length = _within(1024 if isinstance(batches, Padded) else batches.length, model.config)
        device = next(model.parameters()).device
        assert model.decoder is not None
        if model.decoder.segment_memory:
            read = side_by_side(stream, max(1, min(ROWS, len(stream) // (FOLLOWING * length))), length)
        else:
            read = windows(stream, length, ROWS)
        total, count = total_loss(model, read, device)
        if rows.stream is not None:
            size = rows.stream.share("bytes")
        else:
            size = sum(len(text.encode("utf-8")) for text in rows.columns["text"])
        loss = total / count
        values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": total / math.log(2) / size}
        return Metrics("lm", count, values, {"window": length, **_memory(model), **left_out(rows)})

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """The texts, each going on up to <eos>, 100 tokens more or the last position; an empty one begins at <bos>."""
        try:
            said = generate(self, model, texts, progress=progress, **options)
        except NotFinite as error:
            raise error.but(lambda i, more: self._whole(texts[i], more)) from None
        return list(map(self._whole, texts, said))

    def _whole(self, text: str, more: str) -> str:
        return self.tokenizer.decode(self.tokenizer.encode(text)) + more

    # -- a writer -----------------------------------------------------------------------------------------------------

    def prompts(self, texts: Sequence[str], config: ModelConfig) -> list[list[int]]:
        prompts = [self.begin + ids for ids in self.tokenizer.encode_batch(texts)]
        if self.tokenizer.bos is None and (empty := [i for i, ids in enumerate(prompts, 1) if not ids]):
            raise ConfigError(
                Fault(f"text {i}", "is empty, and the tokenizer has no <bos> to begin with") for i in empty
            )
        refuse_long([len(ids) for ids in prompts], config, "decoder")
        return [ids or [self.tokenizer.bos or 0] for ids in prompts]

    def room(self, read: int, config: ModelConfig) -> int:
        return NEW_TOKENS

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """Each text after its first token; or an answer, which goes on from a text, or from <bos> if that is empty."""
        if answers is None:
            first, rest = [self.begin] * len(texts), self.tokenizer.encode_batch(texts)
        else:
            begin = [] if self.tokenizer.bos is None else [self.tokenizer.bos]
            first = [self.begin + ids or begin for ids in self.tokenizer.encode_batch(texts)]
            rest = self.tokenizer.encode_batch(answers)
        pieces = []
        for number, (before, ids) in enumerate(zip(first, rest, strict=True), 1):
            if not ids or len(before) + len(ids) < 2:
                what = "is too short: only tokens that follow another can be scored"
                raise ConfigError([Fault(f"{'text' if answers is None else 'answer'} {number}", what)])
            whole = [*before, *ids]
            pieces.append(Example(whole[:-1], [IGNORE] * (len(before) - 1) + whole[max(len(before), 1) :]))
        return pieces


def _memory(model: Transformer) -> dict[str, int]:
    return {"memory": model.decoder.segment_memory} if model.decoder and model.decoder.segment_memory else {}


def _within(length: int, config: ModelConfig) -> int:
    """The length, or as much of it as there are positions."""
    assert config.decoder is not None
    limit = config.decoder.limit
    return length if limit is None else min(length, limit)
