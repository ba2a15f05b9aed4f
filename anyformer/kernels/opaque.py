"""Functions that torch.compile calls as one op."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def opaque(name: str, like: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function one op for the compiler; `like` returns empty tensors of the same shapes.

    Elsewhere the function itself is called. The first call of a custom op outside of the compiler would import the
    whole compiler, which takes seconds, and each call tens of microseconds.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        op: Any = torch.library.custom_op(f"anyformer::{name}", function, mutates_args=())
        op.register_fake(like)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            found: R = (op if torch.compiler.is_compiling() else function)(*args, **kwargs)
            return found

        return call

    return decorate
