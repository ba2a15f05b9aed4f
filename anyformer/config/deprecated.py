"""Stable names that end: they keep working for a while, with a warning. Imports no torch."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def warn_deprecated(old: str, new: str, *, ends: str, stacklevel: int = 2) -> None:
    """Warn the caller of a function, or the function that is `stacklevel` calls above, that `old` is replaced by `new`.

    Args:
        old: The stable name, argument or field, as users write it.
        new: What to write instead.
        ends: The version that removes `old`.
        stacklevel: 1 for the function that calls this one, 2 for its caller.
    """
    what = f"{old} ends in anyformer {ends}: use {new}"
    warnings.warn(what, DeprecationWarning, stacklevel=stacklevel + 1)


def renamed(module: str, names: Mapping[str, Any], *, ends: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` under which the old `names` of classes and functions keep working.

    Args:
        module: The name of the module.
        names: The classes and functions, by their old names.
        ends: The version that removes the old names.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'", name=name)
        warn_deprecated(f"{module}.{name}", f"{module}.{names[name].__name__}", ends=ends)
        return names[name]

    return __getattr__
