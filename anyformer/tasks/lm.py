"""Language modelling: the next token of a text."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from anyformer.config import ConfigError, Fault
from anyformer.data.batch import Batch, Piece
from anyformer.data.loader import CropLoader, Loader, PieceLoader
from anyformer.data.sources import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.decoding.decode import generate
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Crops, LanguageModel, Packed, Padded
from anyformer.tasks.base import Metrics, total_loss


class LanguageModelling:
    """Documents one after the other, each ended by <eos>; cropped at random, or kept apart by segments."""

    source_tokenizer: TextTokenizer | None = None

    def __init__(self, spec: LanguageModel, tokenizer: TextTokenizer):
        self.spec, self.tokenizer = spec, tokenizer

    def encode(self, rows: Rows) -> list[list[int]]:
        texts = rows.columns["text"]
        end = [] if self.tokenizer.eos is None or len(texts) == 1 else [self.tokenizer.eos]
        return [ids + end for ids in self.tokenizer.encode_batch(texts)]

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        documents = self.encode(rows)
        if isinstance(batches, Crops):
            stream = _stream(documents)
            if len(stream) <= batches.length:
                raise ConfigError([Fault("batches.length", f"= {batches.length}: the text has {len(stream)} tokens")])
            return CropLoader(stream, batches, seed)
        most = batches.length if isinstance(batches, Packed) else batches.tokens
        pieces = [
            Piece(ids[at : min(at + most, len(ids) - 1)], ids[at + 1 : at + 1 + most])
            for ids in documents
            for at in range(0, len(ids) - 1, most)  # what no row can hold goes on in another one
        ]
        return PieceLoader(pieces, batches, seed, pad=self.tokenizer.pad or 0, source_pad=0)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Every token but the first, in windows as long as those of training, side by side."""
        stream = _stream(self.encode(rows))
        length = 1024 if isinstance(batches, Padded) else batches.length
        device = next(model.parameters()).device
        total, count = total_loss(model, list(_windows(stream, length, rows=64)), device)
        size = sum(len(text.encode("utf-8")) for text in rows.columns["text"])
        loss = total / count
        values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": total / math.log(2) / size}
        return Metrics("lm", count, values, {"window": length})

    def predict(self, model: Transformer, texts: Sequence[str]) -> list[str]:
        device = next(model.parameters()).device
        out = []
        for text in texts:
            prompt = torch.tensor([self.tokenizer.encode(text)], device=device)
            stop = [] if self.tokenizer.eos is None else [self.tokenizer.eos]
            out.append(self.tokenizer.decode(generate(model, prompt, max_new_tokens=100, stop=stop)[0].tolist()))
        return out


def _stream(documents: list[list[int]]) -> np.ndarray:
    return np.concatenate([np.asarray(ids, dtype=np.int32) for ids in documents])


def _windows(stream: np.ndarray, length: int, rows: int) -> list[Batch]:
    """The stream cut into windows; what does not fill one stands in a batch of its own."""
    whole = (len(stream) - 1) // length
    ids = torch.from_numpy(stream.astype(np.int64))
    cut = [(ids[: whole * length].view(whole, length), ids[1 : whole * length + 1].view(whole, length))]
    if (rest := whole * length) < len(stream) - 1:
        cut.append((ids[None, rest:-1], ids[None, rest + 1 :]))
    return [Batch(a, b, None) for x, y in cut for a, b in zip(x.split(rows), y.split(rows), strict=True) if len(a)]
