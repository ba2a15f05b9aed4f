"""Experiments measured together: one pool, a file for each, timed ones first, and nothing measured twice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from anyformer.cli.app import app
from anyformer.lab.cells import Cell, CellResult, read_results
from anyformer.lab.decision import Fact, Verdict, decide
from anyformer.lab.experiment import Experiment, Rows, Size
from anyformer.lab.measurements import measure_together
from tests.lab.made_up import NAMES

MEASURED: list[tuple[str, int]] = []  # in this process


class Squares(Experiment):
    kind: Literal["squares"] = "squares"
    claim, prediction, minutes = "Squares are not negative.", "All are 0 or more.", (1.0, 1.0, 1.0)

    def cells(self, size: Size) -> list[Cell]:
        return [{"x": x} for x in range(4)]

    def measure(self, cell: Cell) -> dict[str, Any]:
        assert set(cell) == {"x"}
        MEASURED.append((self.kind, cell["x"]))
        return {"y": cell["x"] ** 2}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        return decide([Fact("none is negative", all(r["y"] >= 0 for r in results))])

    def table(self, results: Sequence[CellResult]) -> Rows:
        return [("x",)]

    def draw(self, results: Sequence[CellResult]) -> Any: ...


class Timed(Squares):
    kind: Literal["timed"] = "timed"
    timed = True


class Staged(Squares):
    """The second half is measured with what the first half gave."""

    kind: Literal["staged"] = "staged"
    _best: int = -1

    def stages(self, size: Size) -> list[list[Cell]]:
        return [self.cells(size)[:2], self.cells(size)[2:]]

    def prepare(self, results: Sequence[CellResult]) -> None:
        self._best = max(r["y"] for r in results)

    def measure(self, cell: Cell) -> dict[str, Any]:
        return {**super().measure(cell), "best": self._best}


@pytest.fixture(autouse=True)
def nothing_measured() -> None:
    MEASURED.clear()


def paths(folder: Path) -> dict[str, Path]:
    return {name: folder / f"{name}.jsonl" for name in ("squares", "timed", "staged")}


def test_results_go_to_the_file_of_their_experiment(tmp_path: Path) -> None:
    chosen = [Squares(), Timed()]
    found = measure_together(chosen, "quick", paths(tmp_path))
    assert {name: [r["y"] for r in some] for name, some in found.items()} == {name: [0, 1, 4, 9] for name in found}
    for experiment in chosen:
        assert read_results(paths(tmp_path)[experiment.kind]) == found[experiment.kind]
        assert {r.rule for r in found[experiment.kind]} == {experiment.rule(experiment.cells("quick"))}


def test_timed_experiments_come_first(tmp_path: Path) -> None:
    measure_together([Squares(), Timed()], "quick", paths(tmp_path))
    assert [name for name, _ in MEASURED] == ["timed"] * 4 + ["squares"] * 4


def test_nothing_is_measured_twice(tmp_path: Path) -> None:
    measure_together([Squares()], "quick", paths(tmp_path))
    lines = paths(tmp_path)["squares"].read_text(encoding="utf-8").splitlines(keepends=True)
    paths(tmp_path)["squares"].write_text("".join(lines[:3]), encoding="utf-8")  # stopped after three
    MEASURED.clear()
    found = measure_together([Timed(), Squares()], "quick", paths(tmp_path))
    assert [x for name, x in MEASURED if name == "squares"] == [3]
    assert [r["y"] for r in found["squares"]] == [0, 1, 4, 9]


def test_a_stage_has_the_results_of_those_before(tmp_path: Path) -> None:
    found = measure_together([Squares(), Staged()], "quick", paths(tmp_path))
    assert [r["best"] for r in found["staged"]] == [-1, -1, 1, 1]


def test_the_list_has_a_verdict_or_an_estimate_for_every_claim() -> None:
    listed = CliRunner().invoke(app, ["lab"], env={"COLUMNS": "300"}).output
    rows = {name: line for name in NAMES for line in listed.splitlines() if f" {name} " in line}
    assert rows.keys() == {*NAMES}
    assert all(line.rstrip().endswith("min") for line in rows.values())
