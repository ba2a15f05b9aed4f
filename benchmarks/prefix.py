"""Time per generated token by context length, with and without a KV cache: `python benchmarks/prefix.py`.

With a cache only the attention's reading grows with the prefix; without, the whole text is read again. Also the size of
the cache beside that of `anyformer count`. Writes `benchmarks/results/prefix.json` and draws docs/figures/prefix.png.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from anyformer import presets
from anyformer.generation.request import Request
from anyformer.generation.session import Session
from anyformer.lab.figures import label_ends, lines, log_ticks, panels, save
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
RESULTS = Path(__file__).parent / "results" / "prefix.json"
FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "prefix.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = presets.llama(depth=6, width=384, heads=6, kv_heads=2, ff=1024, vocab=8000)
    model = Transformer(config).eval()
    cached, whole = {}, {}
    for length in LENGTHS:
        ids = torch.randint(0, 8000, (1, length))
        with evaluating(model):
            session = Session(model, Request(ids, max_new_tokens=args.rounds + 1))
            said = count(config, session.cache.slots).cache_bytes
            new = ids[:, :1]
            cached[length] = median(lambda s=session, n=new: s.read(n), args.rounds)
            whole[length] = median(lambda x=ids: model(x), 3)
        taken = session.cache.nbytes()
        print(
            f"{length:>5} tokens before: {1e3 * cached[length]:.2f} ms with a cache of {taken:,} bytes "
            f"(count: {said:,}), {1e3 * whole[length]:.2f} ms without",
            flush=True,
        )
    found = {"with a KV cache": cached, "without": whole}
    stored = {name: {n: round(1e3 * x, 3) for n, x in some.items()} for name, some in found.items()}
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    draw(stored)


def draw(found: Mapping[str, Mapping[int | str, float]]) -> Path:
    """Draw milliseconds by the number of earlier tokens."""
    figure, (axis,) = panels(1, height=3.6)
    lines(axis, {name: {int(n): [ms] for n, ms in some.items()} for name, some in found.items()})
    axis.set(xlabel="tokens before", ylabel="time of one more token, ms")
    log_ticks(axis, LENGTHS)
    log_ticks(axis, [10, 100, 1000], across=False)
    label_ends(axis)
    return save(figure, FIGURE)


def median(run: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
