"""Checks of single option values, whose faults are raised together."""

from collections.abc import Sequence

from torch import Tensor

from anyformer.config import Fault


def integer_faults(name: str, value: object, least: int) -> list[Fault]:
    """Return the fault of an option that is not an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        return [Fault(name, f"= {value!r}: must be a whole number")]
    if value < least:
        return [Fault(name, f"= {value}: must {f'be at least {least}' if least else 'not be negative'}")]
    return []


def parse_ids(name: str, ids: object, vocab: int | None) -> tuple[tuple[int, ...], list[Fault]]:
    """Return ids as a tuple, and the faults: the first value that is no integer, or every id outside the vocabulary."""
    values = ids.tolist() if isinstance(ids, Tensor) and ids.dim() == 1 else ids
    if not isinstance(values, Sequence) or isinstance(values, str):
        return (), [Fault(name, f"= {ids!r}: must be a list of ids")]
    if wrong := [i for i in values if not isinstance(i, int) or isinstance(i, bool)]:
        return (), [Fault(name, f"= {wrong[0]!r}: must be whole numbers")]
    outside = [i for i in values if i < 0 or (vocab is not None and i >= vocab)]
    return tuple(values), [Fault(name, f"= {i}: no such id; the vocabulary has {vocab}") for i in outside]
