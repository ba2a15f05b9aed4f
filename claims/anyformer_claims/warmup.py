"""Post-norm and pre-norm in the first steps: which one needs a warm-up."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn import functional as F

from anyformer import Transformer
from anyformer.lab.api import (
    Cell,
    CellResult,
    Experiment,
    Fact,
    More,
    Rows,
    Side,
    Size,
    Verdict,
    decide,
    outcomes_of,
    summary,
    tabled_test,
    trained,
)
from anyformer.lab.figures import curves, label_ends, legend, lines, log_ticks, panels
from anyformer_claims.common import WIDER, final, found, seeds, side, sorting

PLACEMENTS = {"pre": "layer", "post": "none"}  # and the final norm: after a post-norm block there is one already
MUCH = 0.3  # nats per token


class Claim(Experiment):
    kind: Literal["warmup"] = "warmup"

    def cells(self, size: Size) -> list[Cell]:
        width, depth, longest, tokens, steps, rates = {
            "quick": (32, 12, 5, 320, 200, (5e-4, 1e-3, 4e-3, 1.6e-2)),
            "cpu": (32, 12, 5, 320, 250, (2.5e-4, 1e-3, 4e-3, 1.6e-2)),
            "gpu": (256, 18, 16, 4096, 500, (1e-4, 3e-4, 1e-3, 3e-3)),
        }[size]
        task = {"longest": longest, "tokens": tokens, "steps": steps}
        model = {"width": width, "depth": depth, "heads": 4}
        return [
            {"placement": placement, "warmup": warmup, "lr": lr, **model, **task, "seed": seed}
            for lr in rates
            for placement in PLACEMENTS
            for warmup in (0, steps // 3)
            for seed in seeds(size, first=WIDER)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        placement = cell["placement"]
        changes = [
            f"model.decoder.blocks.0.placement={placement}",
            f"model.decoder.final_norm={PLACEMENTS[placement]}",
            f"train.schedule={{kind='constant', warmup={cell['warmup']}}}",
            "train.precision=fp32",
            "train.log_every=1",
            "data.valid=none",
        ]
        gradients: list[float] = []
        with trained(sorting(cell, changes), lambda model: gradients.extend(_gradients(model))) as over:
            return {"diverged": over.diverged, "final": final(over.curve), "gradients": gradients, "curve": over.curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        rates = sorted({r["lr"] for r in results})
        costs = {(lr, p): _cost(results, lr, p) for lr in rates for p in PLACEMENTS}
        fair = [lr for lr in rates if costs[lr, "pre"] < MUCH]  # at which pre-norm learns from the first step
        each = outcomes_of([_need(results, lr) for lr in fair])
        never = bool(fair) and all(costs[lr, "post"] < MUCH / 3 for lr in fair)
        needed = True if any(one.holds for one in each) else False if never else None
        growth = _growth(results, "post")
        return decide(
            [
                Fact(
                    f"at some rate pre-norm loses less than {MUCH} nats without a warm-up",
                    bool(fair),
                    ", ".join(f"{lr:g}" for lr in fair),
                ),
                Fact(f"at one of these rates post-norm loses more than {MUCH} nats", needed),
                Fact(
                    "with post-norm the first gradient grows towards the last layer", growth > 1, f"{growth:.2g} times"
                ),
            ],
            also=each,
        )

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        return [
            side(f"{p}-norm, warm-up of {n} steps", results, "final", placement=p, warmup=n)
            for p in PLACEMENTS
            for n in _warmups(results)
        ]

    def setting(self, results: Sequence[CellResult]) -> str:
        return f"""A decoder reads 4 to {results[0]["longest"]} digits and outputs them sorted. The warm-up takes
{max(_warmups(results))} steps; the rate is constant after it."""

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        ratios = [row[-1] / row[0] for row in found(results, "gradients", placement="post")]
        seen = f"last / first layer, mean over seeds (lowest {min(ratios):.1f}, highest {max(ratios):.1f}); not tested"
        return {
            f"at one of these rates post-norm loses more than {MUCH} nats": "see the parts of this condition below",
            "with post-norm the first gradient grows towards the last layer": seen,
        }

    def caption(self, results: Sequence[CellResult]) -> str:
        return "Below: the norm of the first gradient of all weights of a layer, on random rows."

    def result(self, results: Sequence[CellResult]) -> str:
        rates = sorted({r["lr"] for r in results})
        each = [
            f"{_cost(results, lr, 'pre'):+.2f} nats with pre-norm and {_cost(results, lr, 'post'):+.2f} with "
            f"post-norm at the rate {lr:g}"
            for lr in rates
        ]
        changes = f"Leaving out the warm-up changes the last training loss by {', '.join(each)}."
        return f"{changes} One rate with a large difference is enough for the claim."

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [("norm", "rate", "without warm-up", "with", "p", "diverged")]
        for lr in sorted({r["lr"] for r in results}):
            for placement in PLACEMENTS:
                some = _without_and_with(results, lr, placement)
                lost = sum(found(results, "diverged", lr=lr, placement=placement))
                shown = map(str, map(summary, some))
                p = tabled_test(*some)
                rows.append((placement, f"{lr:g}", *shown, p, f"{lost} of {sum(map(len, some))}"))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        rates = sorted({r["lr"] for r in results})
        figure, (*lefts, right) = panels("ab;cc" if len(rates) == 2 else len(rates) + 1)
        for axis, lr in zip(lefts, rates, strict=True):
            named = {}
            for placement in PLACEMENTS:
                for warmup in _warmups(results):
                    name = f"{placement}-norm, " + (f"warm-up of {warmup} steps" if warmup else "no warm-up")
                    named[name] = found(results, "curve", lr=lr, placement=placement, warmup=warmup)
            curves(axis, named)
            axis.set(title=f"learning rate {lr:g}", ylim=(0, None), ylabel="training loss, nats per token")
        lines(right, {f"{p}-norm": _by_layer(results, p) for p in PLACEMENTS}, first=4)
        right.set(title="before training", xlabel="layer", ylabel="gradient norm")
        right.set_xticks(range(1, 1 + results[0]["depth"]))
        log_ticks(right, [n for n in (0.25, 0.5, 1, 2, 4) if n < right.get_ylim()[1]], across=False)
        label_ends(right)
        legend(figure, *lefts, columns=2)
        return figure


def _gradients(model: Transformer) -> list[float]:
    """Return the gradient norm of each layer on random rows."""
    ids = torch.randint(model.config.vocab, (32, 16), device=next(model.parameters()).device)
    F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert model.decoder is not None
    norms = [
        math.sqrt(sum(float(p.grad.square().sum()) for p in block.parameters() if p.grad is not None))
        for block in model.decoder.blocks
    ]
    model.zero_grad()
    return norms


def _warmups(results: Sequence[CellResult]) -> list[int]:
    return sorted({r["warmup"] for r in results})


def _without_and_with(results: Sequence[CellResult], lr: float, placement: str) -> list[list[float]]:
    """Return the last losses of all seeds."""
    return [found(results, "final", lr=lr, placement=placement, warmup=warmup) for warmup in _warmups(results)]


def _cost(results: Sequence[CellResult], lr: float, placement: str) -> float:
    """Return how much higher the last loss is without a warm-up."""
    without, given = (summary(some).mean for some in _without_and_with(results, lr, placement))
    return without - given


def _need(results: Sequence[CellResult], lr: float) -> More:
    without, given = _without_and_with(results, lr, "post")
    return More(f"post-norm at {lr:g}: loss without - with a warm-up", without, given, MUCH)


def _by_layer(results: Sequence[CellResult], placement: str) -> dict[float, list[float]]:
    lr, warmup = min(r["lr"] for r in results), _warmups(results)[0]  # those of a seed are equal in all cells
    rows = found(results, "gradients", placement=placement, lr=lr, warmup=warmup)
    return {layer: list(values) for layer, values in enumerate(zip(*rows, strict=True), 1)}


def _growth(results: Sequence[CellResult], placement: str) -> float:
    """Return the ratio of the gradient norms of the last and the first layer."""
    return summary([row[-1] / row[0] for row in found(results, "gradients", placement=placement)]).mean
