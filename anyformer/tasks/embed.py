"""Sentence embeddings by contrast: the texts of a pair near to each other, those of different pairs apart."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import Embed
from anyformer.tasks.sequence_level import Encoded, RowTask, as_json

AT_ONCE = 1024  # texts that are compared with all others


class Embedding(RowTask):
    """-log softmax_j(cos(a_i, b_j) / temperature)_i, and the same from b to a: each finds its own among the others'.

    Where a text stands in several pairs, its other pairs are no wrong answers: they are left out.
    """

    def __init__(self, spec: Embed, tokenizer: TextTokenizer):
        super().__init__(tokenizer, pairs=True, apart=True)
        self._spec = spec

    @property
    def spec(self) -> Embed:
        return self._spec

    def asked(self, label: str) -> list[int]:
        return []  # no label: a text asks for its pair

    def _labels(self, rows: Rows, read: Sequence[Encoded]) -> list[list[int]]:
        """A number for each text and one for its pair; the same text has the same."""
        numbers: dict[tuple[int, ...], int] = {}
        return [[numbers.setdefault(tuple(ids or ()), len(numbers)) for ids in row] for row in read]

    def said(self, logits: Tensor) -> str:
        return as_json(logits)

    def label(self, asked: Tensor) -> str:
        return "belong together"

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Of vectors [2b, d], as many terms as there are texts."""
        a, b = F.normalize(logits.float(), dim=-1).unflatten(0, (-1, 2)).unbind(1)
        terms = (
            F.cross_entropy(cosines / self.spec.temperature, own, reduction="sum")
            for pair in ((a, b), (b, a))
            for cosines, own in compared(*pair, labels)
        )
        return sum(terms, torch.zeros((), device=logits.device))

    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """How often a text's own pair is the nearest of all, and the mean of 1 / its rank; a tie is a miss."""
        a, b = F.normalize(logits, dim=-1).unflatten(0, (-1, 2)).unbind(1)
        ranks = torch.cat(
            [(~(cosines < cosines.gather(1, own[:, None]))).sum(1) for cosines, own in compared(a, b, labels)]
        )
        return {"accuracy": float((ranks == 1).double().mean()), "mrr": float((1 / ranks.double()).mean())}, {}

    def _columns(self, texts: Sequence[str]) -> dict[str, list[str]]:
        return {"text": [text if text.strip() else "" for text in texts]}  # each by itself, a tab or not


def compared(a: Tensor, b: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The cosines of some of a [n, d] with all of b, -inf where they share a text and are no pair; where pairs are."""
    every = torch.arange(len(a), device=a.device)
    for own in every.split(AT_ONCE):
        alike = (labels[own, None] == labels[None]).any(-1) & (own[:, None] != every)
        yield (a[own] @ b.T).masked_fill(alike, -torch.inf), own
