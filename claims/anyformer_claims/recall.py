"""Recall of pairs: a state of constant size against attention, and a hybrid of both; what each costs by length."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer import Transformer, count
from anyformer.config import (
    LM,
    Attention,
    Block,
    Convolution,
    GatedDelta,
    LayerNorm,
    LinearAttention,
    Mamba2,
    Mixer,
    ModelConfig,
    NoFeedForward,
    Plain,
    Stack,
    Tokens,
    Xavier,
)
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, More, Rows, Size, Verdict, decide, summary
from anyformer.lab.figures import label_ends, lines, log_ticks, panels, reference
from anyformer_claims.common import DEVICE, learn, seeds

HEADS, HEAD_WIDTH = 2, 8
ATTENTION = Attention(heads=HEADS, key_width=HEAD_WIDTH)
DELTA = GatedDelta(heads=HEADS, key_width=HEAD_WIDTH)
STACKS: dict[str, tuple[Mixer, Mixer]] = {
    "attention": (ATTENTION, ATTENTION),
    "linear attention": (LinearAttention(heads=HEADS, key_width=HEAD_WIDTH),) * 2,
    "gated delta": (DELTA, DELTA),
    "mamba2": (Mamba2(heads=HEADS, head_width=HEAD_WIDTH, state=HEAD_WIDTH),) * 2,
    "hybrid": (DELTA, ATTENTION),
}
STATES = ("linear attention", "gated delta", "mamba2")
LABELS = {"mamba2": "Mamba-2", "gated delta": "gated DeltaNet"}  # in figure, table and sentences
KEYS, VALUES = 128, 16
VOCAB = KEYS + VALUES
QUERIES = 16  # of a row, at most
LEARNT = 0.9  # share of the values recalled
LENGTHS = (16_384, 65_536)  # between which the growth of costs is counted


class Claim(Experiment):
    kind: Literal["recall"] = "recall"

    def cells(self, size: Size) -> list[Cell]:
        steps, pairs, rates = {
            "quick": (300, (4, 32), (5e-3,)),
            "cpu": (500, (4, 16), (5e-3,)),
            "gpu": (1000, (4, 16, 32), (5e-3,)),
        }[size]
        task = {"width": 32, "rows": 32, "steps": steps}
        return [
            {"mixer": m, "pairs": n, "lr": lr, **task, "seed": s}
            for m in STACKS
            for n in pairs
            for lr in rates
            for s in seeds(size)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        torch.manual_seed(cell["seed"])
        model = Transformer(_config(cell["mixer"], cell["width"])).to(DEVICE)
        curve = learn(model, lambda: _recalls(cell, cell["rows"]), cell["steps"], cell["lr"])
        ids, wanted = _recalls(cell, 512)
        with torch.no_grad():
            named = model(ids).argmax(dim=-1)[wanted >= 0] == wanted[wanted >= 0]
        tables = [count(_config(cell["mixer"], cell["width"], bare=True), length) for length in LENGTHS]
        costs = {"flops": [t.flops for t in tables], "bytes": [t.cache_bytes for t in tables]}
        return {"accuracy": named.float().mean().item(), **costs, "curve": curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        most = max(r["pairs"] for r in results)
        named = {m: _accuracies(results, m, most) for m in STACKS}
        conditions: list[More | Fact] = []
        for m in STATES:
            flops, grown = _growth(results, m, "flops"), _growth(results, m, "bytes")
            cheap = abs(flops - 1) < 0.1 and abs(grown) < 0.1
            conditions += [
                Fact(
                    f"{m}: FLOPs grow as T^1, the cache not at all (± 0.1)", cheap, f"T^{flops:.2f} and T^{grown:.2f}"
                ),
                Fact(
                    f"{m}: not every seed names {LEARNT} of the values",
                    min(named[m]) < LEARNT,
                    f"lowest {min(named[m]):.2f}",
                ),
                More(f"values named, attention - {m}", named["attention"], named[m]),
            ]
        square = _growth(results, "attention", "flops")
        conditions += [
            Fact("attention: FLOPs grow as T^1.8 or faster", square >= 1.8, f"T^{square:.2f}"),
            Fact(
                f"hybrid: every seed names {LEARNT} of the values",
                True if min(named["hybrid"]) >= LEARNT else None,
                f"lowest {min(named['hybrid']):.2f}",
            ),
            More("values named, hybrid - attention", named["hybrid"], named["attention"], -0.05),
        ]
        few = min(r["pairs"] for r in results)
        return decide(
            conditions,
            requires=[
                Fact(
                    f"{LABELS.get(m, m)} names {LEARNT} of the values of {n} pairs in every seed",
                    (lowest := min(_accuracies(results, m, n))) >= LEARNT,
                    f"lowest {lowest:.2f}",
                )
                for m, n in (("attention", most), *((m, few) for m in STATES))
            ],
        )

    def result(self, results: Sequence[CellResult]) -> str:
        most = max(r["pairs"] for r in results)
        each = ", ".join(
            f"{LABELS.get(m, m)} {100 * summary(_accuracies(results, m, most)).mean:.0f} %" for m in STACKS
        )
        return (
            f"Of the values of {most} pairs these shares are named: {each} (guessing: {100 / VALUES:.0f} %). FLOPs of "
            f"the hybrid grow as T^{_growth(results, 'hybrid', 'flops'):.2f}, as in attention."
        )

    def setting(self, results: Sequence[CellResult]) -> str:
        most = max(r["pairs"] for r in results)
        return (
            f"{KEYS} keys, none twice in a row, and {VALUES} values. A row has n pairs, then one query for each pair, "
            f"up to {QUERIES}, in random order: {2 * most + min(most, QUERIES)} tokens with {most} pairs. No "
            "positions. Feed-forwards are twice as wide as the model. Values are counted in 512 unseen rows."
        )

    def caption(self, results: Sequence[CellResult]) -> str:
        return "FLOPs: of the two mixers and the output layer, without convolution and feed-forwards."

    def table(self, results: Sequence[CellResult]) -> Rows:
        pairs = sorted({r["pairs"] for r in results})
        rows: list[tuple[str, ...]] = [
            ("mixer", *(f"named of {n} pairs" for n in pairs), "exponent of T in FLOPs", "in cache bytes")
        ]
        for m in STACKS:
            named = (str(summary(_accuracies(results, m, n))) for n in pairs)
            rows.append(
                (LABELS.get(m, m), *named, f"{_growth(results, m, 'flops'):.2f}", f"{_growth(results, m, 'bytes'):.2f}")
            )
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, right) = panels(2)
        pairs = sorted({r["pairs"] for r in results})
        lines(left, {LABELS.get(m, m): {n: _accuracies(results, m, n) for n in pairs} for m in STACKS})
        left.set(title="recall", xlabel="pairs in a row", ylabel="fraction of values named", ylim=(0, 1.05))
        log_ticks(left, pairs)
        reference(left, 1 / VALUES, "guessing", below=True)
        lengths = [2**n for n in range(8, 17, 2)]
        width = results[0]["width"]
        flops = {LABELS.get(m, m): {t: [count(_config(m, width, bare=True), t).flops] for t in lengths} for m in STACKS}
        lines(right, flops)
        right.set(title="cost", yscale="log", xlabel="length T, tokens", ylabel="FLOPs, forward")
        log_ticks(right, lengths)
        for axis in (left, right):
            label_ends(axis)
        return figure


def _config(name: str, width: int, bare: bool = False) -> ModelConfig:
    """Return the config of a model; `bare`: of its two mixers alone, without a convolution and feed-forwards."""
    first = () if bare else (Block(mixer=Convolution(width=2), feedforward=NoFeedForward()),)
    feedforward = NoFeedForward() if bare else Plain(width=2 * width)
    blocks = tuple(Block(mixer=mixer, feedforward=feedforward) for mixer in STACKS[name])
    stack = Stack(depth=len(first) + 2, prefix=first, blocks=blocks, final_norm=LayerNorm())
    return ModelConfig(width=width, target=Tokens(vocab=VOCAB), decoder=stack, head=LM(), init=Xavier())


def _recalls(cell: Cell, rows: int) -> tuple[Tensor, Tensor]:
    """Return rows of pairs and queries: keys with the value that followed them as label."""
    n = cell["pairs"]
    keys = torch.rand(rows, KEYS, device=DEVICE).argsort(dim=1)[:, :n]  # no key twice in a row
    values = KEYS + torch.randint(VALUES, (rows, n), device=DEVICE)
    asked = torch.rand(rows, n, device=DEVICE).argsort(dim=1)[:, : min(n, QUERIES)]
    pairs = torch.stack((keys, values), dim=2).flatten(1)
    ids = torch.cat((pairs, keys.gather(1, asked)), dim=1)
    return ids, torch.cat((torch.full_like(pairs, -100), values.gather(1, asked)), dim=1)


def _growth(results: Sequence[CellResult], mixer: str, cost: str) -> float:
    """Return the exponent of the length in a cost, between the two lengths."""
    low, high = next(r[cost] for r in results if r["mixer"] == mixer)
    return math.log(high / low) / math.log(LENGTHS[1] / LENGTHS[0])


def _accuracies(results: Sequence[CellResult], mixer: str, pairs: int) -> list[float]:
    """Return the accuracies of all seeds at the best learning rate."""
    same = [r for r in results if (r["mixer"], r["pairs"]) == (mixer, pairs)]
    each = [[r["accuracy"] for r in same if r["lr"] == lr] for lr in {r["lr"] for r in same}]
    return max(each, key=lambda some: summary(some).mean)
