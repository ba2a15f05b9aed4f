"""Time per generated token by context length, with and without a KV cache: `python benchmarks/prefix.py`.

With a cache only the attention's reading grows with the prefix; without, the whole text is read again. Also what a
cache takes beside what `anyformer count` says. Writes a figure.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch

from anyformer import presets
from anyformer.decoding.request import Request
from anyformer.decoding.session import Session
from anyformer.inspection.count import count
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.model import Transformer

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="docs/figures/prefix.png")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
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
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.loglog(LENGTHS, [1e3 * whole[n] for n in LENGTHS], "o-", label="without a cache", base=2)
    axes.loglog(LENGTHS, [1e3 * cached[n] for n in LENGTHS], "o-", label="with a cache", base=2)
    axes.set_xlabel("tokens before")
    axes.set_ylabel("ms for one more token")
    axes.set_title(f"{model.num_parameters() / 1e6:.1f} M parameters, CPU, one thread")
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.out, dpi=120)


def median(run: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
