"""Host time of serving: a tiny model on the CPU, whose own time is subtracted.

python -m benchmarks.serving_host [--rows 256] [--new 32] [--json FILE]

An encoder-decoder of width 16 answers as many requests at once as there are rows, all greedy and of the same length, as
in the row `base` of `benchmarks.serving`. Tokens are read one step late, as on a GPU. The CPU time of the process less
that of the model's calls is what Python and numpy take: for each request and for each row and step of decoding. The
first is measured by answers of one token.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

import anyformer as af
from anyformer import presets
from anyformer.generation.engine.interface import Limits
from anyformer.generation.request import Request
from benchmarks.serving import draw

Results = dict[str, float]


class Clock:
    """CPU seconds of the calls of functions in their own threads."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


async def measure(rows: int, new: int, rounds: int, streams: bool = False) -> float:
    """Return the host's microseconds for one request with an answer of `new` tokens."""
    torch.manual_seed(0)
    config = presets.vaswani(depth=1, width=16, heads=2, ff=16, vocab=64, dropout=0.0)
    model = af.Transformer(config.model_copy(update={"special": config.special.model_copy(update={"start": 1})})).eval()
    requests = [Request(one.ids, new) for one in draw(rows, 32, 32, 64)]
    engine, clock = af.Engine(model, Limits(max_rows=rows, page_size=32, prefill_tokens=rows * 32)), Clock()
    server: Any = engine._servers["model"]
    server.overlaps = True
    for name in ("_read", "_choose"):  # greedy requests only: no call of `_step` itself
        setattr(server.runner, name, clock.wrap(getattr(server.runner, name)))
    async with engine:

        async def one(request: Request) -> None:
            if streams:
                async for _ in engine.submit(request):
                    pass
            else:
                await engine.complete(request)

        best = float("inf")
        for _ in range(rounds + 1):
            begin, clock.seconds = time.process_time(), 0.0
            work: list[Awaitable[None]] = [one(request) for request in requests]
            await asyncio.gather(*work)
            best = min(best, time.process_time() - begin - clock.seconds)
    return 1e6 * best / rows


def main(given: list[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="requests at once")
    parser.add_argument("--new", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="measurements, of which the fastest counts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    out = Results()
    for name, streams in (("complete", False), ("stream", True)):
        short, long = (asyncio.run(measure(options.rows, new, options.rounds, streams)) for new in (1, options.new))
        out[f"{name}_us_per_request"] = short
        out[f"{name}_us_per_row_and_step"] = (long - short) / (options.new - 1)
    for key, value in out.items():
        print(f"{key:40} {value:12,.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(out, indent=2))
    return out


if __name__ == "__main__":
    main()
