"""The base class of experiments: a claim, the cells to measure, and a verdict computed from the results."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.console import Console

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import did_you_mean
from anyformer.lab.cells import Cell, Engine, Result, measure_all
from anyformer.processes import LOCK, locked

Size = Literal["quick", "cpu", "gpu"]
Word = Literal["holds", "does not hold here", "undecided at this size"]
Rows = Sequence[Sequence[str]]  # a table, its header first


@dataclass(frozen=True)
class Verdict:
    """The result of a claim, with the numbers that support it."""

    word: Word
    why: str

    def __str__(self) -> str:
        return f"{self.word}: {self.why}"


def verdict(holds: bool | None, why: str) -> Verdict:
    """Return a verdict; None is undecided."""
    if holds is None:
        return Verdict("undecided at this size", why)
    return Verdict("holds" if holds else "does not hold here", why)


class Experiment(ABC):
    """One claim. A cell holds everything that its measurement depends on, so stale results are never reused."""

    name: ClassVar[str]
    number: ClassVar[int]  # of the claim
    claim: ClassVar[str]  # in one sentence
    idea: ClassVar[str]  # for a learner: a few sentences with the formula, in Markdown
    prediction: ClassVar[str]  # what must be observed if the claim is true
    parts: ClassVar[tuple[str, ...]]  # files of the package that it is about: "attention/attend.py"
    # quick, cpu, gpu: with two jobs on two cores, or on a GPU; estimated where docs/lab has no results of that size
    minutes: ClassVar[tuple[float, float, float]]
    alt: ClassVar[str]  # what the figure shows, in one sentence: its alternative text
    changed: ClassVar[str] = ""  # what was changed after a look at the data, in one sentence

    @abstractmethod
    def cells(self, size: Size) -> list[Cell]:
        """Return the cells to measure."""

    @abstractmethod
    def measure(self, cell: Cell) -> dict[str, Any]:
        """Measure one cell, in a separate process."""

    @abstractmethod
    def judge(self, results: Sequence[Result]) -> Verdict: ...

    @abstractmethod
    def table(self, results: Sequence[Result]) -> Rows: ...

    def remark(self, results: Sequence[Result]) -> str:
        """Return what the results show beyond the claim in a sentence or two, or nothing."""
        return ""

    @abstractmethod
    def draw(self, results: Sequence[Result]) -> Any:
        """Return a figure made by `lab/figures.py`."""

    def run(
        self, size: Size, path: Path, *, engine: Engine | None = None, console: Console | None = None
    ) -> list[Result]:
        """Measure the cells without a stored result. Other experiments may run at the same time."""
        with locked(path.parent, f"{LOCK}-{self.name}"):
            return measure_all(self.measure, self.cells(size), path, engine=engine, console=console)


# By the number of their claim. A file of `experiments/` has one class, called `Claim`.
NAMES = (
    "costs",
    "layers",
    "heads",
    "scale",
    "norms",
    "positions",
    "warmup",
    "extrapolation",
    "cache",
    "bigbird",
    "forcing",
    "batchnorm",
    "variants",
    "little_data",
    "diversity",
    "credit",
    "cheating",
    "bigram",
    "muon",
    "width",
    "recall",
)


def find(name: str) -> Experiment:
    """Return an experiment by its name."""
    if name not in NAMES:
        raise ConfigError([Fault("", f"'{name}' is not an experiment; {did_you_mean(name, NAMES)}")])
    experiment: Experiment = importlib.import_module(f"anyformer.lab.experiments.{name}").Claim()
    return experiment


def every() -> list[Experiment]:
    return [find(name) for name in NAMES]
