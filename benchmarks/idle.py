"""The share of a recipe's steps in which the GPU has nothing to do: `python -m benchmarks.idle RECIPE...`."""

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from anyformer.recipe import Recipe
from anyformer.recipe.ready import read_recipe
from anyformer.training.job import Job
from anyformer.training.loop import read_batches
from anyformer.training.prepare import prepare
from anyformer.training.step import PendingScalars, TrainingStep, set_learning_rate
from benchmarks.sheet import clear
from benchmarks.side_by_side import alone

WAIT = 10.0  # microseconds without a kernel from which the GPU waits for the host; between two of a recording it is one


@dataclass(frozen=True)
class Idle:
    """Times of a step in seconds and as fractions of it, compiled programs, and peak memory in bytes."""

    step: float
    busy: float  # some kernel runs
    waits: float  # the share of waits for the host
    tokens: float  # real ones, in a second
    compiled: int
    memory: int

    @property
    def share(self) -> float:
        """Without a kernel; at least the waits of the profiled steps, which may be slower than the timed ones."""
        return max(self.waits, 1 - self.busy / self.step)

    def __str__(self) -> str:
        return (
            f"step {self.step * 1e3:.2f} ms, kernels {self.busy * 1e3:.2f} ms, idle {self.share:.1%} "
            f"(for the host {self.waits:.1%}), {self.tokens:,.0f} real tokens/s, {self.compiled} compiled, "
            f"{self.memory / 1e9:.2f} GB"
        )


class Steps:
    """A recipe's steps as training takes them: the numbers of one are read while the next runs."""

    def __init__(self, recipe: Recipe):
        self.folder = tempfile.TemporaryDirectory()
        self.job: Job = prepare(recipe, Path(self.folder.name) / "run", resume=False, console=Console(quiet=True))
        self.take_step, self.tokens, self.open = TrainingStep(self.job), 0, deque[PendingScalars]()
        set_learning_rate(self.job, recipe.train.optimizer.lr / 10)

    def take(self, count: int) -> None:
        job = self.job
        for _ in range(count):
            batches, job.state.cursor = read_batches(job.reader, job.state, job.recipe.train.accumulate)
            self.tokens += sum(batch.tokens for batch in batches)
            self.open.append(self.take_step(batches)[1])
            while len(self.open) > job.steps_in_flight:
                self.open.popleft().read()

    def each(self) -> Iterator[int]:
        """Run a training step; return its number of real tokens."""
        while True:
            self.tokens = 0
            self.take(1)
            yield self.tokens

    def measure(self, count: int = 300, looked_at: int = 30) -> Idle:
        """Measure many steps; the first one starts on an idle GPU."""
        torch.cuda.synchronize()
        before, self.tokens, began = compiled(), 0, time.perf_counter()
        self.take(count)
        torch.cuda.synchronize()
        took, tokens = time.perf_counter() - began, self.tokens
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.take(looked_at)
            torch.cuda.synchronize()
        busy, waits = union(seen)
        memory, new = torch.cuda.max_memory_allocated(), compiled() - before
        return Idle(took / count, busy / looked_at, waits, tokens / took, new, memory)


def compiled() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def union(seen: profile) -> tuple[float, float]:
    """Seconds in which some kernel ran, and the share of waits in the time from the first to the last."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in seen.events() if e.device_type == DeviceType.CUDA)
    busy = waits = 0.0
    end = spans[0][0]
    for start, stop in spans:
        waits += start - end if start - end > WAIT else 0.0
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e6, waits / (end - spans[0][0])


def idle(name: str, warm: int = 40) -> Idle:
    clear()
    torch.cuda.reset_peak_memory_stats()
    steps = Steps(read_recipe(name))
    steps.take(warm)
    with alone():
        return steps.measure()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="+")
    for name in parser.parse_args().recipes:
        print(f"{name}: {idle(name)}", flush=True)


if __name__ == "__main__":
    main()
