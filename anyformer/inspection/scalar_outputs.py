"""One number of a model's output, of which one asks what it depends on."""

from collections.abc import Callable

from torch import Tensor

from anyformer.conventions import IGNORE

Measure = Callable[[Tensor], Tensor]


def logit(token: int, at: int = -1) -> Measure:
    """The logit of a token, or of a label, `at` a position; summed over the batch."""
    return lambda output: output[:, at, token].sum() if output.dim() == 3 else output[:, token].sum()


def log_probability(labels: Tensor) -> Measure:
    """The summed log-probability of labels [b, t], or [b] where an output is [b, labels]; -100 asks for nothing."""

    def measure(output: Tensor) -> Tensor:
        asked = labels != IGNORE
        found = output.log_softmax(dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return found.masked_fill(~asked, 0.0).sum()

    return measure


def loss(labels: Tensor) -> Measure:
    """The mean cross-entropy of labels [b, t]; -100 asks for nothing."""
    count = (labels != IGNORE).sum().clamp(min=1)
    total = log_probability(labels)
    return lambda output: -total(output) / count
