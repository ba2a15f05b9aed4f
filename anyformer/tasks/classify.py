"""The task classify: one label, or several, for each text or pair of texts."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import MAX_WORD as MAX_LABEL, did_you_mean, shorten
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import Classify
from anyformer.tasks.base import Progress
from anyformer.tasks.metrics import f1
from anyformer.tasks.sequence_level import SequenceLevelTask, refuse_decoding_options


class Classifying(SequenceLevelTask):
    """Single-label classification by softmax; with a `separator`, multi-label: labels with a logit above 0."""

    spec: Classify
    dense_loss = True

    def __init__(self, spec: Classify, tokenizer: TextTokenizer):
        super().__init__(spec, tokenizer)
        self._numbers = {name: i for i, name in enumerate(spec.labels)}

    def parse_label(self, label: str) -> list[int]:
        """Return the id of the label; with a `separator`, 0 or 1 for each label."""
        names = split(label, self.spec.separator)
        if unknown := [name for name in names if name not in self._numbers]:
            known = did_you_mean(unknown[0], self._numbers)
            raise ValueError(f"the label {shorten(unknown[0], MAX_LABEL)!r} does not occur in training: {known}")
        if self.spec.separator is not None:
            return [int(name in names) for name in self.spec.labels]
        if not names:
            raise ValueError("the label is empty")
        return [self._numbers[names[0]]]

    def format_prediction(self, logits: Tensor) -> str:
        if self.spec.separator is None:
            return self.spec.labels[int(logits.argmax())]
        return self.spec.separator.join(self.spec.labels[i] for i in (logits > 0).nonzero()[:, 0].tolist())

    def predict(
        self,
        model: Transformer,
        texts: Sequence[str],
        *,
        progress: Progress | None = None,
        scores: bool = False,
        **options: Any,
    ) -> list[str]:
        """Return the label of each text; with `scores`, a tab and its probability follow."""
        if not scores:
            return super().predict(model, texts, progress=progress, **options)
        refuse_decoding_options(options)
        out = ["\t"] * len(texts)
        for i, logits in self._outputs(model, texts, progress):
            out[i] = f"{self.format_prediction(logits)}\t{self._format_scores(logits)}"
        return out

    def _format_scores(self, logits: Tensor) -> str:
        """Return the probability of the label; with a `separator`, those of all predicted labels."""
        if self.spec.separator is None:
            return f"{float(logits.softmax(-1).max()):.4f}"
        return self.spec.separator.join(f"{p:.4f}" for p in logits[logits > 0].sigmoid().tolist())

    def format_label(self, label: Tensor) -> str:
        return self.spec.labels[int(label)] if self.spec.separator is None else self.format_prediction(label)

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy; with a `separator`, the binary one of each label [b, labels]."""
        if self.spec.separator is None:
            return F.cross_entropy(
                logits.float(), labels[:, 0], ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
            )
        is_label = labels != IGNORE
        each = F.binary_cross_entropy_with_logits(logits.float(), labels.clamp(min=0).float(), reduction="none")
        return (each * is_label).sum()

    def measure(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the accuracy, by rows with all labels correct, and F1 of the labels that occur or were predicted."""
        if self.spec.separator is None:
            size = len(self.spec.labels)
            predicted, true = F.one_hot(logits.argmax(-1), size).bool(), F.one_hot(labels[:, 0], size).bool()
        else:
            predicted, true = logits > 0, labels.bool()
        scores = {name: f1(predicted[:, i], true[:, i]) for i, name in enumerate(self.spec.labels)}
        defined = [score for score in scores.values() if score is not None]
        values = {
            "accuracy": int((predicted == true).all(-1).sum()) / len(labels),
            "macro_f1": sum(defined) / max(1, len(defined)),
        }
        return values, {"f1": {name: score for name, score in scores.items() if score is not None}}


def split(label: str, separator: str | None) -> list[str]:
    """Return the names of labels in a cell."""
    return [name for part in (label.split(separator) if separator else [label]) if (name := part.strip())]


def label_names(spec: Classify, cells: Sequence[str]) -> tuple[str, ...]:
    """Return the names of labels: those given, or those of the training rows, sorted."""
    if spec.labels:
        return spec.labels
    names = sorted({name for cell in cells for name in split(cell, spec.separator)})
    if len(names) < (2 if spec.separator is None else 1):
        labels = f"all have the label {shorten(names[0], MAX_LABEL)!r}" if names else "none has a label"
        raise ConfigError([Fault("data.train.label", f"has fewer than two labels: of {len(cells)} rows, {labels}")])
    return tuple(names)
