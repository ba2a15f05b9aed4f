"""The task seq2seq: a target for each source, by an encoder–decoder or by a decoder that reads both."""

from collections.abc import Iterator, Sequence
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import Example
from anyformer.data.loader import ExampleLoader, Loader, longest_first
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.generation.strategy import Beam, is_compatible
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, ExampleBatches, Seq2Seq
from anyformer.tasks.base import (
    MAX_INFERENCE_TOKENS,
    Metrics,
    Progress,
    TokenTask,
    Writer,
    bad_row_notes,
    check_lengths,
    example_fault,
    loss_values,
    total_loss,
    with_prefix,
)
from anyformer.tasks.metrics import bleu, chrf, exact_match, word_error_rate


class SequenceToSequence(Writer, TokenTask):
    """Sequence to sequence.

    An encoder–decoder reads `source <eos>` and predicts `target <eos>` after <bos>. The row of a decoder-only model is
    `source <sep> target <eos>`; only the tokens after <sep> have labels.
    """

    spec: Seq2Seq
    prompts_from: tuple[str, ...] = ("source",)  # columns, of which rows have one
    answers: tuple[str, ...] = ("target",)  # columns of answers to it

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

    def encode(self, rows: Rows, both_sides: bool, role: str = "target") -> list[Example]:
        """Return the examples of rows, with an answer from one column; with `both_sides`, for an encoder–decoder."""
        return [self._example(source, target, both_sides) for source, target in self._ids(rows, role)]

    def _ids(self, rows: Rows, role: str) -> Iterator[tuple[list[int], list[int]]]:
        sources = rows.encoded("source", self.reader.encode_batch)
        return zip(self._with_begin(sources), self.encoded_answers(rows, role), strict=True)

    def encoded_answers(self, rows: Rows, role: str) -> list[Any]:
        """Return the answers in a column as ids."""
        return rows.encoded(role, self.tokenizer.encode_batch)

    def with_ids(self, rows: Rows) -> Rows:
        """Return the rows with all ids."""
        answers = dict.fromkeys(self.answers, self.tokenizer.encode_batch)
        return rows.with_ids({"source": self.reader.encode_batch, **answers})

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
        if not rows.columns.keys() & {*self.prompts_from}:
            what = f"has conversations: the task {self.spec.kind} reads them with the tokenizer of a chat model alone"
            raise ConfigError([Fault(rows.file, f"{what}: set train.init_from to one, or name texts, `source`")])
        if batches is not None:
            rows = self.with_ids(rows)
        return rows.without({i: why for i, why in enumerate(self.row_faults(rows, config, batches)) if why})

    def row_faults(
        self, rows: Rows, config: ModelConfig, batches: Batches | None, role: str = "target"
    ) -> Iterator[str]:
        """Yield for each row why it cannot be read, with an answer from one column; empty if it can."""
        both_sides = config.encoder is not None
        for source, target in self._ids(rows, role):
            example = self._example(source, target, both_sides)
            limits = self.limit_fault(len(source) - len(self.begin), len(target))
            yield limits or example_fault(example, config, batches)

    def limit_fault(self, source: int, target: int) -> str:
        """Return which limit of the task an example exceeds, by its numbers of tokens; empty if it exceeds none."""
        for name, count, limit in (("source", source, self.spec.max_source), ("target", target, self.spec.max_target)):
            if limit is not None and count > limit:
                return f"the {name} has {count} tokens, more than task.max_{name} = {limit}"
        return ""

    @property
    def pads(self) -> tuple[int, int]:
        """The padding of targets and of sources."""
        return _required_id(self.tokenizer, "pad"), _required_id(self.reader, "pad")

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, ExampleBatches)
        examples = self.encode(rows, both_sides=model.encoder is not None)
        return ExampleLoader(examples, batches, seed, *self.pads, media=self.reader.media)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        examples = self.encode(rows, both_sides=model.encoder is not None)
        device = next(model.parameters()).device
        total, count = total_loss(
            model, longest_first(examples, MAX_INFERENCE_TOKENS, *self.pads, self.reader.media), device
        )
        scored, notes = self.score_predictions(model, rows)
        return Metrics("seq2seq", len(rows), loss_values(total, count) | scored, {**bad_row_notes(rows), **notes})

    def score_predictions(self, model: Transformer, rows: Rows) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the metrics of the model's outputs, and notes about them."""
        values, notes = dict[str, float](), dict[str, Any]()
        if not self.spec.metrics:
            return values, notes
        predictions, targets = self.predict_rows(model, rows), rows.columns["target"]
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

    def predict_rows(self, model: Transformer, rows: Rows) -> list[str]:
        """Return the model's answers to the sources of rows."""
        return self.predict(model, rows.columns["source"])

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the targets of texts, by beam search with the task's settings unless options choose otherwise.

        Texts are read in batches of similar length; batching never changes an output. A blank text has an empty one:
        in training it is a bad row, so no model has seen one.
        """
        from anyformer.tasks.generation import generate

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
