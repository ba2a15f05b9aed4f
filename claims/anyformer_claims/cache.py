"""The key/value cache: the cost of a token with and without it, its growth, and why it holds no queries."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from anyformer import Transformer, count
from anyformer.config import LM, Attention, Block, ModelConfig, Plain, Rotary, Stack, Tokens
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, Rows, Size, Verdict, decide, power
from anyformer.lab.figures import label_ends, lines, log_ticks, panels
from anyformer.nn.api import make_layout
from anyformer.nn.inspection.api import run_with_taps
from anyformer_claims.common import DEVICE, seconds

HEADS, VOCAB = 4, 64


class Claim(Experiment):
    kind: Literal["cache"] = "cache"
    timed = True

    def cells(self, size: Size) -> list[Cell]:
        width, depth, longest = {"quick": (64, 2, 1024), "cpu": (128, 4, 4096), "gpu": (1024, 12, 8192)}[size]
        lengths = [16 * 2**i for i in range(20) if 16 * 2**i <= longest]
        return [{"length": n, "width": width, "depth": depth, "repeats": 9} for n in lengths]

    @torch.no_grad()
    def measure(self, cell: Cell) -> dict[str, Any]:
        n, config = cell["length"], _config(cell)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = Transformer(config).eval()
            ids = torch.randint(VOCAB, (1, n + 1))
        cache = model.new_cache(1, n + 1)
        model.decode(ids[:, :n], cache=cache)
        place = make_layout(1, 1, ids.device, positions=ids.new_full((1, 1), n))

        def with_it() -> Tensor:
            return model.apply_head(model.decode(ids[:, n:], cache=cache), place)

        def without() -> Tensor:
            return model.apply_head(model.decode(ids)[:, -1:], place)

        def forget() -> None:
            cache.truncate(n)

        first = with_it()
        forget()
        difference = float((first - without()).abs().max() / first.abs().max())
        found = {"flops with": _flops(model, with_it), "flops without": _flops(model, without)}
        forget()
        return {
            **found,
            "seconds with": seconds(with_it, cell["repeats"], forget),
            "seconds without": seconds(without, cell["repeats"]),
            "bytes": cache.nbytes(),
            "predicted bytes": count(config, n + 1).cache_bytes,
            "difference": difference,
            **_matter(model, ids),
        }

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        lengths = [r["length"] for r in results]
        gain = power(lengths, [r["flops without"] / r["flops with"] for r in results])
        grown = power([n + 1 for n in lengths], [r["bytes"] for r in results])  # with the newest token
        apart = max(r["difference"] for r in results)
        last = results[-1]
        needed = all((r["q"], r["k"], r["v"]) == (0, r["length"], r["length"]) for r in results)
        seen = f"{last['q']}, {last['k']} and {last['v']} after {last['length']} tokens"
        return decide(
            [
                Fact("FLOPs saved grow as n^1 ± 0.1", abs(gain.exponent - 1) <= 0.1, f"exponent {gain}"),
                Fact("bytes grow as n^1 ± 0.02", abs(grown.exponent - 1) <= 0.02, f"exponent {grown}"),
                Fact("logits agree to 1e-3", apart <= 1e-3, f"{apart:.0e} of the largest"),
                Fact("0 queries, n keys and n values matter to the last token", needed, seen),
            ]
        )

    def setting(self, results: Sequence[CellResult]) -> str:
        return f"""A decoder with {HEADS} heads, rotary positions and a vocabulary of {VOCAB}, with random weights in
fp32; one text (batch 1)."""

    def caption(self, results: Sequence[CellResult]) -> str:
        return "Times have no line through them: short ones are mostly overhead."

    def result(self, results: Sequence[CellResult]) -> str:
        gain = {r["length"]: r["seconds without"] / r["seconds with"] for r in results}
        short = [ratio for n, ratio in gain.items() if n < 1000]
        last = results[-1]
        return (
            f"After {last['length']:,} tokens the KV cache saves a factor of "
            f"{last['flops without'] / last['flops with']:,.0f} in FLOPs but only {gain[last['length']]:.1f} in time, "
            f"and after fewer than 1,000 tokens {min(short):.1f} to {max(short):.1f} in time (below 1: slower)."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        names = (f"{unit} {way}" for unit in ("FLOPs", "ms") for way in ("with", "without", "ratio"))
        head = ("n", *names, "cache, MiB", "q, k, v needed")
        rows: list[tuple[str, ...]] = [head]
        for r in results:
            flops, times = (r["flops with"], r["flops without"]), (r["seconds with"], r["seconds without"])
            costs = (*(f"{n:,}" for n in flops), f"{flops[1] / flops[0]:,.1f}")
            took = (*(f"{t * 1e3:.2f}" for t in times), f"{times[1] / times[0]:.1f}")
            needed = f"{r['q']}, {r['k']}, {r['v']}"
            rows.append((str(r["length"]), *costs, *took, f"{r['bytes'] / 2**20:,.2f}", needed))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, axes = panels(4)
        lengths = [r["length"] for r in results]
        for axis, what, label, unit in (
            (axes[0], "flops", "FLOPs of one more token", 1),
            (axes[1], "seconds", "time of one more token, ms", 1e3),
        ):
            both = {way: {r["length"]: [r[f"{what} {way}"] * unit] for r in results} for way in ("without", "with")}
            lines(axis, {f"{way} cache": points for way, points in both.items()})
            axis.set(yscale="log", ylabel=label)
        ratios = {"FLOPs": "flops", "time": "seconds"}
        saved = {n: {r["length"]: [r[f"{k} without"] / r[f"{k} with"]] for r in results} for n, k in ratios.items()}
        lines(axes[2], saved, first=2)
        axes[2].set(ylabel="saved by the cache, factor")
        log_ticks(axes[2], [n for n in (1, 10, 100, 1000, 10_000) if n < 2 * lengths[-1]], across=False)
        lines(axes[3], {"keys and values": {r["length"]: [r["bytes"] / 2**20] for r in results}}, first=4)
        axes[3].set(ylabel="size of the cache, MiB")
        least, most = (results[i]["bytes"] / 2**20 for i in (0, -1))
        log_ticks(axes[3], [n for n in (0.1, 1, 10, 100, 1000) if least / 2 < n < 2 * most], across=False)
        took = [r[f"seconds {way}"] * 1e3 for r in results for way in ("without", "with")]
        ticks = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
        log_ticks(axes[1], [n for n in ticks if min(took) / 2 < n < 2 * max(took)], across=False)
        for line in (*axes[1].get_lines(), axes[2].get_lines()[1]):
            line.set_linestyle("")  # short times are mostly noise: no line through them
        for axis in axes:
            axis.set_xlabel("tokens before, n")
            log_ticks(axis, lengths[::2])
        for axis in axes[:3]:
            label_ends(axis)
        return figure


def _config(cell: Cell) -> ModelConfig:
    block = Block(mixer=Attention(heads=HEADS), feedforward=Plain(width=4 * cell["width"]))
    stack = Stack(depth=cell["depth"], blocks=(block,), position=Rotary())
    return ModelConfig(width=cell["width"], target=Tokens(vocab=VOCAB), decoder=stack, head=LM())


def _flops(model: Transformer, run: Callable[[], object]) -> int:
    model.backend = "eager"  # torch's counter does not see into fused kernels
    with FlopCounterMode(display=False) as counter:
        run()
    model.backend = "auto"
    return int(counter.get_total_flops())


@torch.enable_grad()
def _matter(model: Transformer, ids: Tensor) -> dict[str, int]:
    """Count the earlier tokens whose query, key or value affects the last output of the same layer, in any layer."""
    names = ("q", "k", "v")
    _, seen = run_with_taps(model, [f"decoder.*.mixer.{name}" for name in (*names, "heads")], ids)
    count = dict.fromkeys(names, 0)
    for layer in range(model.config.stacks["decoder"].depth):
        parts = [seen[f"decoder.{layer}.mixer.{name}"] for name in names]
        last = seen[f"decoder.{layer}.mixer.heads"][:, :, -1]  # [b, h, k]
        slopes = torch.autograd.grad(last.square().sum(), parts, retain_graph=True)
        for name, slope in zip(names, slopes, strict=True):
            before = slope[0, :, :-1].abs().amax(dim=(0, 2)) > 0  # in any head and element
            count[name] = max(count[name], int(before.sum()))
    return count
