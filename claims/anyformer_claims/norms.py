"""Models without block norms, and without residuals, shallow and deep."""

from collections.abc import Sequence
from typing import Any, Literal

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
    summary,
    trained,
    written_test,
)
from anyformer.lab.figures import curves, label_ends, panels, reference
from anyformer_claims.common import WIDER, final, found, seeds, side, sorting

BLOCK = "model.decoder.blocks.0"
VARIANTS = {  # what each changes in the recipe
    "both": [],
    "no norms": [f"{BLOCK}.norm=none"],
    "no residuals": [f"{BLOCK}.residual=false"],
}
LABELS = {"both": "norms and residuals", "no norms": "no norms", "no residuals": "no residuals"}  # in the figure
WORDS = {"both": "with norms and residuals", "no norms": "without norms", "no residuals": "without residuals"}
POOLED = """ At 2 layers all trainings with norms at the best rate ran on one machine and those without on another; on
the second machine the eight with norms repeat the stored mean losses to 0.0001 nats, far less than the difference."""
LEARNT = 1.0  # nats per token: a guess without reading the digits takes about 2


class Claim(Experiment):
    kind: Literal["norms"] = "norms"

    def cells(self, size: Size) -> list[Cell]:
        width, depths, longest, tokens, steps, rates = {
            "quick": (32, (2, 12), 5, 320, 200, (1e-3, 4e-3, 1.6e-2)),
            "cpu": (32, (2, 16), 5, 320, 250, (2.5e-4, 1e-3, 4e-3, 1.6e-2)),
            "gpu": (256, (2, 18), 16, 4096, 500, (1e-4, 3e-4, 1e-3, 3e-3)),
        }[size]
        task = {"longest": longest, "tokens": tokens, "steps": steps}
        return [
            {"depth": depth, "variant": variant, "lr": lr, "width": width, "heads": 4, **task, "seed": seed}
            for depth in depths
            for variant in VARIANTS
            for lr in rates
            for seed in seeds(size, 8 if depth == depths[0] else 5, WIDER)  # more to detect a small difference
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        rest = ["train.schedule.floor=0.1", "train.precision=fp32", "train.log_every=1", "data.valid.count=100"]
        with trained(sorting(cell, [*VARIANTS[cell["variant"]], *rest])) as over:
            mean = sum(loss for _, loss in over.curve) / len(over.curve)
            ends = {"final": final(over.curve), "mean": mean, "exact_match": over.valid.get("exact_match", 0.0)}
            return {"diverged": over.diverged, **ends, "curve": over.curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        depths = _depths(results)
        shallow, deep = depths[0], depths[-1]
        ends = {(d, v): _best(results, "final", d, v) for d in (shallow, deep) for v in VARIANTS}
        means = {v: _best(results, "mean", shallow, v) for v in VARIANTS}
        lost = learnt(ends[deep, "no residuals"])
        return decide(
            [
                Fact(
                    f"{shallow} layers learn without norms, in every seed",
                    learnt(ends[shallow, "no norms"]),
                    str(summary(ends[shallow, "no norms"])),
                ),
                More(
                    f"loss averaged over training at {shallow} layers, without - with norms",
                    means["no norms"],
                    means["both"],
                ),
                Fact(
                    f"{deep} layers do not learn without residuals, in any seed",
                    None if lost is None else not lost,
                    str(summary(ends[deep, "no residuals"])),
                ),
            ],
            requires=[
                Fact(f"{d} layers learn with norms and residuals", bool(learnt(ends[d, "both"])))
                for d in (shallow, deep)
            ],
        )

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        shallow, *_, deep = _depths(results)
        judged = ((shallow, "both"), (shallow, "no norms"), (deep, "both"), (deep, "no residuals"))
        return [_side(results, depth, variant) for depth, variant in judged]

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        shallow, *_, deep = _depths(results)
        return {
            f"{d} layers learn with norms and residuals": (
                f"highest last loss {max(_best(results, 'final', d, 'both')):.3f}, bound {LEARNT:g}"
            )
            for d in (shallow, deep)
        }

    def result(self, results: Sequence[CellResult]) -> str:
        depths = _depths(results)
        each = []
        for d in (depths[0], depths[-1]):
            both, norms, residuals = (
                f"{summary(_best(results, 'final', d, v)).mean:.3f} {words}{_diverged(results, d, v)}"
                for v, words in WORDS.items()
            )
            each.append(f"at {d} layers {both}, {norms} and {residuals}")
        return f"Last training loss (nats per token, each at its best rate): {'; '.join(each)}."

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [("layers", "with", "rate", "last loss", "mean loss", "rows sorted", "diverged")]
        seeds = {d: len({r["seed"] for r in results if r["depth"] == d}) for d in _depths(results)}
        for depth in _depths(results):
            for variant in VARIANTS:
                for lr in sorted({r["lr"] for r in results}):
                    given = {"depth": depth, "variant": variant, "lr": lr}
                    shown = (str(summary(found(results, n, **given))) for n in ("final", "mean", "exact_match"))
                    lost = sum(found(results, "diverged", **given))
                    rows.append((str(depth), variant, f"{lr:g}", *shown, f"{lost} of {seeds[depth]}"))
        return rows

    def setting(self, results: Sequence[CellResult]) -> str:
        cell = results[0].cell
        return f"""A decoder reads a row of 4 to {cell["longest"]} digits and outputs them sorted. Norms are layer norms
before each sublayer; a final norm stays in every variant. The shallow models have more seeds, since the difference
between them is small. The rate rises over the first tenth of the steps and falls along a cosine after it."""

    def caption(self, results: Sequence[CellResult]) -> str:
        depth = _depths(results)[-1]
        lost, runs = (_best(results, name, depth, "no norms") for name in ("diverged", "curve"))
        text = "Each variant at its best rate. A training that diverged counts up to that step."
        if ends := [run[-1][0] for run, diverged in zip(runs, lost, strict=True) if diverged and run]:
            text += f" Without norms {sum(lost)} of {len(lost)} trainings of {depth} layers diverged, the last at step "
            text += f"{max(ends):g}{', where the curve ends' if all(lost) else ''}."
        return text

    def remark(self, results: Sequence[CellResult]) -> str:
        shallow = _depths(results)[0]
        both, without = (_best(results, "final", shallow, v) for v in ("both", "no residuals"))
        means = {v: summary(_best(results, "mean", shallow, v)) for v in ("both", "no residuals")}
        order = "nevertheless lower" if means["no residuals"].mean < means["both"].mean else "higher, too"
        pooled = POOLED if len({r.machine for r in results}) > 1 else ""
        if summary(without).mean >= summary(both).mean:
            return pooled.strip()
        return (
            f"At {shallow} layers the model without residuals ends lowest: {summary(without)}, with both "
            f"{summary(both)} ({written_test(without, both)}), although its loss is higher at first. Averaged over "
            f"training it is {order}: {means['no residuals']}, with both {means['both']}. Here residuals are needed "
            f"for depth, not for two layers.{pooled}"
        )

    def draw(self, results: Sequence[CellResult]) -> Any:
        depths = _depths(results)
        figure, axes = panels(len(depths), sharey=True)
        for axis, depth in zip(axes, depths, strict=True):
            curves(axis, {LABELS[v]: _best(results, "curve", depth, v) for v in VARIANTS})
            axis.set(title=f"{depth} layers", ylabel="training loss, nats per token")
            axis.tick_params(labelleft=True)
            reference(axis, LEARNT, "learnt: below 1")
        axes[0].set_ylim(bottom=0)  # of all panels; earlier it would fix the top by the first one
        label_ends(axes[-1])
        return figure


def learnt(losses: Sequence[float]) -> bool | None:
    """Return True if all seeds learnt, False if none did, None otherwise."""
    return True if max(losses) < LEARNT else False if min(losses) >= LEARNT else None


def _depths(results: Sequence[CellResult]) -> list[int]:
    return sorted({r["depth"] for r in results})


def _diverged(results: Sequence[CellResult], depth: int, variant: str) -> str:
    """Return how many trainings diverged at the best rate, in parentheses; nothing if none did."""
    lost = _best(results, "diverged", depth, variant)
    return f" ({sum(lost)} of {len(lost)} diverged)" if any(lost) else ""


def _side(results: Sequence[CellResult], depth: int, variant: str) -> Side:
    return side(f"{depth} layers {WORDS[variant]}", results, "final", depth=depth, variant=variant)


def _best(results: Sequence[CellResult], name: str, depth: int, variant: str) -> list[Any]:
    return found(results, name, depth=depth, variant=variant, lr=_side(results, depth, variant).best)
