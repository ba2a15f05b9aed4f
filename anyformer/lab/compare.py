"""Compare the settings of a grid: mean ± deviation over seeds, and a test against the baseline."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from anyformer.lab.cells import CellResult
from anyformer.lab.decision import Side
from anyformer.lab.figures import bars, curves, legend, panels, save
from anyformer.lab.grid import Grid
from anyformer.lab.stats import Summary, is_constant, summary, tabled_test, welch, written_test
from anyformer.recipe import is_lower_better


@dataclass(frozen=True)
class Line:
    """Results of one setting over all seeds."""

    setting: dict[str, Any]
    values: tuple[float, ...]  # of the metric, for runs that did not diverge
    diverged: int
    difference: str  # p value against the baseline as text; empty for the baseline or one seed
    steps: float
    flops: float
    parameters: int
    seconds: float
    others: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # further metrics of the task

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.setting.items())

    @property
    def summary(self) -> Summary:
        return summary(self.values)


def settings(results: Iterable[CellResult]) -> dict[str, list[CellResult]]:
    """Group results by setting, over all seeds, in the order of the results."""
    found: dict[str, list[CellResult]] = {}
    for result in results:
        varied = {name: value for name, value in result.cell.items() if name != "seed"}
        found.setdefault(json.dumps(varied), []).append(result)
    return found


def compare(grid: Grid, results: Sequence[CellResult]) -> list[Line]:
    """Return a line for each setting; the first is the baseline."""
    metric, measures = grid.metric, grid.recipe(results[0].cell).task.measures
    lines, baseline = list[Line](), tuple[float, ...]()
    for number, (varied, some) in enumerate(settings(results).items()):
        complete = [r.found for r in some if not r.found["diverged"]]
        values = tuple(float(found[metric]) for found in complete)
        known = [name for name in measures if name != metric and complete and name in complete[0]]
        if number == 0:
            baseline = values
        lines.append(
            Line(
                json.loads(varied),
                values,
                diverged=sum(r.found["diverged"] for r in some),
                difference="" if number == 0 else tabled_test(values, baseline),
                steps=summary([r.found["steps"] for r in some]).mean,
                flops=summary([r.found["flops"] for r in some]).mean,
                parameters=some[0].found["parameters"],
                seconds=summary([r.seconds for r in some]).mean,
                others={name: tuple(float(found[name]) for found in complete) for name in known},
            )
        )
    return lines


SIGNIFICANT = 0.05  # p values below it


def cells(lines: Sequence[Line], metric: str) -> list[tuple[str, ...]]:
    """Return a table with its header first."""
    others = list(dict.fromkeys(name for line in lines for name in line.others))
    diverged = any(line.diverged for line in lines)
    header = ("setting", metric, "p vs first row", *others, "parameters", "steps", "FLOPs", "seconds")
    rows = [(*header, "diverged") if diverged else header]
    for line in lines:
        found = str(line.summary) if line.values else "-"
        seeds = line.diverged + len(line.values)
        rows.append(
            (
                line.name,
                found,
                line.difference,
                *(str(summary(line.others[name])) if line.others.get(name) else "-" for name in others),
                f"{line.parameters:,}",
                f"{line.steps:,.0f}",
                f"{line.flops:.2e}",
                f"{line.seconds:,.0f}",
                *([f"{line.diverged} of {seeds}" if line.diverged else ""] if diverged else []),
            )
        )
    return rows


def verdict(lines: Sequence[Line], metric: str, rates: Sequence[str] = ()) -> str:
    """Return the best setting, and from which others it differs significantly over the seeds, in a sentence.

    `rates` names the axes of learning rates: one that is best at an end of those tried may be better beyond it.
    """
    ranked = sorted((line for line in lines if line.values), key=lambda line: line.summary.mean)
    if not ranked:
        return "no verdict: every training diverged"
    best, *others = ranked if is_lower_better(metric) else ranked[::-1]
    head = f"best: {best.name} ({metric} {best.summary})"
    for name in rates:
        side = _side(best, lines, metric, name)
        if side.end:
            head += f"; undecided, since {name}={side.best:g} is the {side.end} tried: add one beyond it"
    tests = [(line, welch(best.values, line.values)) for line in others]
    if not tests:
        return head
    if all(math.isnan(p) for _, p in tests):
        return f"{head}; with one seed each, a difference may be chance: use more seeds"
    fixed = [line for line in others if is_constant(best.values) and is_constant(line.values)]  # nothing to test
    tests = [(line, p) for line, p in tests if line not in fixed]
    for words, found in (
        ("better than", [line for line in fixed if line.values[0] != best.values[0]]),
        ("equal to", [line for line in fixed if line.values[0] == best.values[0]]),
        ("significantly better than", [line for line, p in tests if p < SIGNIFICANT]),
        ("not significantly better than", [line for line, p in tests if p >= SIGNIFICANT]),
    ):
        if found:
            each = (f"{line.name} ({written_test(best.values, line.values)})" for line in found)
            head += f"; {words} {', '.join(each)}"
    return head


def _side(best: Line, lines: Sequence[Line], metric: str, rate: str) -> Side:
    """Return the scores by learning rate of the lines that equal the best one in all else."""
    worst = [math.inf if is_lower_better(metric) else -math.inf]  # where every training diverged
    same = [line for line in lines if {**line.setting, rate: 0} == {**best.setting, rate: 0}]
    scores = {float(line.setting[rate]): line.values or worst for line in same}
    return Side(rate, scores, higher=not is_lower_better(metric))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in Markdown, the first one as its head."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table for a terminal, with columns of equal width."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in padded)


def report(grid: Grid, results: Sequence[CellResult], out: Path) -> Path:
    """Write `README.md` and its figure to the folder of a grid."""
    lines = compare(grid, results)
    figure, (left, right) = panels(2, height=max(3.2, 1.2 + 0.3 * len(lines)))
    bars(left, {", ".join(str(v) for v in line.setting.values()): line.values for line in lines})
    left.set(xlabel=f"validation {grid.metric}", ylabel=", ".join(axis.name for axis in grid.axes))
    named = {
        ", ".join(str(v) for v in json.loads(varied).values()): [r.found["curve"] for r in some]
        for varied, some in settings(results).items()
    }
    curves(right, named)
    legend(figure, right)
    save(figure, out / "figure.png")
    text = f"""# {out.name}

`{grid.base}` varied by {", ".join(axis.name for axis in grid.axes)}; {len(grid.seeds)} seeds; each {grid.length}.
Mean ± standard deviation over seeds; p is Welch's test against the first setting. {results[0].machine}.

{markdown(cells(lines, grid.metric))}
{verdict(lines, grid.metric, grid.rates)}

![Validation {grid.metric} of each setting, and training loss by step](figure.png)
"""
    (out / "README.md").write_text(text, encoding="utf-8")
    return out / "README.md"
