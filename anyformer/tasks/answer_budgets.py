"""Limits of answers: how many tokens a model may write, and the checks of budgets and stop strings."""

from collections.abc import Sequence

from anyformer.config import ConfigError, Fault
from anyformer.generation.check import integer_faults
from anyformer.generation.strategy import Beam, Strategy
from anyformer.nn.model import Transformer
from anyformer.tasks.base import Writer
from anyformer.tasks.output_constraints import OutputConstraints

MAX_FAULTS = 10  # prompts that an error names


class PositionLimit(int):
    """A number of tokens after which the model has no further position."""


class TrainedLimit(int):
    """A number of tokens after which the text is longer than those of the training."""


def check_context(lengths: Sequence[int], model: Transformer, context: int | None) -> None:
    """Raise a `ConfigError` that names the prompts which are longer than the texts of the training, or `context`."""
    limit = model.config.trained_length if context is None else context
    if model.encoder is not None or limit is None:
        return
    what = f"tokens, and the model was trained for {limit:,}: shorten it, or set a larger `context`"
    faults = [Fault(f"text {i}", f"has {n:,} {what}") for i, n in enumerate(lengths, 1) if n > limit]
    if faults:
        raise ConfigError(faults[:MAX_FAULTS])


def answer_budget(
    task: Writer, model: Transformer, read: int, most: int | None, strategy: Strategy, context: int | None = None
) -> int:
    """Return the maximum number of tokens of an answer after `read` tokens, as a limit if that makes it smaller.

    `context` replaces the length that the model was trained for.
    """
    config = model.config
    assert config.decoder is not None
    before = 0 if model.encoder is not None else read - 1  # an answer's last token is not read again
    before += strategy.reads_last
    budget = task.default_budget(read, config) if most is None else most
    limit, trained = config.decoder.limit, config.trained_length if context is None else context
    if limit is not None and limit - before < budget:
        budget = PositionLimit(limit - before)
    if trained is not None and 0 < trained - before < budget:
        budget = TrainedLimit(trained - before)
    return budget


def budget_faults(most: int | None, context: int | None, strategy: Strategy) -> list[Fault]:
    """Return the faults of `max_new_tokens` and `context`."""
    if context is not None and (wrong := integer_faults("context", context, 1)):
        return wrong
    if most is None or (wrong := integer_faults("max_new_tokens", most, 0)):
        return [] if most is None else wrong
    least = strategy.given.get("min_new_tokens", 0)
    what = f"= {least}: is more than max_new_tokens = {most}"
    return [Fault("min_new_tokens", what)] if least > most else []


def stop_faults(stop: Sequence[str], strategy: Strategy, constraints: OutputConstraints) -> list[Fault]:
    """Return the faults of stop strings."""
    faults = []
    if "" in stop:
        faults.append(Fault("stop", "an empty string occurs everywhere: leave it out"))
    if stop and isinstance(strategy, Beam):
        faults.append(Fault("stop", "is not for beam search, whose hypotheses end by ids alone"))
    if stop and constraints.formats:
        faults.append(Fault("stop", f"would cut off what {constraints.formats[0]} requires: leave it out"))
    return faults
