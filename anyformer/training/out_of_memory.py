"""Out-of-memory errors with advice: the settings of the recipe to lower."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import assert_never

from anyformer.kernels.hardware import is_out_of_memory
from anyformer.recipe import Batches, Crops, Ordered, Packed, Padded, Recipe
from anyformer.runs.run import newest
from anyformer.training.job import Job

BUILD_ADVICE = "while the model is built: lower model.width or its depth"


class OutOfMemory(RuntimeError):
    """There is not enough memory; checkpoints are unchanged."""


@contextmanager
def advise_out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Raise `OutOfMemory` with advice where the block runs out of memory, on a device or on the CPU."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return
    raise OutOfMemory(f"out of memory {advice()}")  # after the block above: no traceback keeps its tensors alive


def train_advice(job: Job) -> str:
    """Return the settings to change, with their present values."""
    spec = job.recipe.train
    advice = [f"lower {_size(job.recipe.batches)} and raise train.accumulate = {spec.accumulate} by the same factor"]
    if not spec.checkpoint_activations:
        advice.append("set train.checkpoint_activations = true")
    if job.precision == "fp32" and job.device.type == "cuda":
        advice.append("set train.precision = 'bf16'")
    saved = newest(job.out)
    after = f"; {saved} stays: train.init_from = '{job.out}' starts from its weights" if saved else ""
    return f"after step {job.state.step}: {', or '.join(advice)}{after}"


def evaluate_advice(recipe: Recipe) -> str:
    if recipe.task.columns == ("text",) and not isinstance(recipe.batches, Padded):
        return f"in evaluation: lower batches.length = {recipe.batches.length}, the length of the windows that are read"
    return "in evaluation: free memory elsewhere; no setting of the recipe lowers it"


def _size(batches: Batches) -> str:
    match batches:
        case Crops(rows=rows) | Ordered(rows=rows):
            return f"batches.rows = {rows}"
        case Padded(tokens=tokens) | Packed(tokens=tokens):
            return f"batches.tokens = {tokens}"
        case _:
            assert_never(batches)
