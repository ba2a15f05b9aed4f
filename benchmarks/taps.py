"""Cost of taps: a forward pass without, with the maps of one layer, with those of all: `python benchmarks/taps.py`.

Maps are recomputed for the requested layers; the others stay on their kernels: one layer of n costs an n-th of
what all cost on top.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from anyformer import presets
from anyformer.nn.inspection.attention_maps import attention_maps
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer(presets.gpt2(depth=args.depth, width=256, heads=8, vocab=1000, length=args.length)).eval()
    ids, last = torch.randint(0, 1000, (1, args.length)), args.depth - 1
    ways: dict[str, Callable[[], object]] = {
        "no taps": lambda: model(ids),
        "a residual stream": lambda: run_with_taps(model, [f"decoder.{last}.out"], ids),
        "maps of one layer": lambda: attention_maps(model, ids, layers=[last]),
        "maps of all layers": lambda: attention_maps(model, ids),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(args.rounds):  # by turns, so that all see the same machine
            for name, run in ways.items():
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    found = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    plain = found["no taps"]
    for name, taken in found.items():
        print(f"{name:<20} {1e3 * taken:8.1f} ms  {taken / plain:5.2f} times a pass without")
    one, every = found["maps of one layer"] - plain, found["maps of all layers"] - plain
    print(f"one layer's maps take {one / every:.2f} of what those of {args.depth} layers take on top")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
