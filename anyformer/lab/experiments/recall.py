"""Recall of pairs: a state of constant size against attention, and a hybrid of both; what each costs by length."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
from anyformer.inspection.count import count
from anyformer.lab.cells import Cell, Result
from anyformer.lab.experiment import Experiment, Rows, Size, Verdict, verdict
from anyformer.lab.experiments.common import DEVICE, all_hold, is_more, learn
from anyformer.lab.figures import legend, lines, log_ticks, panels, reference
from anyformer.lab.stats import summary
from anyformer.nn.model import Transformer

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
LABELS = {"mamba2": "Mamba-2", "hybrid": "gated delta, then attention"}  # in the figure
KEYS, VALUES = 128, 16
VOCAB = KEYS + VALUES
QUERIES = 16  # of a row, at most
LEARNT = 0.9  # share of the values recalled
LENGTHS = (16_384, 65_536)  # between which the growth of costs is counted


class Claim(Experiment):
    name = "recall"
    number = 21
    claim = "Mixers with a state cost O(T) and lose on recall of many pairs; a hybrid with attention recovers it."
    idea = """Linear attention, gated DeltaNet and Mamba-2 keep one matrix $S$ of $k \\times v$ values per head. The
cost of a token does not depend on the length, and neither does the memory of decoding. But $S^\\top q$ returns exactly
what was stored under a key only if the keys are orthogonal, and there are no more than $k$ orthogonal keys: with more
pairs they overlap. Attention keeps all keys and finds any of them. Here a row has $n$ pairs of a key and a value, then
keys whose values the model must name. A convolution of two tokens joins each value with its key; two layers of the
mixer follow, with two heads of 8 channels. In the hybrid the second of them is attention."""
    prediction = """With the most pairs attention names 0.9 or more of the values in all seeds, each mixer with a state
names fewer (p < 0.05), and the hybrid, too, names 0.9 or more in all seeds. FLOPs from 16,384 to 65,536 tokens grow as
T^1.0 for mixers with a state and as T^1.8 or more for attention; the cache of the former does not grow. If a mixer with
a state names 0.9 or more in all seeds, the claim fails."""
    parts = ("kernels/linear_recurrence.py", "nn/state_mixers/gated_delta.py", "nn/attention.py", "cache/states.py")
    minutes = (13, 60, 30)
    alt = "Values recalled by the number of pairs, and FLOPs by length, for attention, mixers with a state and a hybrid"

    def cells(self, size: Size) -> list[Cell]:
        steps, pairs, rates, seeds = {
            "quick": (300, (4, 32), (5e-3,), 3),
            "cpu": (1000, (4, 8, 16, 32, 64), (5e-3, 2e-3), 3),
            "gpu": (3000, (4, 16, 32, 64, 96), (5e-3, 2e-3), 5),
        }[size]
        task = {"width": 32, "rows": 32, "steps": steps}
        return [
            {"mixer": m, "pairs": n, "lr": lr, **task, "seed": s}
            for m in STACKS
            for n in pairs
            for lr in rates
            for s in range(seeds)
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

    def judge(self, results: Sequence[Result]) -> Verdict:
        most = max(r["pairs"] for r in results)
        named = {m: _accuracies(results, m, most) for m in STACKS}
        growth = {m: _growth(results, m, "flops") for m in STACKS}
        grown = {m: _growth(results, m, "bytes") for m in STACKS}
        numbers = (
            f"values named of {most} pairs: {', '.join(f'{m} {summary(x)}' for m, x in named.items())}; "
            f"FLOPs grow as {', '.join(f'{m} T^{x:.2f}' for m, x in growth.items())}; "
            f"the cache as {', '.join(f'{m} T^{x:.2f}' for m, x in grown.items())}"
        )
        cheap = all(abs(growth[m] - 1) < 0.1 and abs(grown[m]) < 0.1 for m in STATES) and growth["attention"] >= 1.8
        if not cheap:
            return verdict(False, numbers)
        if min(named["attention"]) < LEARNT:
            return verdict(None, numbers)
        worse = [False if min(named[m]) >= LEARNT else is_more(named["attention"], named[m]) for m in STATES]
        lost = is_more(named["attention"], named["hybrid"], margin=0.05)
        recovered = True if min(named["hybrid"]) >= LEARNT else False if lost else None
        return verdict(all_hold(*worse, recovered), numbers)

    def table(self, results: Sequence[Result]) -> Rows:
        pairs = sorted({r["pairs"] for r in results})
        rows: list[tuple[str, ...]] = [("mixer", *(f"named of {n} pairs" for n in pairs), "FLOPs of T", "cache of T")]
        for m in STACKS:
            named = (str(summary(_accuracies(results, m, n))) for n in pairs)
            rows.append((m, *named, f"{_growth(results, m, 'flops'):.2f}", f"{_growth(results, m, 'bytes'):.2f}"))
        return rows

    def draw(self, results: Sequence[Result]) -> Any:
        figure, (left, right) = panels(2)
        pairs = sorted({r["pairs"] for r in results})
        lines(left, {LABELS.get(m, m): {n: _accuracies(results, m, n) for n in pairs} for m in STACKS})
        left.set(xlabel="pairs in a row", ylabel="fraction of values named", ylim=(0, 1.05))
        log_ticks(left, pairs)
        reference(left, 1 / VALUES, "guessing", below=True)
        lengths = [2**n for n in range(8, 17, 2)]
        width = results[0]["width"]
        flops = {LABELS.get(m, m): {t: [count(_config(m, width, bare=True), t).flops] for t in lengths} for m in STACKS}
        lines(right, flops)
        right.set(yscale="log", xlabel="length T, tokens", ylabel="FLOPs of a forward pass")
        log_ticks(right, lengths)
        legend(figure, left, columns=3)
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


def _growth(results: Sequence[Result], mixer: str, cost: str) -> float:
    """Return the exponent of the length in a cost, between the two lengths."""
    low, high = next(r[cost] for r in results if r["mixer"] == mixer)
    return math.log(high / low) / math.log(LENGTHS[1] / LENGTHS[0])


def _accuracies(results: Sequence[Result], mixer: str, pairs: int) -> list[float]:
    """Return the accuracies of all seeds at the best learning rate."""
    same = [r for r in results if (r["mixer"], r["pairs"]) == (mixer, pairs)]
    each = [[r["accuracy"] for r in same if r["lr"] == lr] for lr in {r["lr"] for r in same}]
    return max(each, key=lambda some: summary(some).mean)
