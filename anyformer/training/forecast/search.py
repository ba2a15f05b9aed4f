"""Search for the split of a training step with the most tokens per second that fits into memory. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from anyformer.kernels.gpu_table import GPU
from anyformer.recipe.recipe import context_faults
from anyformer.training.forecast.estimate import OURS, Forecast, TrainingEngine, forecast
from anyformer.training.forecast.split import Split, can_split_layers
from anyformer.training.forecast.workload import Workload

EQUAL_SPEED = 0.97  # of the most tokens per second, from which a simpler split is preferred
MIN_CONTEXT_TOKENS = 256  # of a row on each GPU: below, attention waits for its messages


@dataclass(frozen=True)
class NoSplit:
    """A number of GPUs for which nothing fits, and why."""

    gpus: int
    reason: str


def best_split(work: Workload, gpu: GPU, gpus: int, engine: TrainingEngine = OURS) -> Forecast | NoSplit:
    """Return the forecast of the fastest split that fits into memory."""
    found = list(_forecasts(work, gpu, gpus, engine))
    fitting = [one for one in found if one.fits(gpu)]
    if fitting:
        # the simplest of those whose forecasts differ by less than their error
        fastest = max(one.tokens_per_second for one in fitting)
        close = [one for one in fitting if one.tokens_per_second > EQUAL_SPEED * fastest]
        return min(close, key=lambda one: (_complexity(one.split), -one.tokens_per_second))
    if not found:
        return NoSplit(gpus, f"{work.rows:,} rows of a step cannot be divided among them: give --batch more rows")
    least = min(one.memory for one in found)
    return NoSplit(gpus, f"at least {least / 2**30:.0f} GiB on each GPU")


def _complexity(split: Split) -> tuple[int, bool, bool, int]:
    return split.context * split.tensor, split.recompute, split.sharded, split.accumulate


def _forecasts(work: Workload, gpu: GPU, gpus: int, engine: TrainingEngine) -> Iterator[Forecast]:
    """Yield the forecasts of all splits that fit, and of the smallest micro-batches that do not."""
    for (tensor, context, sharded), recompute in product(_meshes(work, gpu, gpus), (False, True)):
        data = gpus // (tensor * context)
        if data > work.rows:
            continue
        own = -(-work.rows // data)  # of the processes with the most rows
        uneven = work.rows % data > 0
        for rows in [own] if uneven else [n for n in range(1, own + 1) if own % n == 0]:
            split = Split(data, context, tensor, sharded, rows, own // rows, recompute)
            yield (one := forecast(work, gpu, split, engine))
            if not one.fits(gpu):
                break  # and neither do more rows


def _meshes(work: Workload, gpu: GPU, gpus: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the sizes along `tensor` and `context`, and whether weights are sharded."""
    for tensor in (n for n in _powers(min(gpus, gpu.node)) if n == 1 or can_split_layers(work.config, n)):
        for context in _powers(gpus // tensor):
            if gpus % (tensor * context) == 0 and _divides(work, context):
                yield from ((tensor, context, sharded) for sharded in (False, True) if gpus > tensor or not sharded)


def _divides(work: Workload, context: int) -> bool:
    """Return whether all rows can be split into `context` parts, each of two chunks."""
    if context == 1:
        return True
    lengths = (work.length, work.source_length or work.length)
    long = all(n % (2 * context) == 0 and n // context >= MIN_CONTEXT_TOKENS for n in lengths)
    return long and not any(context_faults(work.config))


def _powers(limit: int) -> list[int]:
    """Return the powers of two up to a limit."""
    return [2**i for i in range(limit.bit_length())]
