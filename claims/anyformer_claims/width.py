"""Width transfer: the best learning rate of models of several widths, with and without muP."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from anyformer.lab.api import Cell, CellResult, Experiment, Fact, Rows, Side, Size, Verdict, decide, summary, trained
from anyformer.lab.figures import label_ends, lines, log_ticks, panels
from anyformer.recipe import Recipe
from anyformer.training.api import read_recipe
from anyformer_claims.common import FRESH, WIDER, seeds

SCALES = ("standard", "mup")
MAX_MOVE = 1.0  # factors of 2 by which the best rate of a wider model may differ with muP
MIN_MOVE = 2.0  # factors of 2 by which it must fall without it


class Claim(Experiment):
    kind: Literal["width"] = "width"

    def cells(self, size: Size) -> list[Cell]:
        widths, depth, rows, length, steps, powers = {
            "quick": ((16, 64, 256), 1, 8, 32, 60, range(-10, -1)),
            "cpu": ((16, 64, 256), 1, 8, 32, 100, range(-10, -1)),
            "gpu": ((64, 256, 1024), 4, 32, 128, 300, range(-14, -3)),
        }[size]
        valid = 0.9 if size == "gpu" else 0.98  # where the validation text begins
        task = {"depth": depth, "rows": rows, "length": length, "valid": valid, "steps": steps}
        return [
            {"scale": scale, "width": width, "base_width": widths[0], "lr": 2.0**power, **task, "seed": seed}
            for width in widths
            for scale in SCALES
            for power in powers
            for seed in (seeds(size, first=WIDER if size == "gpu" else FRESH) if size != "quick" else (0,))
            if scale == "standard" or width != widths[0]  # where both are the same
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        with trained(_recipe(cell)) as over:
            return {"diverged": over.diverged, "curve": over.curve, **({} if over.diverged else over.valid)}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        best = {scale: _best(results, scale) for scale in SCALES}
        narrow, wide = min(best["mup"]), max(best["mup"])
        most = max(abs(math.log2(lr / best["mup"][narrow])) for lr in best["mup"].values())
        fallen = -math.log2(best["standard"][wide] / best["standard"][narrow])
        stays = True if most <= MAX_MOVE else False if most >= MIN_MOVE else None
        moved = True if fallen >= MIN_MOVE else None if fallen >= MAX_MOVE else False
        ends = min(r["lr"] for r in results), max(r["lr"] for r in results)
        inside = best["mup"][narrow] not in ends
        return decide(
            [
                Fact(
                    "with muP the best rate of every width is within a factor of 2 of the narrowest",
                    stays if inside else None,
                    f"{2**most:g} times",
                ),
                Fact("without it the best rate falls by a factor of 4 or more", moved, f"{2**fallen:g} times"),
            ],
        )

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        return [
            Side(f"{name} muP at width {width}", {lr: points.get(lr, [math.inf]) for lr in _rates(results)})
            for scale, name in (("standard", "without"), ("mup", "with"))
            for width, points in _losses(results, scale).items()
        ]

    def result(self, results: Sequence[CellResult]) -> str:
        ends = _ends(results)
        each = [
            f"{name} muP "
            + ", ".join(
                f"{lr:.2g} at {width:,}{f' (the {ends[lr]} tried)' if lr in ends else ''}"
                for width, lr in _best(results, scale).items()
            )
            for scale, name in (("standard", "without"), ("mup", "with"))
        ]
        return f"The best learning rates by width are {' and '.join(each)}."

    def setting(self, results: Sequence[CellResult]) -> str:
        base = min(r["width"] for r in results)
        return (
            "Recipe `shakespeare` with AdamW (betas 0.9 and 0.95), Xavier initialisation, a warm-up of a tenth of the "
            f"steps, then a cosine schedule. The base width of muP is {base}: there both are the same model."
        )

    def remark(self, results: Sequence[CellResult]) -> str:
        """Name rates that are nearly as good as the best one."""
        ties, base = [], min(r["width"] for r in results)
        for scale, name in (("standard", "without"), ("mup", "with")):
            for width, points in _losses(results, scale).items():
                ranked = sorted(points, key=lambda lr: summary(points[lr]).mean)[:2]
                best, second = (summary(points[lr]) for lr in ranked)
                if second.mean - best.mean < max(best.deviation, second.deviation) and (scale, width) != ("mup", base):
                    ties.append(
                        f"{name} muP at width {width}, {second} at {ranked[1]:.2g} against {best} at {ranked[0]:.2g}"
                    )
        return f"The second best rate is within one standard deviation of the best: {'; '.join(ties)}." if ties else ""

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        best = _best(results, "standard")
        at_least = "; at least, as no smaller rate was tried" * (_ends(results).get(best[max(best)]) == "smallest")
        return {
            "with muP the best rate of every width is within a factor of 2 of the narrowest": (
                "the largest ratio of a best rate to that of the narrowest, or its inverse; 1: the same rate"
            ),
            "without it the best rate falls by a factor of 4 or more": f"from the narrowest to the widest{at_least}",
        }

    def caption(self, results: Sequence[CellResult]) -> str:
        return "The curve of the narrowest width is the same in both upper panels."

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [("width", "best rate", "loss", "best rate with muP", "loss with muP")]
        losses = {scale: _losses(results, scale) for scale in SCALES}
        for width in losses["standard"]:
            cells = [str(width)]
            for scale in SCALES:
                lr, some = min(losses[scale][width].items(), key=lambda one: summary(one[1]).mean)
                cells += [f"{lr:.2g}", str(summary(some))]
            rows.append(tuple(cells))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, right, below) = panels("ab;cc")
        for axis, scale, title in ((left, "standard", "without muP"), (right, "mup", "with muP")):
            losses = _losses(results, scale)
            lines(axis, {f"width {width}": points for width, points in losses.items()})
            axis.set_xscale("log", base=2)
            axis.set(title=title, xlabel="learning rate", ylabel="validation loss, nats per token")
        right.sharey(left)
        left.autoscale(axis="y")
        best = {scale: _best(results, scale) for scale in SCALES}
        named = {"without muP": best["standard"], "with muP": best["mup"]}
        lines(below, {name: {width: [lr] for width, lr in rates.items()} for name, rates in named.items()}, first=2)
        log_ticks(below, list(best["mup"]))
        below.set_xticklabels([str(width) for width in best["mup"]])  # as in the labels above, not 1k
        below.set_yscale("log", base=2)
        below.set(title="best learning rate", xlabel="width", ylabel="learning rate")
        for axis in (left, right, below):
            label_ends(axis)
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


def _losses(results: Sequence[CellResult], scale: str) -> dict[int, dict[float, list[float]]]:
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


def _best(results: Sequence[CellResult], scale: str) -> dict[int, float]:
    """Return the learning rate with the lowest mean loss, by width."""
    losses = _losses(results, scale)
    return {width: min(points, key=lambda lr: summary(points[lr]).mean) for width, points in losses.items()}


def _rates(results: Sequence[CellResult]) -> list[float]:
    return sorted({r["lr"] for r in results})


def _ends(results: Sequence[CellResult]) -> dict[float, str]:
    """Return the smallest and the largest rate that were tried."""
    rates = [r["lr"] for r in results]
    return {min(rates): "smallest", max(rates): "largest"}
