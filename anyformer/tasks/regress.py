"""Regression: a number for each pair of texts, or for each text."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault
from anyformer.data.batch import IGNORE
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import Regress
from anyformer.tasks.metrics import pearson, spearman
from anyformer.tasks.rows import RowTask


class Regressing(RowTask):
    """The model says (number - mean) / deviation, whatever the unit; a squared error of 1 is to know nothing."""

    def __init__(self, spec: Regress, tokenizer: TextTokenizer):
        super().__init__(spec, tokenizer)
        self._spec, self.mean, self.deviation = spec, spec.mean or 0.0, spec.deviation or 1.0

    @property
    def spec(self) -> Regress:
        return self._spec

    def asked(self, label: str) -> list[float]:
        return [(number(label) - self.mean) / self.deviation]

    def said(self, logits: Tensor) -> str:
        return f"{self.mean + self.deviation * float(logits[0]):.6g}"

    def label(self, asked: Tensor) -> str:
        return self.said(asked)

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """The squared error."""
        return ((logits.float() - labels) ** 2 * (labels != IGNORE)).sum()

    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        said, asked = logits[:, 0].double(), labels[:, 0].double()
        return {"pearson": pearson(said, asked), "spearman": spearman(said, asked)}, {}


def number(label: str) -> float:
    """What a cell says, or a `ValueError`."""
    try:
        found = float(label)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"the label {label.strip()[:40]!r} is no number")
    return found


def scaled(spec: Regress, cells: Sequence[str]) -> Regress:
    """The task with mean and deviation: those that it was given, or those of the training rows."""
    if spec.mean is not None and spec.deviation is not None:
        return spec
    numbers = torch.tensor(list(_numbers(cells)), dtype=torch.float64)
    spread = float(numbers.std(correction=0)) if len(numbers) else 0.0
    if not spread:
        there = "all have the same number" if len(numbers) else "none has a number"
        raise ConfigError([Fault("data.train.label", f"there is nothing to learn: of {len(cells)} rows {there}")])
    mean = float(numbers.mean()) if spec.mean is None else spec.mean
    return spec.model_copy(update={"mean": mean, "deviation": spec.deviation or spread})


def _numbers(cells: Sequence[str]) -> Iterator[float]:
    """Of the cells that hold one; the others are told as bad rows."""
    for cell in cells:
        try:
            yield number(cell)
        except ValueError:
            continue
