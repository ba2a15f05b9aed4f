"""Models without block norms, and without residuals, shallow and deep."""

from collections.abc import Sequence
from typing import Any

from anyformer.lab.cells import Cell, Result
from anyformer.lab.experiment import Experiment, Rows, Size, Verdict, verdict
from anyformer.lab.experiments.common import all_hold, final, found, sorting
from anyformer.lab.figures import curves, legend, panels
from anyformer.lab.stats import summary, welch
from anyformer.lab.trial import trained

BLOCK = "model.decoder.blocks.0"
VARIANTS = {  # what each changes in the recipe
    "both": [],
    "no norms": [f"{BLOCK}.norm=none"],
    "no residuals": [f"{BLOCK}.residual=false"],
}
LABELS = {"both": "norms and residuals", "no norms": "no norms", "no residuals": "no residuals"}  # in the figure
LEARNT = 1.0  # nats per token: a guess without reading the digits takes about 2


class Claim(Experiment):
    name = "norms"
    number = 5
    claim = "Without the block norms small models still learn, more slowly; without residuals deep ones do not learn."
    idea = """A block computes $x \\leftarrow x + F(N(x))$. The norm $N$ keeps the input of a sublayer at one scale,
whatever has been added to the residual stream before. Without it the stream may grow from layer to layer, which two
layers tolerate and many do not. The residual $x\\,+$ gives the gradient a path around $F$:
$\\partial(x + F)/\\partial x = 1 + F'$, and many such factors multiplied contain a term 1. Without it only $\\prod F'$
is left, and each attention layer makes the vectors of a row more similar, until they are indistinguishable (Dong et al.
2021). Each variant is trained at several learning rates and judged at its best, so that the choice of rate favours
none."""
    prediction = """At two layers the model without norms ends below 1 nat per token, and its loss averaged over
training is higher (p < 0.05). The deep one without residuals ends above 1 nat at each rate, and learns with them."""
    parts = ("nn/block.py", "nn/norm.py", "config/block.py")
    minutes = (5.5, 24, 5)
    alt = (
        "Training loss by step with norms and residuals, without norms and without residuals, for shallow and deep "
        "models"
    )

    def cells(self, size: Size) -> list[Cell]:
        width, depths, longest, tokens, steps, rates, seeds = {
            "quick": (32, (2, 12), 5, 320, 200, (1e-3, 4e-3), 3),
            "cpu": (64, (2, 6, 16), 8, 512, 400, (3e-4, 1e-3, 3e-3), 3),
            "gpu": (256, (2, 18), 16, 4096, 600, (3e-4, 1e-3, 3e-3), 3),
        }[size]
        task = {"longest": longest, "tokens": tokens, "steps": steps}
        return [
            {"depth": depth, "variant": variant, "lr": lr, "width": width, "heads": 4, **task, "seed": seed}
            for depth in depths
            for variant in VARIANTS
            for lr in rates
            for seed in range(2 * seeds if depth == depths[0] else seeds)  # more seeds to detect a small difference
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        rest = ["train.schedule.floor=0.1", "train.precision=fp32", "train.log_every=1", "data.valid.count=100"]
        with trained(sorting(cell, [*VARIANTS[cell["variant"]], *rest])) as over:
            mean = sum(loss for _, loss in over.curve) / len(over.curve)
            ends = {"final": final(over.curve), "mean": mean, "exact_match": over.valid.get("exact_match", 0.0)}
            return {"diverged": over.diverged, **ends, "curve": over.curve}

    def judge(self, results: Sequence[Result]) -> Verdict:
        depths = _depths(results)
        shallow, deep = depths[0], depths[-1]
        ends = {(d, v): _best(results, "final", d, v) for d in (shallow, deep) for v in VARIANTS}
        means = {v: _best(results, "mean", shallow, v) for v in VARIANTS}
        facts = [f"at {d} layers " + ", ".join(f"{v} {summary(ends[d, v])}" for v in VARIANTS) for d in (shallow, deep)]
        p = welch(means["no norms"], means["both"])
        numbers = f"last training loss, each at its best rate: {'; '.join(facts)}; averaged over training "
        numbers += f"at {shallow} layers {summary(means['both'])} with norms and "
        numbers += f"{summary(means['no norms'])} without (p = {p:.3f})"
        if not all(learnt(ends[d, "both"]) for d in (shallow, deep)):
            return verdict(None, f"the whole model does not learn this either; {numbers}")
        slower = summary(means["no norms"]).mean > summary(means["both"]).mean
        lost = learnt(ends[deep, "no residuals"])
        parts = learnt(ends[shallow, "no norms"]), slower if p < 0.05 else None, None if lost is None else not lost
        return verdict(all_hold(*parts), numbers)

    def table(self, results: Sequence[Result]) -> Rows:
        rows: list[tuple[str, ...]] = [("layers", "with", "rate", "last loss", "mean loss", "rows sorted", "diverged")]
        for depth in _depths(results):
            for variant in VARIANTS:
                for lr in sorted({r["lr"] for r in results}):
                    given = {"depth": depth, "variant": variant, "lr": lr}
                    shown = (str(summary(found(results, n, **given))) for n in ("final", "mean", "exact_match"))
                    lost = sum(found(results, "diverged", **given))
                    rows.append((str(depth), variant, f"{lr:g}", *shown, str(lost) if lost else ""))
        return rows

    def remark(self, results: Sequence[Result]) -> str:
        shallow = _depths(results)[0]
        ends = {v: _best(results, "final", shallow, v) for v in VARIANTS}
        both, without = ends["both"], ends["no residuals"]
        if summary(without).mean >= summary(both).mean:
            return ""
        return (
            f"At {shallow} layers the model without residuals ends lowest: {summary(without)}, with both "
            f"{summary(both)} (p = {welch(without, both):.3f}), although it learns more slowly at first. Here "
            "residuals are needed for depth, not for two layers."
        )

    def draw(self, results: Sequence[Result]) -> Any:
        depths = _depths(results)
        figure, axes = panels(len(depths), sharey=True)
        for axis, depth in zip(axes, depths, strict=True):
            curves(axis, {LABELS[v]: _best(results, "curve", depth, v) for v in VARIANTS})
            axis.set(title=f"{depth} layers", ylim=(0, None))
        legend(figure, *axes)
        return figure


def learnt(losses: Sequence[float]) -> bool | None:
    """Return True if all seeds learnt, False if none did, None otherwise."""
    return True if max(losses) < LEARNT else False if min(losses) >= LEARNT else None


def _depths(results: Sequence[Result]) -> list[int]:
    return sorted({r["depth"] for r in results})


def _rate(results: Sequence[Result], depth: int, variant: str) -> float:
    """Return the best learning rate of a variant."""
    rates = sorted({r["lr"] for r in results})
    return float(min(rates, key=lambda lr: summary(found(results, "final", depth=depth, variant=variant, lr=lr)).mean))


def _best(results: Sequence[Result], name: str, depth: int, variant: str) -> list[Any]:
    return found(results, name, depth=depth, variant=variant, lr=_rate(results, depth, variant))
