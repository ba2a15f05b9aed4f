"""Time and memory of a training step by length, batch, width, depth and vocabulary, measured and predicted:
`python -m benchmarks.growth [AXIS...]`.

A decoder (GPT-2's block, heads of one width) with AdamW, with one size varied at a time. GPU: bf16, blocks
compiled once per shape, the rest eager; the comparison is about growth, not about the last tenth of speed.
CPU: fp32, one thread, CPU time.

    time      3 × forward FLOPs of `count` at an MFU that is fitted once, at the base
    memory    GPU: peak allocated memory against `training_memory`. CPU: tensors saved for the backward pass against
              `count`. Nothing is fitted

Measurements are stored; predictions are computed when the page is written.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyformer import presets
from anyformer.config import ModelConfig
from anyformer.nn.heads import LossTarget
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.memory import training_memory
from anyformer.nn.model import Transformer
from anyformer.training.objective import Objective
from benchmarks.sheet import DEVICE, RESULTS, Sheet, finish, token_task
from benchmarks.side_by_side import alone, join

KEY = "growth"
GPU = DEVICE == "cuda"
clock = time.perf_counter if GPU else time.process_time


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its batch."""

    length: int
    batch: int
    width: int
    depth: int
    vocab: int

    def config(self, gpu: bool) -> ModelConfig:
        sizes = {"length": self.length, "width": self.width, "depth": self.depth, "vocab": self.vocab}
        return presets.gpt2(**sizes, heads=max(1, self.width // (64 if gpu else 32)), dropout=0.0)

    def flops(self, gpu: bool) -> int:
        """Time and memory of a step."""
        return 3 * count(self.config(gpu), self.length, batch=self.batch).flops

    def memory(self, gpu: bool) -> int:
        """Return the predicted bytes of what is measured on that device."""
        if gpu:
            return training_memory(self.config(gpu), self.length, batch=self.batch).peak
        return count(self.config(gpu), self.length, batch=self.batch, bytes_per_value=4).activation_bytes


BASE = Sizes(1024, 16, 1024, 4, 32768) if GPU else Sizes(128, 8, 128, 2, 2048)
AXES: dict[str, tuple[int, ...]] = (
    {
        "length": (256, 1024, 4096, 16384),
        "batch": (1, 4, 16, 64, 256),
        "width": (256, 512, 1024, 2048, 4096),
        "depth": (1, 2, 4, 8, 16, 32),
        "vocab": (2048, 8192, 32768, 131072),
    }
    if GPU
    else {
        "length": (32, 64, 128, 256, 512, 1024),
        "batch": (1, 2, 4, 8, 16, 32),
        "width": (32, 64, 128, 256, 512),
        "depth": (1, 2, 4, 8, 16),
        "vocab": (512, 2048, 8192, 32768),
    }
)


@dataclass(frozen=True)
class Work:
    """A model on random tokens: its loss, and a step that lowers it."""

    model: Transformer
    loss: Callable[[], Tensor]
    step: Callable[[], object]


def make(sizes: Sizes) -> Work:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Transformer(sizes.config(GPU)).train()
        ids, labels = (torch.randint(sizes.vocab, (sizes.batch, sizes.length)) for _ in range(2))
    assert model.decoder is not None
    for block in model.decoder.blocks if GPU else ():
        block.compile(dynamic=False)
    objective, asked = Objective(model, token_task(), 0.0), LossTarget(labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=GPU)

    def loss() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
            return objective((ids,), asked, None)[0] / labels.numel()

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Work(model, loss, step)


def measure(sizes: Sizes, warm: int, rounds: int) -> tuple[float, int]:
    """The median of a step's seconds, and its memory."""
    work, times = make(sizes), []
    memory = 0 if GPU else kept(work)
    for _ in range(warm):
        work.step()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    with alone():
        for _ in range(rounds):
            finish()
            began = clock()
            work.step()
            finish()
            times.append(clock() - began)
    if GPU:
        memory = torch.cuda.max_memory_allocated()
    del work
    gc.collect()
    return statistics.median(times), memory


def kept(work: Work) -> int:
    """Bytes that autograd keeps for the backward pass, weights left out, each storage once."""
    own, seen = {p.untyped_storage().data_ptr() for p in work.model.parameters()}, dict[int, Tensor]()

    def note(x: Tensor) -> Tensor:
        seen[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        work.loss()
    return sum(x.untyped_storage().nbytes() for at, x in seen.items() if at not in own)


def grow(
    axes: Mapping[str, Sequence[int]], base: Sizes, product: float, warm: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Measured at each size of each axis: all so far, after each. One that cannot run is left out."""
    known = {base: measure(base, warm, rounds)}
    share = base.flops(GPU) / known[base][0] / product
    found: dict[str, list[dict[str, float]]] = {}
    for axis, values in axes.items():
        found[axis] = []
        for value in values:
            sizes = replace(base, **{axis: value})
            try:
                seconds, memory = known.get(sizes) or measure(sizes, warm, rounds)
            except torch.OutOfMemoryError:
                print(f"{axis} {value}: there is no room", flush=True)
                continue
            found[axis].append({"size": value, "seconds": seconds, "bytes": memory})
        yield {"base": asdict(base), "share": share, "axes": found}


def predicted(found: Mapping[str, Any], gpu: bool) -> dict[str, list[dict[str, float]]]:
    """The points of each axis, with what they ought to be."""
    base = Sizes(**found["base"])
    began = next(p["seconds"] for axis, points in found["axes"].items()
                 for p in points if p["size"] == found["base"][axis])  # fmt: skip
    due: dict[str, list[dict[str, float]]] = {}
    for axis, points in found["axes"].items():
        due[axis] = []
        for point in points:
            sizes = replace(base, **{axis: point["size"]})
            seconds = began * sizes.flops(gpu) / base.flops(gpu)
            due[axis].append({**point, "due_seconds": seconds, "due_bytes": sizes.memory(gpu)})
    return due


def told(points: Sequence[Mapping[str, float]]) -> str:
    """Format measured and predicted values."""
    times = (f"{p['size']}: {1e3 * p['seconds']:.1f} {1e3 * p['due_seconds']:.1f} ms" for p in points)
    rooms = (f"{p['bytes'] / 2**20:.0f} {p['due_bytes'] / 2**20:.0f} MiB" for p in points)
    return "; ".join(f"{a}, {b}" for a, b in zip(times, rooms, strict=True))


def product() -> float:
    """Return the FLOP/s of a large matmul in the measured thread."""
    a, b = torch.randn(2, 1024, 1024)
    times = []
    for _ in range(7):
        began = clock()
        a @ b
        times.append(clock() - began)
    return 2 * 1024**3 / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("axes", nargs="*", choices=[[], *AXES])
    parser.add_argument("--out", type=Path, help="the file for the numbers")
    args = parser.parse_args()
    name = torch.cuda.get_device_name().split()[-1].lower() if GPU else "cpu"
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # every shape is one
    join()
    sheet = Sheet(args.out or RESULTS / f"{name}.json")
    torch.set_num_threads(1)
    most = sheet.rows["machine"]["product_flops"] if GPU else product()
    axes = {axis: values for axis, values in AXES.items() if not args.axes or axis in args.axes}
    for found in grow(axes, BASE, most, warm=3 if GPU else 1, rounds=7 if GPU else 3):
        sheet.keep(KEY, found)
        axis, points = list(predicted(found, GPU).items())[-1]
        print(f"{axis}: {told(points)}", flush=True)


if __name__ == "__main__":
    main()
