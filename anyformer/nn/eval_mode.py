"""A model in eval mode without gradients, as a context manager; and a fast traversal of its modules."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off, and restore each module's own training flag afterwards."""
    with without_dropout(model), torch.no_grad():  # not inference_mode: a model may be trained on what it generated
        yield


def run_steps(model: nn.Module, steps: Generator[Any, None, T]) -> T:
    """Run all steps of a generator within `evaluating(model)`, and return its result."""
    with evaluating(model):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: T = end.value
                return found


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and restore each module's own training flag afterwards."""
    training = [module for module in submodules(model) if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def submodules(model: nn.Module) -> list[nn.Module]:
    """Return all modules, a shared one once per use: `nn.Module.modules` takes longer than a decode step."""
    modules = [model]
    for module in modules:
        modules.extend(child for child in module._modules.values() if child is not None)
    return modules
