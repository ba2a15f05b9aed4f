"""Sequence to sequence: a target for each source, by an encoder–decoder or by a decoder that reads both."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import IGNORE, Piece
from anyformer.data.loader import Loader, PieceLoader, in_order
from anyformer.data.sources import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.decoding.decode import generate
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Crops, Ordered, Padded, Seq2Seq
from anyformer.tasks.base import Metrics, left_out, refuse_long, too_long, total_loss
from anyformer.tasks.metrics import bleu, chrf, exact_match

EVALUATION_TOKENS = 8192  # slots of a batch in evaluation


class SequenceToSequence:
    """In an encoder–decoder `source <eos>` is read and `target <eos>` said after <bos>; in a decoder-only model the row
    is `source <sep> target <eos>`, and only what follows <sep> is asked."""

    def __init__(self, spec: Seq2Seq, tokenizer: TextTokenizer, source_tokenizer: TextTokenizer | None = None):
        self.spec, self.tokenizer, self.source_tokenizer = spec, tokenizer, source_tokenizer
        self.reader = source_tokenizer or tokenizer
        self.bos, self.eos = _needed(tokenizer, "bos"), _needed(tokenizer, "eos")

    def encode(self, rows: Rows, both_sides: bool) -> list[Piece]:
        return [self._piece(source, target, both_sides) for source, target in self._ids(rows)]

    def _ids(self, rows: Rows) -> Iterator[tuple[list[int], list[int]]]:
        sources = self.reader.encode_batch(rows.columns["source"])
        return zip(sources, self.tokenizer.encode_batch(rows.columns["target"]), strict=True)

    def _piece(self, source: list[int], target: list[int], both_sides: bool) -> Piece:
        if both_sides:
            return Piece([self.bos, *target], [*target, self.eos], [*source, _needed(self.reader, "eos")])
        return Piece([*source, _needed(self.tokenizer, "sep"), *target], [IGNORE] * len(source) + [*target, self.eos])

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        whys = (self._misfit(source, target, config, batches) for source, target in self._ids(rows))
        return rows.without({i: why for i, why in enumerate(whys) if why})

    def _misfit(self, source: list[int], target: list[int], config: ModelConfig, batches: Batches | None) -> str:
        """Why an example is too long; empty if it is not."""
        limits = ("source", source, self.spec.max_source), ("target", target, self.spec.max_target)
        for name, ids, most in limits:
            if most is not None and len(ids) > most:
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
        return PieceLoader(pieces, batches, seed, _needed(self.tokenizer, "pad"), _needed(self.reader, "pad"))

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        pieces = self.encode(rows, both_sides=model.encoder is not None)
        pads = _needed(self.tokenizer, "pad"), _needed(self.reader, "pad")
        device = next(model.parameters()).device
        total, count = total_loss(model, in_order(pieces, EVALUATION_TOKENS, *pads), device)
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

    def predict(self, model: Transformer, texts: Sequence[str]) -> list[str]:
        """Greedy answers, computed in batches of similar length and returned in the order asked.

        An answer does not depend on what stands beside its source. A blank is answered by nothing: in training it is a
        bad row, so no model has seen one.
        """
        encoded = self.reader.encode_batch(list(texts))
        reads = [len(ids) + 1 for ids in encoded]  # with <eos> or <sep>
        refuse_long(reads, model.config, "decoder" if model.encoder is None else "encoder")
        order = sorted((i for i, ids in enumerate(encoded) if ids and texts[i].strip()), key=lambda i: -reads[i])
        out = [""] * len(texts)
        while order:
            now = order[: max(1, EVALUATION_TOKENS // (2 * reads[order[0]]))]
            rooms = [self._room(model.config, reads[i]) for i in now]
            if max(rooms) > rooms[0]:  # the longest has no room for the longest answer: only those like it
                now = [i for i in now if reads[i] == reads[now[0]]]
            order = order[len(now) :]
            for i, text in zip(now, self._answer(model, [encoded[i] for i in now], rooms[: len(now)]), strict=True):
                out[i] = text
        return out

    def _room(self, config: ModelConfig, read: int) -> int:
        """How many tokens an answer to a source of so many may have: the last one said is not read again."""
        assert config.decoder is not None
        most, limit = self.spec.max_target or 2 * read + 10, config.decoder.limit
        return most if limit is None else min(most, limit if config.encoder else limit - read + 1)

    def _answer(self, model: Transformer, sources: list[list[int]], rooms: list[int]) -> list[str]:
        both = model.encoder is not None
        end = _needed(self.reader, "eos") if both else _needed(self.tokenizer, "sep")
        device = next(model.parameters()).device
        width = max(map(len, sources)) + 1
        ids = torch.full((len(sources), width), _needed(self.reader, "pad"))
        segments = torch.full_like(ids, -1)
        for row, source in enumerate(sources):
            ids[row, : len(source) + 1] = torch.tensor([*source, end])
            segments[row, : len(source) + 1] = 0
        out = generate(model, ids.to(device), max_new_tokens=max(rooms), stop=[self.eos], segments=segments.to(device))
        said = [row[:room] for row, room in zip(out[:, 1 if both else width :].tolist(), rooms, strict=True)]
        return self.tokenizer.decode_batch([row[: row.index(self.eos)] if self.eos in row else row for row in said])


def _needed(tokenizer: TextTokenizer, name: str) -> int:
    id: int | None = getattr(tokenizer, name)
    if id is None:
        raise ConfigError([Fault("tokenizer", f"has no <{name}>, which the task seq2seq needs")])
    return id
