"""The task seq2seq: a target for each source, by an encoder–decoder or by a decoder that reads both."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.conventions import IGNORE
from anyformer.data.batch import Example
from anyformer.data.loader import ExampleLoader, Loader, longest_first
from anyformer.data.readers import Encode, Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.decoding.strategy import Beam, is_compatible
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Crops, Ordered, Padded, Seq2Seq
from anyformer.tasks.base import (
    MAX_INFERENCE_TOKENS,
    Metrics,
    Progress,
    TokenTask,
    bad_row_notes,
    check_lengths,
    length_fault,
    total_loss,
    with_prefix,
)
from anyformer.tasks.generation import generate
from anyformer.tasks.metrics import bleu, chrf, exact_match, word_error_rate


class SequenceToSequence(TokenTask):
    """Sequence to sequence.

    An encoder–decoder reads `source <eos>` and predicts `target <eos>` after <bos>. The row of a decoder-only model is
    `source <sep> target <eos>`; only the tokens after <sep> have labels.
    """

    continues = False

    def __init__(
        self,
        spec: Seq2Seq,
        tokenizer: TextTokenizer,
        source_tokenizer: TextTokenizer | None = None,
        begin: Sequence[int] = (),
    ):
        """`begin` are ids that every source begins with."""
        self.begin = list(begin)
        self.spec, self.tokenizer, self.source_tokenizer = spec, tokenizer, source_tokenizer
        self.reader = source_tokenizer or tokenizer
        self.eos = _required_id(tokenizer, "eos")
        self.bos = _required_id(tokenizer, "bos") if spec.start is None else spec.start
        self.marked = spec.prefix

    @property
    def encoders(self) -> dict[str, Encode[list[int]]]:
        """The functions that encode the columns of rows."""
        return {"source": self.reader.encode_batch, "target": self.tokenizer.encode_batch}

    def encode(self, rows: Rows, both_sides: bool) -> list[Example]:
        """Return the examples of rows; with `both_sides`, for an encoder–decoder."""
        return [self._example(source, target, both_sides) for source, target in self._ids(rows)]

    def _ids(self, rows: Rows) -> Iterator[tuple[list[int], list[int]]]:
        sources, targets = (rows.encoded(role, encode) for role, encode in self.encoders.items())
        return zip(self._with_begin(sources), targets, strict=True)

    def _sources(self, texts: Sequence[str]) -> list[list[int]]:
        return self._with_begin(self.reader.encode_batch(texts))

    def _with_begin(self, texts: list[list[int]]) -> list[list[int]]:
        """Prepend the tokens `begin` to each non-empty list of ids."""
        return [[*self.begin, *ids] if ids else ids for ids in texts]

    def _example(self, source: list[int], target: list[int], both_sides: bool) -> Example:
        if both_sides:
            labels = self._framed(self.tokenizer, target)
            return Example([self.bos, *labels[:-1]], labels, self._framed(self.reader, source))
        ids = [*source, _required_id(self.tokenizer, "sep"), *target]
        example = Example(ids, [IGNORE] * len(source) + [*target, self.eos])
        return with_prefix(example, len(source) + 1) if self.marked else example

    def _framed(self, tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
        """Return a text of an encoder–decoder with its special tokens, at least <eos>."""
        before, after = tokenizer.around if self.spec.framed else ([], [])
        return [*before, *ids, *(after or [_required_id(tokenizer, "eos")])]

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        if batches is not None:
            rows = rows.with_ids(self.encoders)
        return rows.without({i: why for i, why in enumerate(self.row_faults(rows, config, batches)) if why})

    def row_faults(self, rows: Rows, config: ModelConfig, batches: Batches | None) -> Iterator[str]:
        """Yield for each row why it cannot be read; empty if it can."""
        return (self._row_fault(source, target, config, batches) for source, target in self._ids(rows))

    def _row_fault(self, source: list[int], target: list[int], config: ModelConfig, batches: Batches | None) -> str:
        """Return why an example is too long; empty if it is not."""
        limits = ("source", source, self.spec.max_source), ("target", target, self.spec.max_target)
        for name, ids, limit in limits:
            if limit is not None and len(ids) - (len(self.begin) if name == "source" else 0) > limit:
                return f"the {name} has {len(ids)} tokens, more than task.max_{name} = {limit}"
        example = self._example(source, target, both_sides=config.encoder is not None)
        if example.source is not None and (why := length_fault(len(example.source), config, "encoder")):
            return f"the source {why}"
        if why := length_fault(len(example.ids), config, "decoder"):
            return why if example.source is None else f"the target {why}"
        if batches is None:
            return ""
        row = batches.tokens if isinstance(batches, Padded) else batches.length
        return f"has {example.length} tokens, and a {batches.kind} row holds {row}" if example.length > row else ""

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert not isinstance(batches, (Crops, Ordered))
        examples = self.encode(rows, both_sides=model.encoder is not None)
        return ExampleLoader(
            examples,
            batches,
            seed,
            _required_id(self.tokenizer, "pad"),
            _required_id(self.reader, "pad"),
            media=self.reader.media,
        )

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        examples = self.encode(rows, both_sides=model.encoder is not None)
        pads = _required_id(self.tokenizer, "pad"), _required_id(self.reader, "pad")
        device = next(model.parameters()).device
        total, count = total_loss(
            model, longest_first(examples, MAX_INFERENCE_TOKENS, *pads, self.reader.media), device
        )
        values = {"loss": total / count, "perplexity": math.exp(min(total / count, 700.0))}
        scored, notes = self.score_predictions(model, rows)
        return Metrics("seq2seq", len(rows), values | scored, {**bad_row_notes(rows), **notes})

    def score_predictions(self, model: Transformer, rows: Rows) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the metrics of the model's outputs, and notes about them."""
        values, notes = dict[str, float](), dict[str, Any]()
        if not self.spec.metrics:
            return values, notes
        predictions, targets = self.predict(model, rows.columns["source"]), rows.columns["target"]
        for metric in self.spec.metrics:
            match metric:
                case "exact_match":
                    values[metric] = exact_match(predictions, targets)
                case "bleu":
                    values[metric], notes[metric] = bleu(predictions, targets, self.spec.bleu_tokenize)
                case "chrf":
                    values[metric], notes[metric] = chrf(predictions, targets)
                case "word_error_rate":
                    values[metric] = word_error_rate(predictions, targets)
        return values, notes

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the targets of texts, by beam search with the task's settings unless options choose otherwise.

        Texts are read in batches of similar length; batching never changes an output. A blank text has an empty one:
        in training it is a bad row, so no model has seen one.
        """
        if self.spec.beams > 1 and is_compatible(Beam, options):
            options = {"beams": self.spec.beams, "length_penalty": self.spec.length_penalty} | options
        return generate(self, model, texts, progress=progress, **options)

    # -- generation: see `Writer` -------------------------------------------------------------------------------------

    def prompts(self, texts: Sequence[str], config: ModelConfig) -> list[list[int]]:
        encoded = self._sources(texts)
        if config.encoder is None:
            rows = [[*ids, _required_id(self.tokenizer, "sep")] for ids in encoded]
        else:
            rows = [self._framed(self.reader, ids) for ids in encoded]
        check_lengths(list(map(len, rows)), config, "decoder" if config.encoder is None else "encoder")
        return [row if ids and text.strip() else [] for row, ids, text in zip(rows, encoded, texts, strict=True)]

    def default_budget(self, read: int, config: ModelConfig) -> int:
        return self.spec.max_target or 2 * read + 10

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """Return each answer, with <eos>, after its source."""
        if answers is None:
            raise ConfigError([Fault("answers", "are missing: this task scores an answer to each text")])
        sources, targets = self._sources(texts), self.tokenizer.encode_batch(answers)
        both = config.encoder is not None
        return [self._example(source, target, both) for source, target in zip(sources, targets, strict=True)]


def _required_id(tokenizer: TextTokenizer, name: str) -> int:
    """Return the id of a special token. Raise a `ConfigError` if the tokenizer has none."""
    id: int | None = getattr(tokenizer, name)
    if id is None:
        raise ConfigError([Fault("tokenizer", f"has no <{name}>, which the task seq2seq needs")])
    return id
