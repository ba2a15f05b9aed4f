"""Width transfer: the best learning rate of models of several widths, with and without muP."""

import math
from collections.abc import Sequence
from typing import Any

from anyformer.lab.cells import Cell, Result
from anyformer.lab.experiment import Experiment, Rows, Size, Verdict, verdict
from anyformer.lab.experiments.common import all_hold
from anyformer.lab.figures import legend, lines, log_ticks, panels
from anyformer.lab.stats import summary
from anyformer.lab.trial import trained
from anyformer.recipe import Recipe
from anyformer.recipes import read_recipe

SCALES = ("standard", "mup")
MAX_MOVE = 1.0  # factors of 2 by which the best rate of a wider model may differ with muP
MIN_MOVE = 2.0  # factors of 2 by which it must fall without it


class Claim(Experiment):
    name = "width"
    number = 20
    claim = "With width transfer (muP) the best learning rate is the same for all widths; without it, it falls."
    idea = """In a layer $y = W x$ with $n$ inputs a step of Adam changes each weight by the learning rate $\\eta$, all
in the direction of $x$: $y$ changes by about $\\eta n$. A wider model therefore takes larger steps in what it computes,
and its best rate is smaller. The *maximal update parametrisation* (muP) gives hidden matrices the rate $\\eta / n$ and
initial values of variance $1/n$, divides logits by $n$ and scores by the key width in place of its root, all relative
to a base width. Then activations and their changes have the same size at every width, and a rate that is tuned on a
narrow model serves a wide one."""
    prediction = """With muP the best rate at every width is within a factor of 2 of that of the narrowest model;
without it the best rate of the widest is at most a quarter of that of the narrowest. Rates differ by factors of 2, and
the best one has the lowest validation loss, as a mean over the seeds. If the best rate of the narrowest model is at an
end of the range that was tried, nothing is decided."""
    parts = ("recipe/width_transfer.py", "training/width_transfer.py")
    minutes = (3, 60, 48)
    changed = (
        "A first quick run started from N(0, 0.02²) and had rates up to 0.0625, the best ones of the narrow models; "
        "initialisation by inputs, two larger rates and the rule about ends of the range were added before any GPU run."
    )
    alt = "Validation loss by learning rate for each width, without and with muP, and the best rate by width"

    def cells(self, size: Size) -> list[Cell]:
        widths, depth, rows, length, steps, powers, seeds = {
            "quick": ((16, 64, 256), 1, 8, 32, 60, range(-10, -1), 1),
            "cpu": ((32, 64, 128, 256), 2, 8, 64, 200, range(-11, -2), 2),
            "gpu": ((64, 128, 256, 512, 1024), 4, 32, 128, 400, range(-12, -3), 2),
        }[size]
        valid = 0.9 if size == "gpu" else 0.98  # where the validation text begins
        task = {"depth": depth, "rows": rows, "length": length, "valid": valid, "steps": steps}
        return [
            {"scale": scale, "width": width, "base_width": widths[0], "lr": 2.0**power, **task, "seed": seed}
            for width in widths
            for scale in SCALES
            for power in powers
            for seed in range(seeds)
            if scale == "standard" or width != widths[0]  # where both are the same
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        with trained(_recipe(cell)) as over:
            return {"diverged": over.diverged, "curve": over.curve, **({} if over.diverged else over.valid)}

    def judge(self, results: Sequence[Result]) -> Verdict:
        best = {scale: _best(results, scale) for scale in SCALES}
        narrow, wide = min(best["mup"]), max(best["mup"])
        moves = {scale: {width: math.log2(lr / rates[narrow]) for width, lr in rates.items()}
                 for scale, rates in best.items()}  # fmt: skip
        most = max(abs(move) for move in moves["mup"].values())
        fallen = -moves["standard"][wide]
        stays = True if most <= MAX_MOVE else False if most >= MIN_MOVE else None
        if best["mup"][narrow] in (min(r["lr"] for r in results), max(r["lr"] for r in results)):
            stays = None  # a better rate may be outside the range
        moved = True if fallen >= MIN_MOVE else None if fallen >= MAX_MOVE else False
        facts = [
            f"{name}: best rate {', '.join(f'{lr:.2g} at {width}' for width, lr in best[scale].items())}"
            for scale, name in (("standard", "without muP"), ("mup", "with muP"))
        ]
        return verdict(all_hold(stays, moved), "; ".join(facts))

    def table(self, results: Sequence[Result]) -> Rows:
        rows: list[tuple[str, ...]] = [("width", "best rate", "loss", "best rate with muP", "loss")]
        losses = {scale: _losses(results, scale) for scale in SCALES}
        for width in losses["standard"]:
            cells = [str(width)]
            for scale in SCALES:
                lr, some = min(losses[scale][width].items(), key=lambda one: summary(one[1]).mean)
                cells += [f"{lr:.2g}", str(summary(some))]
            rows.append(tuple(cells))
        return rows

    def draw(self, results: Sequence[Result]) -> Any:
        figure, (left, right, below) = panels("ab;cc")
        for axis, scale, title in ((left, "standard", "without muP"), (right, "mup", "with muP")):
            losses = _losses(results, scale)
            lines(axis, {f"width {width}": points for width, points in losses.items()})
            axis.set_xscale("log", base=2)
            axis.set(title=title, xlabel="learning rate", ylabel="validation loss, nats")
        best = {scale: _best(results, scale) for scale in SCALES}
        named = {"without muP": best["standard"], "with muP": best["mup"]}
        lines(below, {name: {width: [lr] for width, lr in rates.items()} for name, rates in named.items()}, first=5)
        log_ticks(below, list(best["mup"]))
        below.set_yscale("log", base=2)
        below.set(title="best learning rate", xlabel="width", ylabel="learning rate")
        legend(figure, left, below)
        return figure


def _recipe(cell: Cell) -> Recipe:
    changes = [
        f"model.width={cell['width']}",
        "model.init=xavier",  # by inputs, so that all widths start alike without muP, too
        f"model.decoder.depth={cell['depth']}",
        f"batches.rows={cell['rows']}",
        f"batches.length={cell['length']}",
        f"data.valid={{kind='text', path='tinyshakespeare/input.txt', start={cell['valid']}}}",
        f"train.steps={cell['steps']}",
        f"train.optimizer={{kind='adamw', lr={cell['lr']}, betas=[0.9, 0.95]}}",
        f"train.schedule={{kind='cosine', warmup={cell['steps'] // 10}}}",
        "train.evaluate_every=none",
        "train.save_every=none",
        "train.keep=1",
        "train.compile=off",
        f"seed={cell['seed']}",
    ]
    if cell["scale"] == "mup":
        changes.append(f"train.scale={{kind='mup', base_width={cell['base_width']}}}")
    return read_recipe("shakespeare", changes)


def _losses(results: Sequence[Result], scale: str) -> dict[int, dict[float, list[float]]]:
    """Return validation losses by width and learning rate, without rates at which a training diverged.

    At the base width both scales are the same.
    """
    found: dict[int, dict[float, list[float]]] = {}
    some = [r for r in results if r["scale"] == scale or r["width"] == r["base_width"]]
    lost = {(r["width"], r["lr"]) for r in some if r["diverged"]}
    for r in some:
        if (r["width"], r["lr"]) not in lost:
            found.setdefault(r["width"], {}).setdefault(r["lr"], []).append(r["loss"])
    return found


def _best(results: Sequence[Result], scale: str) -> dict[int, float]:
    """Return the learning rate with the lowest mean loss, by width."""
    losses = _losses(results, scale)
    return {width: min(points, key=lambda lr: summary(points[lr]).mean) for width, points in losses.items()}
