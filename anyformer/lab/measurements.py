"""Measure several experiments together: their cells share the workers, and each result goes to its experiment's file.

Timed experiments come first, one cell at a time, so that no other measurement disturbs them.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from anyformer.lab.cells import Cell, CellEngine, CellResult, Local, append, key, measure_each, read_results
from anyformer.lab.experiment import Experiment, Size
from anyformer.runs.processes import LOCK, locked

WHICH = "experiment"  # key of the name of its experiment in a cell


class AnyCell:
    """Picklable measurement of a cell that names its experiment."""

    def __init__(self, experiments: Sequence[Experiment]):
        self.experiments = {experiment.kind: experiment for experiment in experiments}

    def __call__(self, cell: Cell) -> dict[str, Any]:
        return self.experiments[cell[WHICH]].measure(_plain(cell))


def measure_together(
    experiments: Sequence[Experiment],
    size: Size,
    paths: Mapping[str, Path],
    *,
    engine: CellEngine | None = None,
    console: Console | None = None,
) -> dict[str, list[CellResult]]:
    """Measure all cells without a stored result in the file of their experiment; return all results by experiment."""
    timed = [experiment for experiment in experiments if experiment.timed]
    others = [experiment for experiment in experiments if not experiment.timed]
    others.sort(
        key=lambda e: e.minutes[2 if size == "gpu" else 1] / len(e.cells(size)), reverse=True
    )  # long cells first
    one_by_one = Local(1) if engine is None or isinstance(engine, Local) else engine
    found: dict[str, list[CellResult]] = {}
    with ExitStack() as stack:
        for experiment in experiments:
            stack.enter_context(locked(paths[experiment.kind].parent, f"{LOCK}-{experiment.kind}"))
        for some, where in ((timed, one_by_one), (others, engine)):
            stages = {experiment.kind: experiment.stages(size) for experiment in some}
            for number in range(max(map(len, stages.values()), default=0)):
                cells = {e.kind: list(chain(*stages[e.kind][: number + 1])) for e in some}
                found |= _measure(some, cells, paths, where, console)
                for experiment in some:
                    experiment.prepare(found[experiment.kind])
    return {e.kind: _in_order(found[e.kind], e.cells(size)) for e in experiments}


def _measure(
    experiments: Sequence[Experiment],
    cells: Mapping[str, Sequence[Cell]],
    paths: Mapping[str, Path],
    engine: CellEngine | None,
    console: Console | None,
) -> dict[str, list[CellResult]]:
    rules = {experiment.kind: experiment.rule(cells[experiment.kind]) for experiment in experiments}
    done = {name: {key(r.cell): r for r in read_results(paths[name])} for name in rules}
    left = [{WHICH: name, **cell} for name in rules for cell in cells[name] if key(cell) not in done[name]]
    total = sum(len(cells[name]) for name in rules)
    for result in measure_each(AnyCell(experiments), left, total, engine=engine, console=console):
        name = result.cell[WHICH]
        kept = replace(result, cell=_plain(result.cell), rule=rules[name])
        append(paths[name], kept)
        done[name][key(kept.cell)] = kept
    return {name: list(done[name].values()) for name in rules}


def _plain(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in cell.items() if name != WHICH}


def _in_order(results: Sequence[CellResult], cells: Sequence[Cell]) -> list[CellResult]:
    by_cell = {key(result.cell): result for result in results}
    return [by_cell[key(cell)] for cell in cells]
