"""Muon and AdamW with equal tuning: the lowest validation loss of each, and the steps that it takes."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import PrivateAttr

from anyformer.config import ModelConfig
from anyformer.lab.api import Cell, CellResult, Experiment, More, Rows, Side, Size, Verdict, decide, summary, trained
from anyformer.lab.figures import label_ends, lines, log_ticks, panels, reference
from anyformer.recipe import Recipe
from anyformer.training.api import read_metrics, read_recipe
from anyformer_claims.common import WIDER, seeds

NAMES = {"adamw": "AdamW", "muon": "Muon"}
OPTIMISERS = tuple(NAMES)
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)  # tried with each
TUNING_SEED = 100  # no other training has it
DECAY = {"shakespeare-gpu": 0.1, "shakespeare": 0.1}  # of matrices, by recipe; else none: theirs is Adam without decay
EVALUATIONS: dict[Size, int] = {"quick": 4, "cpu": 10, "gpu": 20}  # in a training
WHAT = {
    "shakespeare": "the next character of Tiny Shakespeare",
    "shakespeare-gpu": "the next character of Tiny Shakespeare",
    "reverse": "1 to 11 digits in reverse order",
    "multi30k-en-de": "English captions of pictures in German",
}
TIE = 0.02  # nats: losses of two rates in tuning that are nearer than this are called tied
CLOSE = 0.1  # of the fall of the loss: a smaller difference at the end is enlarged in the figure
NO_LOSS = 100.0  # of a training that diverged before its first evaluation

LITTLE_VALID = "data.valid={kind='text', path='tinyshakespeare/input.txt', start=0.99}"
SMALL_TEXT = ("model.width=32", "model.decoder.depth=1", "batches.rows=8", "batches.length=32", LITTLE_VALID)
SMALL_PAIRS = ("model.width=32", "model.decoder.depth=1", "batches.tokens=256", "data.valid.count=100")
# recipe: steps of a tuning and of a last training, changes
TASKS: dict[Size, dict[str, tuple[int, int, tuple[str, ...]]]] = {
    "quick": {"shakespeare": (40, 120, SMALL_TEXT), "reverse": (40, 120, SMALL_PAIRS)},
    "cpu": {"shakespeare": (100, 400, SMALL_TEXT), "reverse": (100, 400, SMALL_PAIRS)},
    "gpu": {"shakespeare-gpu": (300, 1500, ()), "multi30k-en-de": (300, 1500, ())},
}


class Claim(Experiment):
    kind: Literal["muon"] = "muon"

    # learning rate by recipe and optimiser, once it is tuned
    _best: dict[tuple[str, str], float] = PrivateAttr(default_factory=dict)

    def cells(self, size: Size) -> list[Cell]:
        found: list[Cell] = []
        for recipe, (short, long, changes) in TASKS[size].items():
            for optimizer in OPTIMISERS:
                task = {"recipe": recipe, "optimizer": optimizer, "changes": list(changes), "tuning": short}
                task["evaluations"] = EVALUATIONS[size]
                found += [{**task, "steps": short, "rates": [lr], "seed": TUNING_SEED} for lr in RATES]
                found += [
                    {**task, "steps": long, "rates": list(RATES), "seed": seed} for seed in seeds(size, first=WIDER)
                ]
        return found

    def stages(self, size: Size) -> list[list[Cell]]:
        """Return the tunings first: the last trainings of all seeds use their best rate."""
        cells = self.cells(size)
        return [[cell for cell in cells if (len(cell["rates"]) == 1) is tuning] for tuning in (True, False)]

    def prepare(self, results: Sequence[CellResult]) -> None:
        self._best = {(r, one): _tuning(results, r, one).best for r in _recipes(results) for one in OPTIMISERS}

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Train with the only rate of a cell, or with the best of several."""
        rates = cell["rates"]
        lr = rates[0] if len(rates) == 1 else self._best.get((cell["recipe"], cell["optimizer"]))
        if lr is None:
            tunings = [{**cell, "steps": cell["tuning"], "rates": [rate], "seed": TUNING_SEED} for rate in rates]
            lr = min(tunings, key=lambda one: self.measure(one)["best"])["rates"][0]
        with trained(_recipe(cell, lr)) as over:
            rows = [row for row in read_metrics(over.job.out) if "valid_loss" in row]
            curve = [[row["step"], round(row["valid_loss"], 5)] for row in rows]
            best = min((loss for _, loss in curve), default=NO_LOSS)
            return {"lr": lr, "best": best, "diverged": over.diverged, "valid": curve, "curve": over.curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        losses = {recipe: _losses(results, recipe) for recipe in _recipes(results)}
        return decide(
            [
                More(f"lowest validation loss in {name}, AdamW - Muon", x["adamw"], x["muon"])
                for name, x in losses.items()
            ]
        )

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        return [_tuning(results, recipe, one) for recipe in _recipes(results) for one in OPTIMISERS]

    def result(self, results: Sequence[CellResult]) -> str:
        facts = []
        for recipe in _recipes(results):
            losses = _losses(results, recipe)
            adamw, muon = (summary(losses[one]).mean for one in NAMES)
            lowest, reached = _steps_to(results, recipe, adamw)
            ahead = "does not reach that" if reached is None else f"reaches that of AdamW by step {reached:,g}"
            facts.append(
                f"in `{recipe}` {adamw:.3f} with AdamW, at step {lowest:,g}, and {muon:.3f} with Muon, which {ahead}"
            )
        return f"Tuned equally, the lowest validation loss is {'; '.join(facts)}."

    def setting(self, results: Sequence[CellResult]) -> str:
        """Describe tasks and models, from the recipes."""
        each = []
        for recipe in _recipes(results):
            cell = _last(results, recipe, OPTIMISERS[0])[0].cell
            found = _recipe(cell, RATES[0])
            assert isinstance(found.model, ModelConfig)
            depths = " and ".join(f"{name} of depth {stack.depth}" for name, stack in found.model.stacks.items())
            sizes = {name: f"{value:,}" for name, value in found.batches if name in ("rows", "length", "tokens")}
            batches = f"{sizes['rows']} rows of {sizes['length']}" if "rows" in sizes else sizes["tokens"]
            each.append(
                f"Recipe `{recipe}` ({WHAT[recipe]}): width {found.model.width}, {depths}; batches of {batches} tokens;"
                f" warm-up in the first {100 * found.train.schedule.warmup / cell['steps']:.0f} % of the steps, then "
                f"the schedule `{found.train.schedule.kind}`; weight decay {DECAY.get(recipe, 0.0):g}."
            )
        steps, short = results[-1]["steps"], results[-1]["tuning"]
        return (
            f"{' '.join(each)} Each rate is tried for {short:,} steps; the comparison takes {steps:,} steps, with a "
            f"warm-up that is longer in proportion, and evaluates every {steps // results[-1]['evaluations']} steps."
        )

    def remark(self, results: Sequence[CellResult]) -> str:
        """Name the rates that are nearly tied with the best one in tuning."""
        ties = []
        for recipe in _recipes(results):
            for optimizer, name in NAMES.items():
                losses = {lr: loss for lr, (loss,) in _tuning(results, recipe, optimizer).scores.items()}
                near = sorted(lr for lr, loss in losses.items() if loss < min(losses.values()) + TIE)
                if len(near) > 1:
                    each = ", ".join(f"{losses[lr]:.3f} at {lr:g}" for lr in near)
                    ties.append(f"{name} in `{recipe}` ({each})")
        return (
            f"In tuning, with one seed, several rates are within {TIE} nats of the best, so that the choice among them "
            f"is close to arbitrary: {'; '.join(ties)}."
            if ties
            else ""
        )

    def caption(self, results: Sequence[CellResult]) -> str:
        zoomed = any(_is_close(results, recipe) for recipe in _recipes(results))
        inset = " The inset enlarges the last third." if zoomed else ""
        return f"Left: dashed grey is AdamW's lowest loss, mean over seeds.{inset} Right: one seed, for tuning alone."

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [("task", "optimiser", "best rate", "lowest validation loss")]
        for recipe in _recipes(results):
            for optimizer, losses in _losses(results, recipe).items():
                lr = _last(results, recipe, optimizer)[0]["lr"]
                rows.append((recipe, NAMES[optimizer], f"{lr:g}", str(summary(losses))))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        recipes = _recipes(results)
        figure, axes = panels(2 * len(recipes))
        for i, recipe in enumerate(recipes):
            left, right = axes[2 * i : 2 * i + 2]
            named = {NAMES[one]: _points(r["valid"] for r in _last(results, recipe, one)) for one in OPTIMISERS}
            lines(left, named, marks=False)
            reference(left, summary(_losses(results, recipe)["adamw"]).mean)
            left.set(title=recipe, xlabel="step", ylabel="validation loss, nats per token")
            if _is_close(results, recipe):
                inset, last = left.inset_axes((0.45, 0.42, 0.52, 0.55)), max(named["AdamW"])
                ends = {name: {x: y for x, y in points.items() if x >= last * 2 / 3} for name, points in named.items()}
                lines(inset, ends, marks=False)
                reference(inset, summary(_losses(results, recipe)["adamw"]).mean)
                inset.grid(alpha=0.25, linewidth=0.6)
                inset.tick_params(labelsize=8)
            lines(right, {NAMES[one]: _tuning(results, recipe, one).scores for one in OPTIMISERS})
            log_ticks(right, list(_tuning(results, recipe, OPTIMISERS[0]).scores))
            right.tick_params(axis="x", rotation=30)
            title = f"{recipe}: tuning, {results[0]['tuning']} steps"
            right.set(title=title, xlabel="learning rate", ylabel="lowest validation loss, nats")
        for axis in axes:
            label_ends(axis)
        return figure


def _recipe(cell: Cell, lr: float) -> Recipe:
    steps, name = cell["steps"], cell["recipe"]
    base = read_recipe(name, cell["changes"])
    betas = list(getattr(base.train.optimizer, "betas", (0.9, 0.95)))
    optimizer = f"{{kind='{cell['optimizer']}', lr={lr}, betas={betas}, weight_decay={DECAY.get(name, 0.0)}}}"
    warmup = max(1, round(base.train.schedule.warmup / base.train.steps * steps))
    changes = [
        f"train.steps={steps}",
        f"train.optimizer={optimizer}",
        f"train.schedule.warmup={warmup}",
        f"train.evaluate_every={max(1, steps // cell['evaluations'])}",
        "train.save_every=none",
        "train.average=1",
        "train.keep=1",
        f"seed={cell['seed']}",
    ]
    metrics = ["task.metrics=[]"] if base.task.kind == "seq2seq" else []  # the loss alone: no decoding
    return read_recipe(name, [*cell["changes"], *changes, *metrics])


def _tuning(results: Sequence[CellResult], recipe: str, optimizer: str) -> Side:
    """Return the loss of each rate in tuning, with one seed."""
    some = [r for r in results if (r["recipe"], r["optimizer"]) == (recipe, optimizer) and len(r["rates"]) == 1]
    return Side(f"{NAMES[optimizer]} in {recipe}", {r["lr"]: [r["best"]] for r in some})


def _recipes(results: Sequence[CellResult]) -> list[str]:
    return list(dict.fromkeys(r["recipe"] for r in results))


def _last(results: Sequence[CellResult], recipe: str, optimizer: str) -> list[CellResult]:
    """Return the trainings on fresh seeds."""
    some = [r for r in results if r["recipe"] == recipe and r["optimizer"] == optimizer]
    return [r for r in some if len(r["rates"]) > 1]


def _losses(results: Sequence[CellResult], recipe: str) -> dict[str, list[float]]:
    return {one: [r["best"] for r in _last(results, recipe, one)] for one in OPTIMISERS}


def _is_close(results: Sequence[CellResult], recipe: str) -> bool:
    """Test whether the last losses are hard to tell apart beside the first ones."""
    adamw, muon = (summary(losses).mean for losses in _losses(results, recipe).values())
    first = summary([r["valid"][0][1] for r in _last(results, recipe, "adamw")]).mean
    return abs(adamw - muon) < CLOSE * (first - min(adamw, muon))


def _points(curves: Any) -> dict[float, list[float]]:
    points: dict[float, list[float]] = {}
    for curve in curves:
        for step, loss in curve:
            points.setdefault(step, []).append(loss)
    return points


def _steps_to(results: Sequence[CellResult], recipe: str, loss: float) -> tuple[float, float | None]:
    """Return at which evaluation AdamW's mean loss is lowest, and at which Muon's is first as low as `loss`."""
    means = {one: _points(r["valid"] for r in _last(results, recipe, one)) for one in OPTIMISERS}
    steps = sorted(means["muon"])
    first = next((step for step in steps if summary(means["muon"][step]).mean <= loss), None)
    lowest = min(means["adamw"], key=lambda step: summary(means["adamw"][step]).mean)
    return lowest, first
