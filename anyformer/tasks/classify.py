"""Classification: a label, or several, for each text or pair of texts."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import MAX_WORD as MAX_LABEL, did_you_mean, shorten
from anyformer.conventions import IGNORE
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import Classify
from anyformer.tasks.metrics import f1
from anyformer.tasks.sequence_level import RowTask


class Classifying(RowTask):
    """One label of several, by a softmax; with a `separator` each by itself: it is there if its logit is above 0."""

    def __init__(self, spec: Classify, tokenizer: TextTokenizer):
        super().__init__(tokenizer, spec.pairs)
        self._spec, self._numbers = spec, {name: i for i, name in enumerate(spec.labels)}

    @property
    def spec(self) -> Classify:
        return self._spec

    def asked(self, label: str) -> list[int]:
        """The label's number; of several labels, 1 for each that is there."""
        names = split(label, self.spec.separator)
        if unknown := [name for name in names if name not in self._numbers]:
            known = did_you_mean(unknown[0], self._numbers)
            raise ValueError(f"the label {shorten(unknown[0], MAX_LABEL)!r} is not known from training: {known}")
        if self.spec.separator is not None:
            return [int(name in names) for name in self.spec.labels]
        if not names:
            raise ValueError("the label is empty")
        return [self._numbers[names[0]]]

    def said(self, logits: Tensor) -> str:
        if self.spec.separator is None:
            return self.spec.labels[int(logits.argmax())]
        return self.spec.separator.join(self.spec.labels[i] for i in (logits > 0).nonzero()[:, 0].tolist())

    def label(self, asked: Tensor) -> str:
        return self.spec.labels[int(asked)] if self.spec.separator is None else self.said(asked)

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy; of labels [b, labels] that are there or not, each one's."""
        if self.spec.separator is None:
            return F.cross_entropy(
                logits.float(), labels[:, 0], ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
            )
        asked = labels != IGNORE
        each = F.binary_cross_entropy_with_logits(logits.float(), labels.clamp(min=0).float(), reduction="none")
        return (each * asked).sum()

    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """The share of rows that are right in all their labels, and F1 of the labels that were asked or said."""
        if self.spec.separator is None:
            size = len(self.spec.labels)
            said, asked = F.one_hot(logits.argmax(-1), size).bool(), F.one_hot(labels[:, 0], size).bool()
        else:
            said, asked = logits > 0, labels.bool()
        scores = {name: f1(said[:, i], asked[:, i]) for i, name in enumerate(self.spec.labels)}
        known = [score for score in scores.values() if score is not None]
        values = {
            "accuracy": int((said == asked).all(-1).sum()) / len(labels),
            "macro_f1": sum(known) / max(1, len(known)),
        }
        return values, {"f1": {name: score for name, score in scores.items() if score is not None}}


def split(label: str, separator: str | None) -> list[str]:
    """The names in a cell."""
    return [name for part in (label.split(separator) if separator else [label]) if (name := part.strip())]


def named(spec: Classify, cells: Sequence[str]) -> Classify:
    """The task with the names of its labels: those that it was given, or those of the training rows, sorted."""
    if spec.labels:
        return spec
    names = sorted({name for cell in cells for name in split(cell, spec.separator)})
    if len(names) < (2 if spec.separator is None else 1):
        there = f"all have the label {shorten(names[0], MAX_LABEL)!r}" if names else "none has a label"
        raise ConfigError([Fault("data.train.label", f"there is nothing to tell apart: of {len(cells)} rows {there}")])
    return spec.model_copy(update={"labels": tuple(names)})
