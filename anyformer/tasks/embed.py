"""The task embed: sentence embeddings by contrastive learning, the texts of a pair close and other pairs apart."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import ConfigError, Fault
from anyformer.data.readers import Rows
from anyformer.nn.model import Transformer
from anyformer.recipe import Embed
from anyformer.tasks.base import Progress
from anyformer.tasks.sequence_level import Encoded, SequenceLevelTask, as_json, refuse_decoding_options

MAX_QUERIES = 1024  # texts that are compared with all others at once


class EmbedTask(SequenceLevelTask):
    """InfoNCE: -log softmax_j(cos(a_i, b_j) / temperature)_i, and the same from b to a.

    Where a text occurs in several pairs, its other pairs are not negatives: they are masked.
    """

    spec: Embed

    def parse_label(self, label: str) -> list[int]:
        return []  # no label: the target is the other text of the pair

    def _labels(self, rows: Rows, read: Sequence[Encoded]) -> list[list[int]]:
        """Return for each row the number of its text and of its pair; equal texts have equal numbers."""
        numbers: dict[tuple[int, ...], int] = {}
        return [[numbers.setdefault(tuple(ids or ()), len(numbers)) for ids in row] for row in read]

    def format_prediction(self, logits: Tensor) -> str:
        return as_json(logits)

    def format_label(self, label: Tensor) -> str:
        return "belong together"

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the summed loss of vectors [2b, d], with one term per text."""
        vectors, temperature = logits.float(), 1.0
        if self.spec.temperature != "learned":  # with a learned one, the model scales its vectors
            vectors, temperature = F.normalize(vectors, dim=-1), self.spec.temperature
        a, b = vectors.unflatten(0, (-1, 2)).unbind(1)
        terms = (
            F.cross_entropy(scores / temperature, own, reduction="sum")
            for pair in ((a, b), (b, a))
            for scores, own in compare(*pair, labels)
        )
        return sum(terms, torch.zeros((), device=logits.device))

    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """Return how often a text's own pair is the nearest, and the mean of 1 / its rank; a tie counts as a miss."""
        a, b = F.normalize(logits, dim=-1).unflatten(0, (-1, 2)).unbind(1)
        ranks = torch.cat(
            [(~(cosines < cosines.gather(1, own[:, None]))).sum(1) for cosines, own in compare(a, b, labels)]
        )
        return {"accuracy": float((ranks == 1).double().mean()), "mrr": float((1 / ranks.double()).mean())}, {}

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the vector of each text as JSON; with `labels`, the label whose vector is nearest to it."""
        labels = options.pop("labels", None)
        if labels is None:
            return super().predict(model, texts, progress=progress, **options)
        if not labels or not all(label.strip() for label in labels):
            raise ConfigError([Fault("labels", f"= {list(labels)}: must be texts, one or more")])
        refuse_decoding_options(options)
        outputs = dict(self._outputs(model, [*labels, *texts], progress))
        known = F.normalize(torch.stack([outputs[i] for i in range(len(labels))]), dim=-1)
        found = (outputs.get(i) for i in range(len(labels), len(labels) + len(texts)))
        return ["" if vector is None else labels[int((known @ vector).argmax())] for vector in found]

    def _columns(self, texts: Sequence[str]) -> dict[str, list[str]]:
        return {"text": [text if text.strip() else "" for text in texts]}  # each text alone; a tab has no meaning


def compare(a: Tensor, b: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a bᵀ for some of a [n, d] and all of b, and the indices of the pairs of these.

    Values of rows that share a text are -inf, except for the pair itself.
    """
    every = torch.arange(len(a), device=a.device)
    for own in every.split(MAX_QUERIES):
        is_duplicate = (labels[own, None] == labels[None]).any(-1) & (own[:, None] != every)
        yield (a[own] @ b.T).masked_fill(is_duplicate, -torch.inf), own
