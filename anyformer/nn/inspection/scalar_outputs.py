"""Scalar functions of a model's output, for ablation and attribution."""

from collections.abc import Callable

from torch import Tensor

from anyformer.kernels.conventions import IGNORE

Measure = Callable[[Tensor], Tensor]


def logit(token: int, at: int = -1) -> Measure:
    """Return a function that sums over the batch the logit of a token (or of a label) at position `at`."""
    return lambda output: output[:, at, token].sum() if output.dim() == 3 else output[:, token].sum()


def log_probability(labels: Tensor) -> Measure:
    """Return a function that sums log-probabilities of labels [b, t], or [b] for outputs [b, labels]; -100: ignored."""

    def measure(output: Tensor) -> Tensor:
        has_label = labels != IGNORE
        log_p = output.log_softmax(dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return log_p.masked_fill(~has_label, 0.0).sum()

    return measure


def loss(labels: Tensor) -> Measure:
    """Return a function that computes the mean cross-entropy of labels [b, t]; -100 is ignored."""
    count = (labels != IGNORE).sum().clamp(min=1)
    total = log_probability(labels)
    return lambda output: -total(output) / count
