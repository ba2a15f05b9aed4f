"""Running out of memory, told as what to lower."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import assert_never

from anyformer.hardware import is_out_of_memory
from anyformer.recipe import Batches, Crops, DynamicTask, LanguageModel, Ordered, Packed, Padded, Recipe
from anyformer.run import newest
from anyformer.training.loop import Job

TO_BUILD_WITH_LESS = "while the model is made: lower model.width or its depth"


class OutOfMemory(RuntimeError):
    """There is no room for a step; checkpoints stay as they are."""


@contextmanager
def enough(advice: Callable[[], str]) -> Iterator[None]:
    """Around what may run out of memory, on a device or in the machine."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return
    raise OutOfMemory(f"out of memory {advice()}")  # here, where no traceback holds the tensors any more


def to_train_with_less(job: Job) -> str:
    """What to change in a recipe, with its values as they are."""
    spec = job.recipe.train
    ways = [f"lower {_size(job.recipe.batches)} and raise train.accumulate = {spec.accumulate} by as much"]
    if not spec.checkpoint_activations:
        ways.append("set train.checkpoint_activations = true")
    if job.precision == "fp32" and job.device.type == "cuda":
        ways.append("set train.precision = 'bf16'")
    kept = newest(job.out)
    after = f"; {kept} stays: train.init_from = '{job.out}' begins with its weights" if kept else ""
    return f"after step {job.state.step}: {', or '.join(ways)}{after}"


def to_evaluate_with_less(recipe: Recipe) -> str:
    if isinstance(recipe.task, LanguageModel | DynamicTask) and not isinstance(recipe.batches, Padded):
        return f"in evaluation: lower batches.length = {recipe.batches.length}, the window that is read at a time"
    return "in evaluation: free some, no value of the recipe makes it smaller"


def _size(batches: Batches) -> str:
    match batches:
        case Crops(rows=rows) | Ordered(rows=rows):
            return f"batches.rows = {rows}"
        case Padded(tokens=tokens) | Packed(tokens=tokens):
            return f"batches.tokens = {tokens}"
        case _:
            assert_never(batches)
