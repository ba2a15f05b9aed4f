"""Regression: a number for each pair of texts, or for each text."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault
from anyformer.conventions import IGNORE
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import LARGEST_TARGET, Regress
from anyformer.tasks.metrics import pearson, spearman
from anyformer.tasks.sequence_level import RowTask

DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Regressing(RowTask):
    """The model says (number - mean) / deviation, whatever the unit; a squared error of 1 is to know nothing.

    Of texts that are read apart it is the cosine of their vectors: `mean` is then the lowest number of the training
    rows, said by texts that have nothing in common, and `deviation` how far the highest is from it.
    """

    def __init__(self, spec: Regress, tokenizer: TextTokenizer):
        super().__init__(tokenizer, spec.pairs, spec.apart)
        self._spec, self.mean, self.deviation = spec, spec.mean or 0.0, spec.deviation or 1.0

    @property
    def spec(self) -> Regress:
        return self._spec

    def asked(self, label: str) -> list[float]:
        return [(number(label) - self.mean) / self.deviation]

    def said(self, logits: Tensor) -> str:
        return self._spelled(float(self._numbers(logits if self.apart else logits[None])))

    def label(self, asked: Tensor) -> str:
        return self._spelled(float(asked))

    def _spelled(self, x: float) -> str:
        return f"{self.mean + self.deviation * x:.6g}"

    def _numbers(self, logits: Tensor) -> Tensor:
        """[n, 1], from that or from the vectors [2n, d] of pairs."""
        if not self.apart:
            return logits
        a, b = logits.unflatten(0, (-1, 2)).unbind(1)
        return torch.cosine_similarity(a, b, dim=-1)[:, None]

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """The squared error."""
        return ((self._numbers(logits.float()) - labels) ** 2 * (labels != IGNORE)).sum()

    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        said, asked = self._numbers(logits)[:, 0].double(), labels[:, 0].double()
        return {"pearson": pearson(said, asked), "spearman": spearman(said, asked)}, {}


def number(label: str) -> float:
    """The decimal number in a cell, or a `ValueError`: ASCII digits, as Python writes a float."""
    text = label.strip()
    if DECIMAL.fullmatch(text) is None:
        raise ValueError(f"the label {text[:40]!r} is no number")
    if abs(found := float(text)) > LARGEST_TARGET:
        raise ValueError(f"the label {text[:40]!r} is beyond ±{LARGEST_TARGET:g}: scale the numbers down")
    return found


def scaled(spec: Regress, cells: Sequence[str]) -> Regress:
    """The task with mean and deviation: those that it was given, or those of the training rows; for texts that are
    read apart, their lowest number and their range."""
    if spec.mean is not None and spec.deviation is not None:
        return spec
    numbers = torch.tensor(list(_numbers(cells)), dtype=torch.float64)
    spread = float(numbers.std(correction=0)) if len(numbers) else 0.0
    if not spread:
        there = "all have the same number" if len(numbers) else "none has a number"
        raise ConfigError([Fault("data.train.label", f"there is nothing to learn: of {len(cells)} rows {there}")])
    center = numbers.min() if spec.apart else numbers.mean()
    spread = float(numbers.max() - numbers.min()) if spec.apart else spread
    mean = float(center) if spec.mean is None else spec.mean
    return spec.model_copy(update={"mean": mean, "deviation": spec.deviation or spread})


def _numbers(cells: Sequence[str]) -> Iterator[float]:
    """Of the cells that hold one; the others are told as bad rows."""
    for cell in cells:
        try:
            yield number(cell)
        except ValueError:
            continue
