"""Refuse models that do not fit into memory, before allocating them. Imports no torch."""

from collections.abc import Iterator

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.kernels.hardware import usable_memory
from anyformer.nn.inspection.count import BYTES, count, human
from anyformer.nn.inspection.optimizer_cost import trained_weights
from anyformer.recipe.optimizer import Optimizer


def check_model(
    config: ModelConfig,
    at: str = "",
    *,
    training: Optimizer | None = None,
    bytes_per_value: int = 4,
    limit: int | None = None,
) -> None:
    """Refuse a model whose weights do not fit into memory, with both figures.

    `at` is where the config was read from. `training` adds gradients and the state of this optimiser. `limit` is the
    memory in bytes, by default this machine's.
    """
    table = count(config)
    values = 0 if training is None else table.trained + training.state(trained_weights(config))
    needed = bytes_per_value * (table.parameters + values)
    if faults := list(exceeding(needed, f"{table.parameters:,} parameters", limit)):
        raise ConfigError(fault.under(at) for fault in faults)


def exceeding(needed: int, what: str, limit: int | None = None) -> Iterator[Fault]:
    """Yield a fault if `needed` bytes exceed the memory; nothing if its size is unknown."""
    available = usable_memory() if limit is None else limit
    if available is not None and needed > available:
        figures = f"at least {human(needed, 1024, BYTES)} of memory, and there are {human(available, 1024, BYTES)}"
        yield Fault("", f"{what} need {figures}: choose smaller sizes")
