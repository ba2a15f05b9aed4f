"""Checks of the options of generation: budgets and stop strings."""

from collections.abc import Sequence

from anyformer.config import Fault
from anyformer.generation.check import integer_faults
from anyformer.generation.strategy import Beam, Strategy
from anyformer.tasks.output_constraints import OutputConstraints


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
