"""Sequence to sequence: a target for each source, by an encoder–decoder or by a decoder that reads both."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from anyformer.config import ConfigError, Fault
from anyformer.data.batch import IGNORE, Piece
from anyformer.data.loader import Loader, PieceLoader, in_order
from anyformer.data.sources import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.decoding.decode import generate
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Crops, Packed, Seq2Seq
from anyformer.tasks.base import Metrics, total_loss
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
        sources = self.reader.encode_batch(rows.columns["source"])
        targets = self.tokenizer.encode_batch(rows.columns["target"])
        self._refuse_long(rows, sources, targets)
        return [self._piece(s, t, both_sides) for s, t in zip(sources, targets, strict=True)]

    def _piece(self, source: list[int], target: list[int], both_sides: bool) -> Piece:
        if both_sides:
            return Piece([self.bos, *target], [*target, self.eos], [*source, _needed(self.reader, "eos")])
        return Piece([*source, _needed(self.tokenizer, "sep"), *target], [IGNORE] * len(source) + [*target, self.eos])

    def _refuse_long(self, rows: Rows, sources: list[list[int]], targets: list[list[int]]) -> None:
        found = []
        for name, encoded, most in (
            ("source", sources, self.spec.max_source),
            ("target", targets, self.spec.max_target),
        ):
            long = [i for i, ids in enumerate(encoded) if most is not None and len(ids) > most]
            found += [
                Fault(rows.origin(i), f"the {name} has {len(encoded[i])} tokens, more than task.max_{name} = {most}")
                for i in long[:5]
            ]
            if len(long) > 5:
                found.append(Fault("", f"{len(long) - 5} more {name}s are too long"))
        if found:
            raise ConfigError(found)

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert not isinstance(batches, Crops)
        pieces = self.encode(rows, both_sides=model.encoder is not None)
        longest = max(piece.length for piece in pieces)
        most = batches.length if isinstance(batches, Packed) else batches.tokens
        if longest > most:
            at = rows.origin(next(i for i, piece in enumerate(pieces) if piece.length == longest))
            raise ConfigError([Fault(at, f"has {longest} tokens, and a {batches.kind} row holds {most}")])
        return PieceLoader(pieces, batches, seed, _needed(self.tokenizer, "pad"), _needed(self.reader, "pad"))

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        pieces = self.encode(rows, both_sides=model.encoder is not None)
        pads = _needed(self.tokenizer, "pad"), _needed(self.reader, "pad")
        device = next(model.parameters()).device
        total, count = total_loss(model, in_order(pieces, EVALUATION_TOKENS, *pads), device)
        values = {"loss": total / count, "perplexity": math.exp(min(total / count, 700.0))}
        notes: dict[str, Any] = {}
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
        """Greedy answers, computed in batches of similar length and returned in the order asked."""
        encoded = self.reader.encode_batch(list(texts))
        order = sorted(range(len(texts)), key=lambda i: -len(encoded[i]))
        out = [""] * len(texts)
        while order:
            longest = len(encoded[order[0]]) + 1
            rows = max(1, EVALUATION_TOKENS // (2 * longest))
            now, order = order[:rows], order[rows:]
            for i, text in zip(now, self._answer(model, [encoded[i] for i in now]), strict=True):
                out[i] = text
        return out

    def _answer(self, model: Transformer, sources: list[list[int]]) -> list[str]:
        both = model.encoder is not None
        end = _needed(self.reader, "eos") if both else _needed(self.tokenizer, "sep")
        device = next(model.parameters()).device
        width = max(map(len, sources)) + 1
        ids = torch.full((len(sources), width), _needed(self.reader, "pad"))
        segments = torch.full_like(ids, -1)
        for row, source in enumerate(sources):
            ids[row, : len(source) + 1] = torch.tensor([*source, end])
            segments[row, : len(source) + 1] = 0
        most = self.spec.max_target or 2 * width + 10
        out = generate(model, ids.to(device), max_new_tokens=most, stop=[self.eos], segments=segments.to(device))
        said = out[:, 1 if both else width :].tolist()
        return self.tokenizer.decode_batch([row[: row.index(self.eos)] if self.eos in row else row for row in said])


def _needed(tokenizer: TextTokenizer, name: str) -> int:
    id: int | None = getattr(tokenizer, name)
    if id is None:
        raise ConfigError([Fault("tokenizer", f"has no <{name}>, which the task seq2seq needs")])
    return id
