"""The task regress: a number for each pair of texts, or for each text."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import LARGEST_TARGET, Regress
from anyformer.tasks.metrics import pearson, spearman
from anyformer.tasks.sequence_level import SequenceLevelTask

DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Regressing(SequenceLevelTask):
    """Regression: the model predicts (number - mean) / deviation, so always predicting the mean has a loss of 1.

    With `apart`, the prediction is the cosine of the two texts' vectors. Then `mean` is the minimum of the training
    rows, which unrelated texts have (cosine 0), and `deviation` is their range.
    """

    spec: Regress
    dense_loss = True

    def __init__(self, spec: Regress, tokenizer: TextTokenizer):
        super().__init__(spec, tokenizer)
        self.mean, self.deviation = spec.mean or 0.0, spec.deviation or 1.0

    def parse_label(self, label: str) -> list[float]:
        return [(parse_number(label) - self.mean) / self.deviation]

    def format_prediction(self, logits: Tensor) -> str:
        return self._format(float(self._numbers(logits if self.apart else logits[None])))

    def format_label(self, label: Tensor) -> str:
        return self._format(float(label))

    def _format(self, x: float) -> str:
        return f"{self.mean + self.deviation * x:.6g}"

    def _numbers(self, logits: Tensor) -> Tensor:
        """Return predictions [n, 1]: the logits, or the cosines of the vectors [2n, d] of pairs."""
        if not self.apart:
            return logits
        a, b = logits.unflatten(0, (-1, 2)).unbind(1)
        return torch.cosine_similarity(a, b, dim=-1)[:, None]

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the summed squared error."""
        return ((self._numbers(logits.float()) - labels) ** 2 * (labels != IGNORE)).sum()

    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        predicted, true = self._numbers(logits)[:, 0].double(), labels[:, 0].double()
        return {"pearson": pearson(predicted, true), "spearman": spearman(predicted, true)}, {}


def parse_number(label: str) -> float:
    """Return the decimal number in a cell, as Python writes a float. Raise a `ValueError` if it is not one."""
    text = label.strip()
    if DECIMAL.fullmatch(text) is None:
        raise ValueError(f"the label {text[:40]!r} is not a number")
    if abs(number := float(text)) > LARGEST_TARGET:
        raise ValueError(f"the label {text[:40]!r} is beyond ±{LARGEST_TARGET:g}: scale the numbers down")
    return number


def scale(spec: Regress, cells: Sequence[str]) -> dict[str, float]:
    """Return mean and deviation: those given, or those of the training rows (see `Regress`)."""
    if spec.mean is not None and spec.deviation is not None:
        return {}
    numbers = torch.tensor(list(_numbers(cells)), dtype=torch.float64)
    spread = float(numbers.std(correction=0)) if len(numbers) else 0.0
    if not spread:
        numbers_found = "all have the same number" if len(numbers) else "none has a number"
        raise ConfigError([Fault("data.train.label", f"does not vary: of {len(cells)} rows, {numbers_found}")])
    center = numbers.min() if spec.apart else numbers.mean()
    spread = float(numbers.max() - numbers.min()) if spec.apart else spread
    mean = float(center) if spec.mean is None else spec.mean
    return {"mean": mean, "deviation": spec.deviation or spread}


def _numbers(cells: Sequence[str]) -> Iterator[float]:
    """Yield the numbers of cells; those without one are reported as bad rows."""
    for cell in cells:
        try:
            yield parse_number(cell)
        except ValueError:
            continue
