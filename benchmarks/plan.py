"""Peak memory and time of a training step beside the forecast of `anyformer plan`:
`python -m benchmarks.plan [CASE...] --json FILE`.

Each step is that of the training loop on one GPU: bf16 autocast, model and loss compiled together, gradients clipped,
fused AdamW, all captured as one CUDA graph; only images, whose batches are padded ones, run eagerly. Cases are prepared
side by side and timed one at a time.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from anyformer import presets
from anyformer.config import Classifier, MaskedLM, ModelConfig, Patches, Tokens, io
from anyformer.kernels.conventions import IGNORE
from anyformer.kernels.gpu_table import GPUS, find_gpu
from anyformer.nn.heads import LossTarget
from anyformer.nn.model import Transformer
from anyformer.training.forecast.estimate import forecast
from anyformer.training.forecast.split import Split
from anyformer.training.forecast.workload import Workload
from anyformer.training.machine import compile_options
from anyformer.training.objective import Objective, labelled_positions
from anyformer.training.step_graphs import StepGraphs
from benchmarks.sheet import DEVICE, Sheet, clear, finish, token_task
from benchmarks.side_by_side import alone, join, side_by_side

WARM, ROUNDS, EACH = 4, 9, 3  # steps before the clock, timed rounds, and steps of each
KERNELS_KEPT = 30  # of the longest, in the results
TINY = {"depth": 2, "width": 64, "heads": 2, "kv_heads": None, "ff": None}


class Case(NamedTuple):
    """A config with the sizes of its batch."""

    config: ModelConfig
    batch: int
    length: int

    @property
    def compiled(self) -> bool:
        """True if training compiles and captures the step."""
        return not isinstance(self.config.source, Patches)

    @property
    def workload(self) -> Workload:
        source = self.length if self.config.shape == "encoder-decoder" else None
        return Workload(self.config, self.batch, self.length, source, compiled=self.compiled)

    def forecast(self) -> dict[str, float]:
        """Return the forecast of a step: bytes, and seconds."""
        gpu = (find_gpu(torch.cuda.get_device_name()) if DEVICE == "cuda" else None) or GPUS["h200"]
        one = forecast(self.workload, gpu, Split(rows=self.batch))
        return {"bytes": one.memory, "seconds": one.seconds, "mfu": one.mfu}


def cases(tiny: bool) -> dict[str, Case]:
    """Return the cases by name; `tiny`: of two narrow layers."""

    def case(make: Callable[..., ModelConfig], batch: int, length: int, **sizes: Any) -> Case:
        config = make(**{**sizes, **TINY} if tiny else sizes)
        if isinstance(config.source, Patches):
            return Case(config, 2 if tiny else batch, config.source.length)
        return Case(config, 2, 32) if tiny else Case(config, batch, length)

    def bert(**sizes: Any) -> ModelConfig:
        return io.override(presets.bert(**sizes, head=MaskedLM()), ["encoder.blocks.*.mixer.dropout=0"])

    def vit(**sizes: Any) -> ModelConfig:
        return presets.vit(**sizes, head=Classifier(labels=1000))

    gpt2 = {"vocab": 50_304, "dropout": 0.0}
    medium = {"depth": 24, "width": 1024, "heads": 16}
    billion = {"depth": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ff": 8192, "vocab": 64_000}
    return {
        "gpt2-124m": case(presets.gpt2, 24, 1024, **gpt2),
        "gpt2-350m": case(presets.gpt2, 12, 1024, **gpt2, **medium),
        "bert-base": case(bert, 64, 512, vocab=30_592),
        "transformer-base": case(presets.vaswani, 384, 64, vocab=32_768),
        "llama-360m-8k": case(presets.llama, 1, 8192, **medium),
        "llama-1.2b": case(presets.llama, 4, 2048, **billion),
        "t5-6-layers": case(presets.t5, 48, 512, depth=6, width=768, heads=12),
        "vit-base": case(vit, 128, 197),
    }


class Labels:
    """Task of one label for each row."""

    dense_loss = False

    @staticmethod
    def loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        return F.cross_entropy(logits.float(), labels[:, 0], reduction="sum", label_smoothing=smoothing)


def make_step(case: Case) -> Callable[[], Tensor]:
    """Return a training step that gives its loss."""
    config = case.config
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Transformer(config).train()
    inputs, target = make_batch(case)
    task: Any = token_task() if isinstance(config.last_input, Tokens) else Labels()
    objective = Objective(model, task, 0.0)
    captured = DEVICE == "cuda" and case.compiled
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=captured)
    parameters = list(model.parameters())
    labels = target.labels.numel()
    run: Any = objective
    if captured:
        run = torch.compile(objective, options=compile_options(config, fp8=False))

    def step() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss: Tensor = run(inputs, target, None)[0] / labels
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if not captured:
        return step
    graphs = StepGraphs(torch.device(DEVICE))
    return lambda: graphs.run(lambda _: step(), ())


def make_batch(case: Case) -> tuple[tuple[Tensor, ...], LossTarget]:
    """Return random inputs and labels."""
    config = case.config
    if isinstance(config.source, Patches):
        images = torch.rand(case.batch, *config.source.shape, device=DEVICE)
        return (images,), LossTarget(torch.randint(10, (case.batch, 1), device=DEVICE))
    ids = torch.randint(4, config.last_input.vocab, (case.batch, case.length))
    labels = ids.roll(1, dims=1)
    if isinstance(config.head, MaskedLM):
        labels = torch.where(torch.rand(ids.shape) < config.head.labelled, labels, IGNORE)
    inputs = (ids.to(DEVICE),) * len(config.stacks)
    positions, some = labelled_positions(labels, labels.numel()) or (None, labels)
    return inputs, LossTarget(some.to(DEVICE), 0.0, None if positions is None else positions.to(DEVICE))


def measure(case: Case) -> dict[str, Any]:
    """Return the median seconds of a step, its peak memory, and its longest kernels in seconds."""
    began = time.perf_counter()
    step = make_step(case)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
        step()
    finish()
    start, times = time.perf_counter() - began, list[float]()
    with alone():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(EACH):
                step()
            finish()
            times.append((time.perf_counter() - began) / EACH)
        kernels = profiled(step)
    found = {"seconds": statistics.median(times), "low": min(times), "high": max(times), "start": start}
    if DEVICE == "cuda":
        found |= {"bytes": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {**found, **kernels}


def profiled(step: Callable[[], Tensor]) -> dict[str, Any]:
    """Return the number of kernels of a step, their sum, and the longest by name."""
    if DEVICE != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        finish()
    sums: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            sums.setdefault(event.name[:120], []).append((event.time_range.end - event.time_range.start) / 1e6)
    longest = sorted(sums, key=lambda name: -sum(sums[name]))[:KERNELS_KEPT]
    return {
        "kernel_count": sum(map(len, sums.values())),
        "kernel_seconds": sum(map(sum, sums.values())),
        "kernels": {name: [len(sums[name]), sum(sums[name])] for name in longest},
    }


def line(name: str, row: dict[str, Any]) -> str:
    """Return the forecast beside the measurement."""
    expected, found = row["forecast"], row["measured"]
    text = f"{name:<18} step {expected['seconds'] * 1e3:7.1f} ms forecast, {found['seconds'] * 1e3:7.1f} ms measured"
    text += (
        f" ({expected['seconds'] / found['seconds'] - 1:+6.1%}); memory {expected['bytes'] / 2**30:5.1f} GiB forecast"
    )
    if "bytes" in found:
        text += f", {found['bytes'] / 2**30:5.1f} GiB measured ({expected['bytes'] / found['bytes'] - 1:+6.1%})"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *cases(tiny=True)], help="by default all, side by side")
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that all of it runs")
    args = parser.parse_args()
    known = cases(args.tiny)
    if not args.cases:
        options = ["--json", str(args.json), *["--tiny"] * args.tiny]
        Sheet(args.json)  # measures the machine by itself, once
        clear()
        complete = side_by_side([["-m", "benchmarks.plan", name, *options] for name in known])
        rows = json.loads(args.json.read_text(encoding="utf-8"))
        print("\n".join(line(name, rows[name]) for name in known if name in rows))
        sys.exit(0 if complete else 1)
    join()
    torch.set_float32_matmul_precision("high")
    sheet = Sheet(args.json)
    for name in args.cases:
        case = known[name]
        row = {"forecast": case.forecast(), "measured": measure(case)}
        sheet.keep(name, row)
        print(line(name, row), flush=True)


if __name__ == "__main__":
    main()
