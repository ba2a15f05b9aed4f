"""Budgets of answers: how many tokens a model may write."""

from typing import Protocol

from anyformer.config import ModelConfig
from anyformer.decoding.strategy import Contrastive, Strategy
from anyformer.nn.model import Transformer


class HasBudget(Protocol):
    """A task with a usual length of answers."""

    def default_budget(self, read: int, config: ModelConfig) -> int: ...


class PositionLimit(int):
    """A number of tokens after which the model has no further position."""


def answer_budget(task: HasBudget, model: Transformer, read: int, most: int | None, strategy: Strategy) -> int:
    """Return the maximum number of tokens of an answer; a `PositionLimit` if no option makes it larger."""
    config = model.config
    assert config.decoder is not None
    before = 0 if model.encoder is not None else read - 1  # an answer's last token is not read again
    budget = task.default_budget(read, config) if most is None else most
    if most is None and config.context is not None and config.context > before:
        budget = min(budget, config.context - before)
    limit = config.decoder.limit
    reads_last = isinstance(strategy, Contrastive)
    if limit is None or budget <= (left := limit - before - reads_last):
        return budget
    return PositionLimit(left)
