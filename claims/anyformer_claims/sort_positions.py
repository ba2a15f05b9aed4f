"""Learned and sinusoidal positions on sorting: how fast the training loss falls."""

from collections.abc import Sequence
from typing import Any, Literal

from anyformer.lab.api import Cell, CellResult, Experiment, More, Rows, Side, Size, Verdict, decide, summary, trial
from anyformer.lab.figures import curves, dots, legend, log_ticks, panels, reference
from anyformer.recipe import Recipe
from anyformer_claims.common import recipe_for, seeds, side, sorting

LEARNED, SINUSOIDAL = "learned", "sinusoidal"
SCHEMES = {LEARNED: "{kind='learned', length=64}", SINUSOIDAL: "sinusoidal"}
SHAPES = {"decoder": "decoder alone", "encoder-decoder": "encoder–decoder"}
SCALES = {"sqrt_width": "times √d", "none": "as they are"}  # of the token embeddings
FALLEN = 0.5  # nats per token


class Claim(Experiment):
    kind: Literal["sort_positions"] = "sort_positions"

    def cells(self, size: Size) -> list[Cell]:
        width, depth, longest, tokens, steps, rates = {
            "quick": (32, 1, 7, 320, 240, (6e-3,)),
            "cpu": (64, 2, 9, 512, 300, (4e-3,)),
            "gpu": (128, 2, 20, 4096, 1500, (1e-2, 3e-3, 1e-3, 3e-4)),
        }[size]
        rest = {"width": width, "depth": depth, "heads": 4, "longest": longest, "tokens": tokens, "steps": steps}
        return [
            {"shape": shape, "position": p, "scale": scale, "lr": lr, **rest, "seed": s}
            for shape in SHAPES
            for p in SCHEMES
            for scale in SCALES
            for lr in rates
            for s in seeds(size)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        found = trial(recipe_of(cell))
        losses = [loss for _, loss in found["curve"]]
        fallen = next((step for step, loss in found["curve"] if loss <= FALLEN), None)
        return {"mean": sum(losses) / len(losses), "fallen": fallen, **found}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        conditions = []
        for shape, label in SHAPES.items():
            fixed, learned = ([r["mean"] for r in _best(results, shape, p)] for p in (SINUSOIDAL, LEARNED))
            conditions.append(More(f"training loss over all steps, {label}: sinusoidal - learned", fixed, learned))
        return decide(conditions)

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        found = []
        for shape, label in SHAPES.items():
            for p in SCHEMES:
                best = _best(results, shape, p)[0]["scale"]
                found.append(side(f"{label}, {p}", results, "mean", shape=shape, position=p, scale=best))
        return found

    def setting(self, results: Sequence[CellResult]) -> str:
        return f"""Rows of 4 to {results[0]["longest"]} digits are sorted. Where a size has one learning rate, that one
is the better."""

    def caption(self, results: Sequence[CellResult]) -> str:
        return "Above: each scheme at its best scale and rate. Below: all of them (scheme, scale, rate)."

    def result(self, results: Sequence[CellResult]) -> str:
        facts = []
        for shape, label in SHAPES.items():
            best = {p: _best(results, shape, p) for p in SCHEMES}
            each = (f"{p} {summary([r['mean'] for r in best[p]]).mean:.3f} ({_setting(best[p][0])})" for p in SCHEMES)
            facts.append(f"{label}: {' and '.join(each)}")
        return f"The training loss (nats per token), averaged over all steps, is with a {'; with an '.join(facts)}."

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [
            (
                "shape",
                "positions",
                "token embeddings",
                "rate",
                "mean loss",
                f"steps to {FALLEN}",
                "rows right at the end",
            )
        ]
        for shape, p, scale, lr in dict.fromkeys((r["shape"], r["position"], r["scale"], r["lr"]) for r in results):
            some = _some(results, shape, p, scale, lr)
            steps = [r["fallen"] for r in some if r["fallen"] is not None]
            reached = str(summary(steps)) if len(steps) == len(some) else f"{len(steps)} of {len(some)} seeds"
            mean, right = (str(summary([r[name] for r in some])) for name in ("mean", "exact_match"))
            rows.append((SHAPES[shape], p, SCALES[scale], f"{lr:g}", mean, reached, right))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, axes = panels("ab;cd", height=3)
        for axis, below, (shape, label) in zip(axes[:2], axes[2:], SHAPES.items(), strict=True):
            curves(axis, {p: [r["curve"] for r in _best(results, shape, p)] for p in SCHEMES})
            axis.set(title=label, ylabel="training loss, nats per token")
            log_ticks(axis, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4], across=False)
            reference(axis, FALLEN, f"{FALLEN} nats")
            settings = dict.fromkeys((r["position"], r["scale"], r["lr"]) for r in results if r["shape"] == shape)
            dots(
                below,
                {
                    f"{p}, {SCALES[scale]}, {lr:g}": [r["mean"] for r in _some(results, shape, p, scale, lr)]
                    for p, scale, lr in settings
                },
            )
            below.set(xlabel="training loss, mean over steps")
        axes[3].tick_params(axis="y", labelleft=False)
        legend(figure, axes[0], where="upper")
        return figure


def recipe_of(cell: Cell) -> Recipe:
    scheme, scale = SCHEMES[cell["position"]], f"model.target.scale={cell['scale']}"
    if cell["shape"] == "decoder":
        return sorting(cell, [f"model.decoder.position={scheme}", scale, "train.log_every=1"])
    changes = {
        **{f"data.{part}": _digits(cell, count) for part, count in (("train", 20_000), ("valid", 300))},
        **{f"model.{side}.depth": cell["depth"] for side in ("encoder", "decoder")},
        **{f"model.{side}.position": scheme for side in ("encoder", "decoder")},
        **{f"model.{side}.blocks.0.feedforward.width": 2 * cell["width"] for side in ("encoder", "decoder")},
        **{f"model.{side}.blocks.0.mixer.heads": cell["heads"] for side in ("encoder", "decoder")},
        "model.decoder.blocks.0.cross.heads": cell["heads"],
        "model.source.scale": cell["scale"],
        "tokenizer": "words",
        "task.max_target": "none",
        "train.log_every": 1,
    }
    return recipe_for(cell, "dates", changes, [scale])


def _digits(cell: Cell, count: int) -> str:
    return f"{{kind='sort', count={count}, shortest=4, longest={cell['longest']}}}"


def _some(results: Sequence[CellResult], shape: str, position: str, scale: str, lr: float) -> list[CellResult]:
    setting = (shape, position, scale, lr)
    return [r for r in results if (r["shape"], r["position"], r["scale"], r["lr"]) == setting]


def _best(results: Sequence[CellResult], shape: str, position: str) -> list[CellResult]:
    """Return the results of all seeds with the scale and rate of the lowest mean loss."""
    same = dict.fromkeys((r["scale"], r["lr"]) for r in results if (r["shape"], r["position"]) == (shape, position))
    each = [_some(results, shape, position, scale, lr) for scale, lr in same]
    return min(each, key=lambda some: summary([r["mean"] for r in some]).mean)


def _setting(result: CellResult) -> str:
    return f"tokens {SCALES[result['scale']]}, rate {result['lr']:g}"
