"""BigBird: neighbours, a few global blocks and a few random ones make attention linear in the length."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from anyformer import count
from anyformer.config import (
    Attention,
    BigBird,
    Block,
    Full,
    ModelConfig,
    NoPosition,
    Pattern,
    Plain,
    Rotary,
    Stack,
    Tokens,
    pairs,
)
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, Power, Rows, Size, Verdict, decide, power
from anyformer.lab.figures import label_ends, lines, log_ticks, panels
from anyformer.nn.api import Positions, Requirements, Runtime, Scoring, attend, find_blocks, lower, make_layout
from anyformer_claims.common import DEVICE, seconds

PATTERNS: dict[str, Pattern] = {"full": Full(), "bigbird": BigBird(block=64, before=1, after=1, globals=2, randoms=3)}
LONG = 4096  # tokens from which growth is judged: shorter texts have few blocks to skip
LINEAR, VOCAB = 1.15, 64


class Claim(Experiment):
    kind: Literal["bigbird"] = "bigbird"
    timed = True

    def cells(self, size: Size) -> list[Cell]:
        width, heads, depth, timed = {
            "quick": (64, 4, 1, (512, 4096)),
            "cpu": (128, 4, 1, (512, 4096)),
            "gpu": (768, 12, 2, (4096, 65_536)),
        }[size]
        model = {"width": width, "heads": heads, "depth": depth, "repeats": 9}
        lengths = [512 * 2**i for i in range(8)]
        ways = [(p, n) for n in lengths for p in PATTERNS]
        return [{"pattern": p, "length": n, "timed": timed[0] <= n <= timed[1], **model} for p, n in ways]

    def measure(self, cell: Cell) -> dict[str, Any]:
        n, pattern, config = cell["length"], PATTERNS[cell["pattern"]], _config(cell)
        at = make_layout(1, n, torch.device("cpu"))
        listed, _ = find_blocks(pattern, at, at)
        found = {
            "pairs": int(listed.sum()) * pattern.tile**2,  # in blocks that a kernel computes
            "predicted": pairs(pattern, n, n),
            "flops": count(config, n).flops,
        }
        return {**found, **_timed(config, cell)} if cell["timed"] else found

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        sparse, full = (_growth(results, name, "pairs") for name in ("bigbird", "full"))
        conditions = [
            Fact(f"BigBird's pairs grow as T^{LINEAR} or slower", sparse.exponent <= LINEAR, f"exponent {sparse}"),
            Fact("full attention's pairs grow as T^2 ± 0.1", abs(full.exponent - 2) <= 0.1, f"exponent {full}"),
        ]
        if any("memory" in r.found for r in results):
            for what, name in (("seconds", "time"), ("memory", "memory")):
                fit = _growth(results, "bigbird", what)
                fine = fit.exponent <= LINEAR
                conditions.append(Fact(f"BigBird's {name} grows as T^{LINEAR} or slower", fine, f"exponent {fit}"))
        return decide(conditions)

    def result(self, results: Sequence[CellResult]) -> str:
        sparse, full = (_growth(results, name, "pairs").exponent for name in ("bigbird", "full"))
        grow = (
            f"From {LONG:,} tokens on the pairs of tokens in visible blocks grow as T^{sparse:.2f} with BigBird and as "
            f"T^{full:.2f} in full attention"
        )
        if _on_gpu(results):
            return f"{grow}; in time BigBird is {_times(results)}."
        return (
            f"{grow}. This is about pairs, not about time: no kernel for a CPU skips the other blocks, so nothing is "
            "saved."
        )

    def remark(self, results: Sequence[CellResult]) -> str:
        return "" if _on_gpu(results) else f"Time on a CPU, no part of the rule: BigBird is {_times(results)}."

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        if not _on_gpu(results):
            return {}
        late, last = [r for r in results if r["pattern"] == "bigbird" and r["timed"]][-2:]
        doubled = f"from {late['length']:,} to {last['length']:,} tokens {last['seconds'] / late['seconds']:.1f} times"
        return {f"BigBird's time grows as T^{LINEAR} or slower": doubled}

    def setting(self, results: Sequence[CellResult]) -> str:
        dtype = "bf16" if _on_gpu(results) else "fp32"
        return f"Attention of one text of random vectors (batch 1), {dtype}; BigBird with blocks of 64 tokens."

    def caption(self, results: Sequence[CellResult]) -> str:
        if _on_gpu(results):
            return "Below: peak memory."
        return "No kernel for a CPU skips blocks: BigBird's times there are those of all pairs and of its mask."

    def table(self, results: Sequence[CellResult]) -> Rows:
        unit = "ms (MiB)" if _on_gpu(results) else "ms"
        head = ("T", *(f"{what}, {name}" for what in ("pairs", "FLOPs", unit) for name in ("full", "BigBird")))
        rows: list[tuple[str, ...]] = [head]
        by = {(r["pattern"], r["length"]): r for r in results}
        for n in sorted({r["length"] for r in results}):
            both = [by[name, n] for name in ("full", "bigbird")]
            numbers = [f"{r['pairs']:.3g}" for r in both] + [f"{r['flops']:.3g}" for r in both]
            rows.append((f"{n:,}", *numbers, *(_taken(r) for r in both)))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        whats = {
            "pairs": ("pairs in visible blocks", 1.0),
            "seconds": ("forward + backward, ms", 1e3),
        }
        if _on_gpu(results):
            whats["memory"] = ("peak memory, MiB", 2.0**-20)
        figure, axes = panels("ab;cc" if "memory" in whats else 2, height=3)
        names = {"full": "full attention", "bigbird": "BigBird"}
        for axis, (what, (label, unit)) in zip(axes, whats.items(), strict=True):
            some = [r for r in results if what in r.found]
            by = {n: {r["length"]: [r[what] * unit] for r in some if r["pattern"] == p} for p, n in names.items()}
            lines(axis, by)
            axis.set(yscale="log", xlabel="length T, tokens", ylabel=label)
            log_ticks(axis, sorted({r["length"] for r in some})[:: 2 if len(some) > 10 else 1])
            label_ends(axis)
        return figure


def _config(cell: Cell) -> ModelConfig:
    attention = Attention(heads=cell["heads"], pattern=PATTERNS[cell["pattern"]])
    block = Block(mixer=attention, feedforward=Plain(width=4 * cell["width"]))
    stack = Stack(depth=cell["depth"], blocks=(block,), position=Rotary())
    return ModelConfig(width=cell["width"], source=Tokens(vocab=VOCAB), encoder=stack)


def _timed(config: ModelConfig, cell: Cell) -> dict[str, float]:
    """Time attention alone, forward and backward, in bf16 on a GPU; the mask is computed once, before."""
    torch.compiler.reset()  # kernels for this length alone: the second length of a process would make it a variable
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0  # by earlier measurements in this process
    n, h, pattern = cell["length"], cell["heads"], PATTERNS[cell["pattern"]]
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    (block,) = config.stacks["encoder"].blocks
    assert isinstance(block.mixer, Attention)
    at, needs = make_layout(1, n, torch.device(DEVICE)), Requirements.of(block.mixer, config.width)
    positions = Positions(NoPosition(), config.width, h)
    relation = lower(pattern, at, at, "self", positions, needs, Runtime(DEVICE, dtype, True), "auto")
    shape = (1, h, n, needs.key_width)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))

    def run() -> None:
        attend(q, k, v, relation.lowered, Scoring(needs.key_width**-0.5)).sum().backward()

    run()  # compiles
    if DEVICE != "cuda":
        return {"seconds": seconds(run, cell["repeats"])}
    torch.cuda.reset_peak_memory_stats()
    run()
    return {"seconds": seconds(run, cell["repeats"]), "memory": torch.cuda.max_memory_allocated() - before}


def _growth(results: Sequence[CellResult], pattern: str, what: str) -> Power:
    """Fit the growth with the length, from `LONG` on, or over all lengths if that was not measured."""
    some = [r for r in results if r["pattern"] == pattern and what in r.found]
    long = [r for r in some if r["length"] >= LONG]
    chosen = long if len(long) > 2 else some
    return power([r["length"] for r in chosen], [r[what] for r in chosen])


def _on_gpu(results: Sequence[CellResult]) -> bool:
    return any("memory" in r.found for r in results)


def _times(results: Sequence[CellResult]) -> str:
    """Return from which length on BigBird is faster, if from any, with times of the first and last long text."""
    took = {(r["pattern"], r["length"]): r["seconds"] * 1e3 for r in results if "seconds" in r.found}
    lengths = sorted({n for _, n in took if n >= LONG})
    faster = [n for n in lengths if took["bigbird", n] < took["full", n]]
    from_here = f"faster from {faster[0]:,} tokens on" if faster else f"slower at every length up to {lengths[-1]:,}"
    times = [
        f"at {n:,}: {_ms(took['bigbird', n])} ms against {_ms(took['full', n])} ms in full"
        for n in dict.fromkeys((lengths[0], lengths[-1]))
    ]
    return f"{from_here} ({'; '.join(times)})"


def _taken(r: CellResult) -> str:
    if not r["timed"]:
        return "not timed"
    return _ms(r["seconds"] * 1e3) + (f" ({r['memory'] / 2**20:,.0f})" if "memory" in r.found else "")


def _ms(took: float) -> str:
    return f"{took:,.0f}" if took >= 100 else f"{took:.2g}"
