"""Grids: all combinations of settings of a recipe, trained with several seeds under an equal budget.

base = "korean-chatbot"
set = ["model.width=64"]
axes = [
    { name = "position", fields = ["model.encoder.position", "model.decoder.position"], values = ["alibi", "rotary"] },
    { name = "depth", fields = ["model.encoder.depth", "model.decoder.depth"], values = [1, 2] },
]
seeds = [0, 1, 2]
budget = { kind = "steps", count = 300 }
"""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from rich.console import Console

from anyformer.config import ConfigError, Fault, Spec, io
from anyformer.config.overrides import assignment
from anyformer.config.spec import BY_KIND, MAX_WORD, Count, Positive, Size, shorten
from anyformer.lab.cells import (
    Cell,
    CellEngine,
    CellResult,
    append,
    key,
    measure_all,
    read_result,
    read_results,
    timed,
    write_result,
)
from anyformer.lab.claims import WHOLE, claimed, holder
from anyformer.lab.trial import trial, untrained
from anyformer.recipe import Recipe
from anyformer.recipe.ready import read_recipe
from anyformer.runs.processes import locked
from anyformer.training.machine import flops_per_token

MIN_STEPS = 20  # fewer steps show nothing
SAMPLE_BATCHES = 20  # batches from which tokens and FLOPs of a step are estimated

MAX_CELLS = 10_000  # of a grid

RESULTS = "results.jsonl"  # file of a grid's folder
CELLS = "cells"  # folder of a grid's folder: claims, and results of single cells


def _plain_value(value: object) -> object:
    """Return the value; raise one fault instead of one for each type of the union."""
    if not isinstance(value, (bool, int, float, str)) or (isinstance(value, float) and not math.isfinite(value)):
        shown = shorten(str(value), MAX_WORD)
        raise ConfigError([Fault("", f"= {shown}: must be true or false, a finite number or a string")])
    return value


Value = Annotated[bool | int | float | str, BeforeValidator(_plain_value)]


class Steps(Spec):
    """The same number of steps for every setting."""

    kind: Literal["steps"] = "steps"
    count: Size  # steps of each run


class TokenBudget(Spec):
    """The same number of tokens for every setting, without padding."""

    kind: Literal["tokens"] = "tokens"
    count: Size  # tokens of each run


class FlopBudget(Spec):
    """The same FLOPs for every setting, as predicted by `anyformer count`: an expensive model takes fewer steps."""

    kind: Literal["flops"] = "flops"
    count: Positive  # FLOPs of each run


Budget = Annotated[Steps | TokenBudget | FlopBudget, *BY_KIND]


class Axis(Spec):
    """An axis of a grid: fields of the recipe that take each of the values together, or settings by name."""

    name: Annotated[str, Field(min_length=1)]  # name of the axis in tables and figures
    fields: tuple[str, ...] = ()  # dotted paths in the recipe
    values: Annotated[tuple[Value, ...], Field(min_length=1)]  # values that the fields take, or names of `settings`
    # in place of fields: the overrides for each value, such as [[], ["model.tie=output", "train.ema=0.99"]]
    settings: tuple[tuple[str, ...], ...] = ()

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if bool(self.fields) == bool(self.settings):
            raise ConfigError([Fault("fields", "set the fields that take the values, or settings, and not both")])
        if self.settings and len(self.settings) != len(self.values):
            what = f"are {len(self.settings)}, and there are {len(self.values)} values: each needs one"
            raise ConfigError([Fault("settings", what)])
        return self

    def changes(self, value: Value) -> list[str]:
        """Return the overrides of the recipe for a value."""
        if self.settings:
            return list(self.settings[self.values.index(value)])
        return [f"{field}={_toml(value)}" for field in self.fields]


class Grid(Spec):
    """All combinations of the axes, each with every seed; the first is the baseline."""

    base: str  # a recipe, by name or file
    set: tuple[str, ...] = ()  # overrides for all runs: "model.width=64"
    axes: Annotated[tuple[Axis, ...], Field(min_length=1)]  # the settings that vary
    seeds: Annotated[tuple[Count, ...], Field(min_length=1)] = (0, 1, 2)  # seeds of every setting
    budget: Budget  # length of every run
    metric: str = "loss"  # compared on the validation data

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [axis.name for axis in self.axes]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError([Fault("axes", f"two axes are called '{twice[0]}'")])
        if taken := [name for name in names if name == "seed"]:
            raise ConfigError([Fault("axes", f"'{taken[0]}' is reserved: choose another name")])
        for i, axis in enumerate(self.axes):
            if same := [value for value in axis.values if axis.values.count(value) > 1]:
                raise ConfigError([Fault(f"axes.{i}.values", f"{same[0]!r} is there twice")])
        if (cells := math.prod(len(axis.values) for axis in self.axes) * len(self.seeds)) > MAX_CELLS:
            raise ConfigError([Fault("axes", f"give {cells:,} cells: a grid has at most {MAX_CELLS:,}")])
        return self

    def cells(self) -> list[Cell]:
        """Return all cells, seeds last."""
        varied = itertools.product(*(axis.values for axis in self.axes))
        names = [axis.name for axis in self.axes]
        return [{**dict(zip(names, values, strict=True)), "seed": seed} for values in varied for seed in self.seeds]

    @property
    def length(self) -> str:
        """The budget of each training in words: "400 steps"."""
        count = self.budget.count
        return f"{count:,.0f} {self.budget.kind}" if count < 1e9 else f"{count:.3g} {self.budget.kind}"

    @property
    def rates(self) -> list[str]:
        """The names of the axes of learning rates."""
        return [axis.name for axis in self.axes if any(field.endswith(".lr") for field in axis.fields)]

    def recipe(self, cell: Cell) -> Recipe:
        """Return the recipe of a cell, without the budget."""
        changes = [change for axis in self.axes for change in axis.changes(cell[axis.name])]
        return read_recipe(self.base, [*self.set, *changes, f"seed={cell['seed']}"])


class CellTraining:
    """Picklable measurement: trains a cell under the grid's budget."""

    def __init__(self, grid: Grid):
        self.grid = grid

    def __call__(self, cell: Cell) -> dict[str, Any]:
        return trial(apply_budget(self.grid.recipe(cell), self.grid.budget))


def run_grid(
    grid: Grid, out: str | Path, *, engine: CellEngine | None = None, console: Console | None = None
) -> list[CellResult]:
    """Train all cells into `out/results.jsonl`; stored results, those of `run_cell` too, are not trained again."""
    out = Path(out)
    _must_match(grid, out)  # before the check, which may read all data
    check(grid, grid.cells())
    with locked(out), claimed(out / CELLS, WHOLE):
        io.save(grid, out / "grid.toml")
        _gather(grid, out)
        if console is not None:
            count = len(grid.cells())
            text = f"{count} training{'s' if count > 1 else ''} of {grid.length}; a line for each that is finished"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
        return measure_all(CellTraining(grid), grid.cells(), out / RESULTS, engine=engine, console=console)


def run_cell(grid: Grid, out: str | Path, number: int, *, wait: bool = False) -> CellResult:
    """Train the cell with a number into `out/cells/NUMBER.json`, unless its result is stored; return the result.

    Workers on several machines may call this for one folder: a cell is trained by one at a time. Where another worker
    trains it now, `wait` until that ends, or raise `Claimed`. `run_grid` collects the results.
    """
    out, cells = Path(out), grid.cells()
    if not 0 <= number < len(cells):
        raise ConfigError([Fault("", f"there is no cell {number}: the grid has the cells 0 to {len(cells) - 1}")])
    _must_match(grid, out)
    if found := stored_results(grid, out, [number]).get(number):
        return found
    check(grid, [cells[number]])
    with claimed(out / CELLS, str(number), wait):
        if not (out / "grid.toml").is_file():
            io.save(grid, out / "grid.toml")
        _must_match(grid, out)
        if found := stored_results(grid, out, [number]).get(number):  # by another worker, since the check above
            return found
        result = timed(CellTraining(grid), cells[number])
        write_result(_cell_file(out, number), result)
    return result


def stored_results(grid: Grid, out: Path, numbers: Iterable[int]) -> dict[int, CellResult]:
    """Return the stored results of cells by their numbers."""
    cells = grid.cells()
    wanted = {key(cells[number]): number for number in numbers}
    single = {number: found for number in wanted.values() if (found := read_result(_cell_file(out, number)))}
    common = {wanted[key(result.cell)]: result for result in read_results(out / RESULTS) if key(result.cell) in wanted}
    return common | single


def cell_states(grid: Grid, out: Path) -> list[str]:
    """Return the state of each cell: "done", the worker that trains it, or nothing."""
    _must_match(grid, out)
    numbers = range(len(grid.cells()))
    done = stored_results(grid, out, numbers)
    return ["done" if number in done else holder(out / CELLS, str(number)) or "" for number in numbers]


def _gather(grid: Grid, out: Path) -> None:
    """Move the results of single cells to the common file."""
    common = {key(result.cell) for result in read_results(out / RESULTS)}
    for number in range(len(grid.cells())):
        path = _cell_file(out, number)
        if result := read_result(path):
            if key(result.cell) not in common:
                append(out / RESULTS, result)
            path.unlink(missing_ok=True)


def _cell_file(out: Path, number: int) -> Path:
    return out / CELLS / f"{number}.json"


def _must_match(grid: Grid, out: Path) -> None:
    """Raise if a folder has results of another grid."""
    kept = out / "grid.toml"
    if kept.is_file() and (before := io.load(Grid, kept)) != grid:
        what = f"{_differences(before, grid)}: choose another folder with --out, or delete that one"
        raise ConfigError([Fault(str(out), what)])


def _differences(before: Grid, now: Grid) -> str:
    """Return how the results of a folder differ from a grid: "holds results of 400 steps, not 200 steps"."""

    def words(grid: Grid) -> dict[str, str]:
        seeds = len(grid.seeds)
        return {
            "base": f"the recipe {grid.base}",
            "axes": " and ".join(f"{axis.name}={','.join(map(_plain, axis.values))}" for axis in grid.axes),
            "budget": grid.length,
            "seeds": f"{seeds} seed{'s' if seeds > 1 else ''}",
            "metric": f"the metric {grid.metric}",
            "set": " ".join(grid.set) or "no other settings",
        }

    old, new = words(before), words(now)
    names = [name for name in old if getattr(before, name) != getattr(now, name)]
    if "budget" in names and "set" in names:
        names.remove("set")  # the warm-up follows from the steps
    found = [f"{old[name]}, not {new[name]}" if old[name] != new[name] else f"other {name}" for name in names]
    return f"holds results of {'; of '.join(found)}"


def check(grid: Grid, cells: Sequence[Cell]) -> None:
    """Check the recipes of cells, before the first is trained."""
    one_each = {json.dumps({k: v for k, v in cell.items() if k != "seed"}): cell for cell in cells}
    for cell in one_each.values():
        setting = " ".join(f"{name}={value}" for name, value in cell.items() if name != "seed")
        try:
            recipe = grid.recipe(cell)
        except ConfigError as error:
            raise ConfigError(Fault(f"{setting}: {fault.path}", fault.message) for fault in error.faults) from None
        if recipe.data.valid is None:
            raise ConfigError([Fault("base", f"= '{grid.base}': has no data.valid, by which settings are compared")])
        if grid.metric not in (known := recipe.task.measures):
            raise ConfigError([Fault("metric", f"= '{grid.metric}': the task measures {', '.join(known)}")])
        apply_budget(recipe, grid.budget, setting)


def apply_budget(recipe: Recipe, budget: Budget, setting: str = "") -> Recipe:
    """Return the recipe with the steps that a budget allows; raise if these are too few."""
    match budget:
        case Steps(count=count):
            steps = count
        case TokenBudget(count=count):
            steps = int(count / _per_step(recipe)[0])
        case FlopBudget(count=amount):
            steps = int(amount / _per_step(recipe)[1])
    warmup = recipe.train.schedule.warmup
    if steps < MIN_STEPS or steps <= warmup:
        least = f"{max(MIN_STEPS, warmup + 1)} steps" + (
            f" (the warm-up takes {warmup})" if warmup >= MIN_STEPS else ""
        )
        where = f"budget for {setting}" if setting else "budget"
        raise ConfigError([Fault(where, f"pays for {steps} steps: too few to compare, give it at least {least}")])
    return io.override(recipe, [f"train.steps={steps}", "train.minutes=none"])


def _per_step(recipe: Recipe) -> tuple[float, float]:
    """Estimate tokens and FLOPs of a step from the first batches."""
    job = untrained(recipe)
    tokens, flops, place = 0, 0.0, job.state.cursor
    for _ in range(SAMPLE_BATCHES):
        batch, place = job.loader.read(place)
        tokens += batch.tokens
        flops += batch.slots * flops_per_token(job.model.config, batch)
    return tokens / SAMPLE_BATCHES * recipe.train.accumulate, flops / SAMPLE_BATCHES * recipe.train.accumulate


def _toml(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and value[:1] not in "{[" else _plain(value)


def _plain(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def grid_of_recipe(base: str, assignments: Sequence[str], steps: int | None = None, seeds: int = 3) -> Grid:
    """Return the grid of a recipe and `KEY=VALUE` or `KEY=VALUE,VALUE,…`: several values make an axis.

    `*` after `model` means every stack of the model: `model.*.position=alibi,rotary`. With fewer steps than the
    recipe's, the warm-up shrinks in proportion, unless it is given.
    """
    same, axes = list[str](), list[Axis]()
    recipe = read_recipe(base)
    stacks = [side for side in ("encoder", "decoder") if getattr(recipe.model, side)]
    for text in assignments:
        key, value = assignment(text)
        fields = [key.replace("model.*.", f"model.{side}.", 1) for side in stacks] if "model.*." in key else [key]
        if isinstance(value, str) and "," in value:
            values = tuple(assignment(f"{key}={part}")[1] for part in value.split(","))
            axes.append(Axis(name=key.rpartition(".")[2], fields=tuple(fields), values=values))
        else:
            same += [f"{field}={text.partition('=')[2]}" for field in fields]
    if not axes:
        raise ConfigError(
            [Fault("", "nothing varies: give a key several values, such as 'model.*.position=alibi,rotary'")]
        )
    count, warmup = steps or recipe.train.steps, recipe.train.schedule.warmup
    if count < recipe.train.steps and not any("schedule" in text for text in same):
        same.append(f"train.schedule.warmup={warmup * count // recipe.train.steps}")
    return Grid(base=base, set=tuple(same), axes=tuple(axes), seeds=tuple(range(seeds)), budget=Steps(count=count))


def load_grid(path: str | Path, changes: Sequence[str] = ()) -> Grid:
    """Load a grid from a file, with overrides."""
    return io.override(io.load(Grid, path), changes)
