"""Forward and backward of one layer of each mixer by length, and where it becomes faster than full causal attention:
`python -m benchmarks.mixers [--device cuda]`.

One pre-norm block without a feed-forward, on random inputs. Every length has the same number of tokens in all rows, so
only the length of rows changes. GPU: bf16 by autocast, weights and residual stream in fp32, and each mode in its own
rows: compiled (`torch.compile`, static shapes) and eager. A length is compiled anew, so that fewer are measured
compiled. CPU: fp32, one thread, small sizes, eager.

The crossover of a mixer is the length at which its forward and backward pass takes as long as that of attention in the
same mode, interpolated between two measured lengths on log axes. Writes `benchmarks/results/mixers.json`, or the file
of `--out`, after each row.
"""

import argparse
import gc
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyformer.attention.layout import make_layout
from anyformer.config import (
    Attention,
    Block,
    ChannelDecay,
    GatedDelta,
    LinearAttention,
    Mamba2,
    Mixer,
    NoFeedForward,
    NoPosition,
    Normal,
    RMSNorm,
    Rotary,
    Stack,
)
from anyformer.nn.init import initialise
from anyformer.nn.stack import BlockStack

RESULTS = Path(__file__).parent / "results" / "mixers.json"
ATTENTION = "attention"
GPU_LENGTHS = {"eager": (1024, 4096, 8192, 16384, 32768, 65536), "compiled": (16384, 65536)}
CPU_LENGTHS = {"eager": (256, 512, 1024, 2048)}


def mixers(width: int) -> dict[str, Mixer]:
    """Return the mixers by name, with heads of 128 channels, or two heads; Mamba-2 has heads of 64 channels."""
    heads = max(2, width // 128)
    return {
        ATTENTION: Attention(heads=heads),
        "gated delta": GatedDelta(heads=heads),
        "Mamba-2": Mamba2(heads=4 * heads),
        "linear attention": LinearAttention(heads=heads),
        "gated linear attention": LinearAttention(
            heads=heads, features="none", normalizer="none", decay=ChannelDecay(), norm=RMSNorm(), gate=True
        ),
    }


def make_pass(mixer: Mixer, width: int, rows: int, length: int, device: str, compiled: bool) -> Callable[[bool], None]:
    """Return a function that runs one layer forward and, if asked, backward."""
    torch.manual_seed(0)
    block = Block(mixer=mixer, feedforward=NoFeedForward(), norm=RMSNorm())
    position = Rotary() if isinstance(mixer, Attention) else NoPosition()
    stack = BlockStack(Stack(depth=1, blocks=(block,), position=position), width, "decoder", width).to(device)
    initialise(stack, Normal(), width)
    x = torch.randn(rows, length, width, device=device, requires_grad=True)
    grad, layout = torch.randn_like(x), make_layout(rows, length, x.device)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return stack(x, layout)

    run = torch.compile(forward, dynamic=False) if compiled else forward

    def go(backward: bool) -> None:
        out = run(x)
        if backward:
            out.backward(grad)
            stack.zero_grad(set_to_none=True)
            x.grad = None

    return go


def measure(go: Callable[[], object], device: str, warm: int, rounds: int) -> dict[str, float]:
    """Return median, smallest and largest milliseconds."""
    times = []
    for _ in range(warm + rounds):
        finish(device)
        began = time.perf_counter()
        go()
        finish(device)
        times.append(1e3 * (time.perf_counter() - began))
    return {"ms": statistics.median(times[warm:]), "low": min(times[warm:]), "high": max(times[warm:])}


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_layers(
    lengths: Mapping[str, Sequence[int]],
    tokens: int,
    width: int,
    device: str,
    names: Sequence[str],
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each mixer, mode and length of that mode; one that does not fit into memory has no times."""
    for mode in lengths:
        for name in names:
            for length in lengths[mode]:
                torch.compiler.reset()
                gc.collect()
                row: dict[str, Any] = {"mixer": name, "mode": mode, "length": length, "rows": max(1, tokens // length)}
                try:
                    compiled = mode == "compiled"
                    go = make_pass(mixers(width)[name], width, row["rows"], length, device, compiled)
                    began = time.perf_counter()
                    go(True)
                    finish(device)
                    row["first_s"] = time.perf_counter() - began
                    if device == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    row["forward"] = measure(lambda run=go: run(False), device, 2, rounds)  # type: ignore[misc]
                    row["step"] = measure(lambda run=go: run(True), device, 2, rounds)  # type: ignore[misc]
                    row["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
                except torch.OutOfMemoryError:
                    row["error"] = "out of memory"
                go = None  # type: ignore[assignment]
                yield row


def crossovers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each mixer and mode the length from which on it is faster than attention, forward and backward."""
    times = {(row["mode"], row["mixer"], row["length"]): row["step"]["ms"] for row in rows if "step" in row}
    found = []
    for mode, name in dict.fromkeys((row["mode"], row["mixer"]) for row in rows if row["mixer"] != ATTENTION):
        ratios = [
            (length, ms / times[mode, ATTENTION, length])
            for (m, n, length), ms in sorted(times.items())
            if (m, n) == (mode, name) and (mode, ATTENTION, length) in times
        ]
        shown = {str(length): round(1 / ratio, 3) for length, ratio in ratios}
        found.append({"mixer": name, "mode": mode, "crossover": crossing(ratios), "times_as_fast": shown})
    return found


def crossing(ratios: Sequence[tuple[int, float]]) -> float | None:
    """Return the length at which a ratio falls below 1 and stays there; None if it does not within those measured."""
    above = [i for i, (_, ratio) in enumerate(ratios) if ratio >= 1]
    if not ratios or (above and above[-1] == len(ratios) - 1):
        return None
    if not above:
        return float(ratios[0][0])  # at or below the shortest measured
    (a, over), (b, under) = ratios[above[-1]], ratios[above[-1] + 1]
    share = math.log(over) / (math.log(over) - math.log(under))
    return round(math.exp(math.log(a) + share * (math.log(b) - math.log(a))), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a row")
    parser.add_argument("--tokens", type=int, help="tokens of all rows; at least the longest length")
    parser.add_argument("--width", type=int, help="width of the layer")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], help="default: both on a GPU, else eager")
    parser.add_argument("--mixers", nargs="+", choices=list(mixers(1024)), default=list(mixers(1024)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    gpu = args.device == "cuda"
    usual: Mapping[str, Sequence[int]] = GPU_LENGTHS if gpu else CPU_LENGTHS
    lengths = {mode: args.lengths or usual.get(mode, usual["eager"]) for mode in args.modes or usual}
    tokens, width = args.tokens or max(map(max, lengths.values())), args.width or (1024 if gpu else 128)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if gpu else platform.machine(),
        "torch": torch.__version__,
        "precision": "bf16 autocast" if gpu else "fp32, one thread",
        "width": width,
        "tokens": tokens,
        "layers": {name: mixer.model_dump() for name, mixer in mixers(width).items()},
        "rows": [],
    }
    for row in time_layers(lengths, tokens, width, args.device, args.mixers, args.rounds):
        found["rows"].append(row)
        found["crossovers"] = crossovers(found["rows"])
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        times = (
            f"{row['forward']['ms']:.2f} ms, with backward {row['step']['ms']:.2f} ms" if "step" in row else "no memory"
        )
        print(f"{row['mode']:>8} {row['mixer']:<24} {row['rows']:>3} x {row['length']:>6}: {times}", flush=True)
    for one in found["crossovers"]:
        print(f"{one['mode']:>8} {one['mixer']:<24} crossover {one['crossover']}, times as fast {one['times_as_fast']}")


if __name__ == "__main__":
    main()
