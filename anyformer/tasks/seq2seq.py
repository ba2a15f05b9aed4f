"""Sequence to sequence: a target for each source, by an encoder–decoder or by a decoder that reads both."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.conventions import IGNORE
from anyformer.data.batch import Example
from anyformer.data.loader import ExampleLoader, Loader, in_order
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.decoding.beam_search import Beam
from anyformer.decoding.strategy import may_be
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Crops, Ordered, Padded, Seq2Seq
from anyformer.tasks.base import (
    SLOTS,
    Metrics,
    Progress,
    left_out,
    prefixed,
    refuse_long,
    token_loss,
    too_long,
    total_loss,
)
from anyformer.tasks.generation import generate
from anyformer.tasks.metrics import bleu, chrf, exact_match


class SequenceToSequence:
    """In an encoder–decoder `source <eos>` is read and `target <eos>` said after <bos>; in a decoder-only model the row
    is `source <sep> target <eos>`, and only what follows <sep> is asked."""

    continues = False
    loss = staticmethod(token_loss)

    def __init__(
        self,
        spec: Seq2Seq,
        tokenizer: TextTokenizer,
        source_tokenizer: TextTokenizer | None = None,
        begin: Sequence[int] = (),
    ):
        """Every source begins with `begin`."""
        self.begin = list(begin)
        self.spec, self.tokenizer, self.source_tokenizer = spec, tokenizer, source_tokenizer
        self.reader = source_tokenizer or tokenizer
        self.eos = _needed(tokenizer, "eos")
        self.bos = _needed(tokenizer, "bos") if spec.start is None else spec.start
        self.marked = spec.prefix

    def encode(self, rows: Rows, both_sides: bool) -> list[Example]:
        return [self._piece(source, target, both_sides) for source, target in self._ids(rows)]

    def _ids(self, rows: Rows, keep: bool = False) -> Iterator[tuple[list[int], list[int]]]:
        sources = rows.encoded("source", self.reader.encode_batch, keep)
        targets = rows.encoded("target", self.tokenizer.encode_batch, keep)
        return zip(self._begun(sources), targets, strict=True)

    def _sources(self, texts: Sequence[str]) -> list[list[int]]:
        return self._begun(self.reader.encode_batch(texts))

    def _begun(self, texts: list[list[int]]) -> list[list[int]]:
        """Texts that are read; one without tokens stays so."""
        return [[*self.begin, *ids] if ids else ids for ids in texts]

    def _piece(self, source: list[int], target: list[int], both_sides: bool) -> Example:
        if both_sides:
            said = self._framed(self.tokenizer, target)
            return Example([self.bos, *said[:-1]], said, self._framed(self.reader, source))
        read = [*source, _needed(self.tokenizer, "sep"), *target]
        piece = Example(read, [IGNORE] * len(source) + [*target, self.eos])
        return prefixed(piece, len(source) + 1) if self.marked else piece

    def _framed(self, tokenizer: TextTokenizer, ids: list[int]) -> list[int]:
        """A text of an encoder–decoder, with its <eos>."""
        before, after = tokenizer.around if self.spec.framed else ([], [])
        return [*before, *ids, *(after or [_needed(tokenizer, "eos")])]

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        return rows.without({i: why for i, why in enumerate(self.misfits(rows, config, batches)) if why})

    def misfits(self, rows: Rows, config: ModelConfig, batches: Batches | None) -> Iterator[str]:
        """Why each row cannot be read; empty if it can."""
        read = self._ids(rows, keep=batches is not None)
        return (self._misfit(source, target, config, batches) for source, target in read)

    def _misfit(self, source: list[int], target: list[int], config: ModelConfig, batches: Batches | None) -> str:
        """Why an example is too long; empty if it is not."""
        limits = ("source", source, self.spec.max_source), ("target", target, self.spec.max_target)
        for name, ids, most in limits:
            if most is not None and len(ids) - (len(self.begin) if name == "source" else 0) > most:
                return f"the {name} has {len(ids)} tokens, more than task.max_{name} = {most}"
        piece = self._piece(source, target, both_sides=config.encoder is not None)
        if piece.source is not None and (why := too_long(len(piece.source), config, "encoder")):
            return f"the source {why}"
        if why := too_long(len(piece.ids), config, "decoder"):
            return why if piece.source is None else f"the target {why}"
        if batches is None:
            return ""
        room = batches.tokens if isinstance(batches, Padded) else batches.length
        return f"has {piece.length} tokens, and a {batches.kind} row holds {room}" if piece.length > room else ""

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert not isinstance(batches, (Crops, Ordered))
        pieces = self.encode(rows, both_sides=model.encoder is not None)
        return ExampleLoader(pieces, batches, seed, _needed(self.tokenizer, "pad"), _needed(self.reader, "pad"))

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        pieces = self.encode(rows, both_sides=model.encoder is not None)
        pads = _needed(self.tokenizer, "pad"), _needed(self.reader, "pad")
        device = next(model.parameters()).device
        total, count = total_loss(model, in_order(pieces, SLOTS, *pads), device)
        values = {"loss": total / count, "perplexity": math.exp(min(total / count, 700.0))}
        notes: dict[str, Any] = left_out(rows)
        said, asked = self.predict(model, rows.columns["source"]), rows.columns["target"]
        for metric in self.spec.metrics:
            match metric:
                case "exact_match":
                    values[metric] = exact_match(said, asked)
                case "bleu":
                    values[metric], notes[metric] = bleu(said, asked, self.spec.bleu_tokenize)
                case "chrf":
                    values[metric], notes[metric] = chrf(said, asked)
        return Metrics("seq2seq", len(asked), values, notes)

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Answers, computed in batches of similar length and returned in the order asked: as `task.beams` and
        `task.length_penalty` say, where no option chooses another way.

        An answer does not depend on what stands beside its source. A blank is answered by nothing: in training it is a
        bad row, so no model has seen one.
        """
        if self.spec.beams > 1 and may_be(Beam, options):
            options = {"beams": self.spec.beams, "length_penalty": self.spec.length_penalty} | options
        return generate(self, model, texts, progress=progress, **options)

    # -- a writer -----------------------------------------------------------------------------------------------------

    def prompts(self, texts: Sequence[str], config: ModelConfig) -> list[list[int]]:
        encoded = self._sources(texts)
        if config.encoder is None:
            whole = [[*ids, _needed(self.tokenizer, "sep")] for ids in encoded]
        else:
            whole = [self._framed(self.reader, ids) for ids in encoded]
        refuse_long(list(map(len, whole)), config, "decoder" if config.encoder is None else "encoder")
        return [row if ids and text.strip() else [] for row, ids, text in zip(whole, encoded, texts, strict=True)]

    def room(self, read: int, config: ModelConfig) -> int:
        return self.spec.max_target or 2 * read + 10

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """Each answer and its <eos>, after its source."""
        if answers is None:
            raise ConfigError([Fault("answers", "are missing: this task's model scores an answer to each text")])
        sources, targets = self._sources(texts), self.tokenizer.encode_batch(answers)
        both = config.encoder is not None
        return [self._piece(source, target, both) for source, target in zip(sources, targets, strict=True)]


def _needed(tokenizer: TextTokenizer, name: str) -> int:
    id: int | None = getattr(tokenizer, name)
    if id is None:
        raise ConfigError([Fault("tokenizer", f"has no <{name}>, which the task seq2seq needs")])
    return id
