"""Out-of-memory errors with advice: the settings of the recipe to lower."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anyformer.kernels.hardware import is_out_of_memory
from anyformer.recipe import Recipe
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
    spec, batches = job.recipe.train, job.recipe.batches
    size = f"batches.{batches.batched_by} = {batches.size}"
    advice = [f"lower {size} and raise train.accumulate = {spec.accumulate} by the same factor"]
    if not spec.checkpoint_activations:
        advice.append("set train.checkpoint_activations = true")
    if job.precision == "fp32" and job.device.type == "cuda":
        advice.append("set train.precision = 'bf16'")
    saved = newest(job.out)
    after = f"; {saved} stays: train.init_from = '{job.out}' starts from its weights" if saved else ""
    return f"after step {job.state.step}: {', or '.join(advice)}{after}"


def evaluate_advice(recipe: Recipe) -> str:
    if recipe.task.columns == ("text",) and (length := recipe.batches.row_length):
        return f"in evaluation: lower batches.length = {length}, the length of the windows that are read"
    return "in evaluation: free memory elsewhere; no setting of the recipe lowers it"
