"""Attention with less: one projection, no softmax, random weights, no output, slices. Does it still sort?"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer import Transformer
from anyformer.lab.api import (
    Cell,
    CellResult,
    Experiment,
    Fact,
    Rows,
    Size,
    Verdict,
    decide,
    summary,
    tabled_test,
    trial,
)
from anyformer.lab.figures import bars, curves, dots, log_ticks, panel_legend, panels, reference
from anyformer.nn.api import MultiHeadAttention, Positions
from anyformer_claims.common import seeds, sorting

MIXER = "model.decoder.blocks.0.mixer"
BY_DISTANCE = "{kind='t5', buckets=64, max_distance=128, shared=false}"  # one bias for each distance below 32

# what each changes in the recipe; what it changes in the model is in `begin`
VARIANTS: dict[str, list[str]] = {
    "full": [],
    "query only": [f"{MIXER}.projections=shared_qkv"],
    "relu": [f"{MIXER}.normalizer=relu"],
    "random scores": [],
    "random fixed": [f"{MIXER}.position={BY_DISTANCE}"],
    "no output": [f"{MIXER}.output=none"],
    "slices projected": [],
    "slices": [f"{MIXER}.projections=shared_qkv"],
    "no mixer": [f"{MIXER}=none"],
}
CLAIMED = ("query only", "relu", "random scores", "random fixed", "no output")
LEARNT = 0.5  # of unseen rows sorted without a mistake


class Claim(Experiment):
    kind: Literal["variants"] = "variants"

    def cells(self, size: Size) -> list[Cell]:
        width, depth, steps, longest, tokens = {
            "quick": (32, 2, 900, 8, 448),
            "cpu": (32, 2, 1000, 8, 448),
            "gpu": (128, 4, 1500, 16, 896),
        }[size]
        task = {"longest": longest, "tokens": tokens, "lr": 8e-3 * (32 / width) ** 0.5}
        model = {"width": width, "depth": depth, "heads": 4, "steps": steps}
        return [{"variant": v, **model, **task, "seed": s} for v in VARIANTS for s in seeds(size)]

    def measure(self, cell: Cell) -> dict[str, Any]:
        still = "train.optimizer.weight_decay=0.0"  # weight decay would change the frozen weights
        return trial(sorting(cell, [still, *VARIANTS[cell["variant"]]]), begin(cell["variant"]))

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        each = {v: _sorted(results, v) for v in VARIANTS}
        conditions = [
            Fact(
                f"{v} sorts half of the rows or more, in every seed",
                True if min(x) >= LEARNT else False if max(x) < LEARNT else None,
                f"{min(x):.2f} to {max(x):.2f}",
            )
            for v, x in each.items()
            if v in CLAIMED
        ]
        apart = min(each["full"]) >= LEARNT and max(each["no mixer"]) < LEARNT
        return decide(conditions, requires=[Fact("full attention sorts half of the rows and no mixer does not", apart)])

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        both = ((v, _sorted(results, v)) for v in ("full", "no mixer"))
        seen = ", ".join(f"{v} {min(x):.2f} to {max(x):.2f}" for v, x in both)
        return {"full attention sorts half of the rows and no mixer does not": seen}

    def setting(self, results: Sequence[CellResult]) -> str:
        longest = results[0]["longest"]
        return f"A decoder reads a row of 4 to {longest} digits and outputs them sorted. 300 unseen rows are measured."

    def caption(self, results: Sequence[CellResult]) -> str:
        return (
            "Below: full attention with the five variants of the claim on the left, and with all others on the right. "
            "Apart from full attention, a colour marks different variants in these two panels. Losses above 1.8 are "
            "cut off."
        )

    def result(self, results: Sequence[CellResult]) -> str:
        each = ", ".join(f"{v} {100 * summary(_sorted(results, v)).mean:.1f} %" for v in VARIANTS)
        return f"Unseen rows sorted without a mistake: {each}."

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [("attention", "rows sorted", "loss", "p (loss)", "parameters")]
        whole = [r["loss"] for r in _of(results, "full")]
        for v in VARIANTS:
            loss = [r["loss"] for r in _of(results, v)]
            p = "–" if v == "full" else tabled_test(loss, whole)
            size = next(r["parameters"] for r in results if r["variant"] == v)
            rows.append((v, str(summary(_sorted(results, v))), str(summary(loss)), p, f"{size:,}"))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, right, claimed, beside) = panels(4, height=3.6)
        bars(left, {v: _sorted(results, v) for v in VARIANTS})
        reference(left, LEARNT, "half", across=False)
        left.set(xlabel="unseen rows without a mistake", xlim=(0, 1.05))
        losses = {v: [r["loss"] for r in _of(results, v)] for v in VARIANTS}
        dots(right, losses, bars=False)
        right.set(xlabel="validation loss, nats per token")
        right.tick_params(axis="y", labelleft=False)
        log_ticks(right, [n for n in (0.0001, 0.001, 0.01, 0.1, 1) if 10 * n > min(map(min, losses.values()))])
        both = ([v for v in VARIANTS if v in ("full", *CLAIMED)], [v for v in VARIANTS if v not in CLAIMED])
        for axis, some in zip((claimed, beside), both, strict=True):
            curves(axis, {v: [r["curve"] for r in _of(results, v)] for v in some})
            axis.set(ylim=(0, 1.8), ylabel="training loss, nats per token")
            panel_legend(axis, columns=2)
        return figure


def begin(variant: str) -> Callable[[Transformer], None]:
    """Modify the initial model of a variant."""

    @torch.no_grad()
    def change(model: Transformer) -> None:
        generator = torch.Generator().manual_seed(0)
        for module in model.modules():
            if isinstance(module, Positions) and "buckets" in module.tables:
                table = module.tables["buckets"]
                table.copy_(2 * torch.randn(table.shape, generator=generator))
                _hold(table, torch.zeros_like(table))
            if isinstance(module, MultiHeadAttention):
                _restrain(module, variant)

    return change


def _restrain(attention: MultiHeadAttention, variant: str) -> None:
    weight = attention.qkv.rows()  # [parts · d, d]: queries, keys, values
    d = weight.shape[1]
    match variant:
        case "random scores" | "random fixed":
            learns = torch.zeros_like(weight)
            learns[2 * d :] = 1
            if variant == "random fixed":
                weight[:d] = 0  # no query: only distance counts
            _hold(weight, learns)
        case "slices projected":
            slices = torch.block_diag(*[torch.ones(d // attention.heads, d // attention.heads)] * attention.heads)
            learns = slices.repeat(3, 1).to(weight)
            weight.mul_(learns * math.sqrt(attention.heads))  # the scale of an initialisation for the smaller fan-in
            _hold(weight, learns)
        case "slices":
            weight.copy_(torch.eye(d))
            _hold(weight, torch.zeros_like(weight))


def _hold(parameter: Tensor, learns: Tensor) -> None:
    """Train only the elements of a parameter whose mask is 1."""
    parameter.register_hook(lambda gradient: gradient * learns)


def _of(results: Sequence[CellResult], variant: str) -> list[CellResult]:
    return [r for r in results if r["variant"] == variant and not r["diverged"]]


def _sorted(results: Sequence[CellResult], variant: str) -> list[float]:
    """Return the share of rows that each seed sorted; 0 where it diverged."""
    return [0.0 if r["diverged"] else r["exact_match"] for r in results if r["variant"] == variant]
