"""The base class of experiments: a claim, the cells to measure, and a verdict computed from the results.

An experiment states before it is measured, in a file of texts (`NAME.toml`), its hypothesis (`claim`), measure
(`measured`) and decision rule (`prediction`), and in code beside it (`NAME.py`) that rule (`judge`), seeds and sizes
(`cells`). The hash of the rule is stored with every result.
"""

import importlib
import inspect
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import did_you_mean
from anyformer.lab.cells import Cell, CellResult
from anyformer.lab.decision import Side, Verdict as Verdict, Word as Word, require_inside, verdict as verdict
from anyformer.lab.rules import rule_hash, tries_rates

Size = Literal["quick", "cpu", "gpu"]
Rows = Sequence[Sequence[str]]  # a table, its header first


class Experiment(ABC):
    """One claim. A cell holds everything that its measurement depends on, so stale results are never reused."""

    name: ClassVar[str]  # of its files
    number: ClassVar[int]  # of the claim
    timed: ClassVar[bool] = False  # whether cells measure time: they are measured one after another

    # texts, in Markdown, and facts for the page
    claim: ClassVar[str]  # the hypothesis in one sentence
    idea: ClassVar[str]  # for a learner: a few sentences with the formula
    measured: ClassVar[str] = ""  # what is measured of each cell, in one sentence
    prediction: ClassVar[str]  # the decision rule: what must be observed if the claim is true
    explanation: ClassVar[str] = ""  # what the words of the rule mean, beside it and no part of it
    unit: ClassVar[str] = ""  # of losses: "nats per token"
    sizes: ClassVar[dict[str, str]] = {}  # values of cells for the set-up and how they are written; "" leaves one out
    columns: ClassVar[str] = ""  # the meaning of the table's columns
    limits: ClassVar[str] = ""  # what the results do not show, in one or two sentences
    sources: ClassVar[Sequence[str]] = ()  # papers: "Vaswani et al. (2017), [Title](URL)"
    parts: ClassVar[Sequence[str]]  # files of the package that it is about: "attention/attend.py"
    minutes: ClassVar[Sequence[float]]  # quick, cpu, gpu: estimates, listed where nothing is measured
    alt: ClassVar[str]  # what the figure shows, in one sentence: its alternative text
    spread: ClassVar[str] = "Bands: one standard deviation over seeds."  # in the figure, where there are seeds
    changed: ClassVar[str] = ""  # what was changed after a look at the data, in one sentence

    def __init_subclass__(cls) -> None:
        """Set the texts of the TOML file beside the class's own file, if there is one."""
        file = Path(inspect.getfile(cls)).with_suffix(".toml")
        if file.exists():
            cls.name, cls.number = file.stem, NAMES.index(file.stem) + 1
            for field, value in tomllib.loads(file.read_text(encoding="utf-8")).items():
                setattr(cls, field, value)

    def rule(self, cells: Sequence[Cell]) -> str:
        """Return the hash of the decision rule for these cells."""
        return rule_hash(type(self), tries_rates(cells))

    @abstractmethod
    def cells(self, size: Size) -> list[Cell]:
        """Return the cells to measure."""

    def stages(self, size: Size) -> list[list[Cell]]:
        """Return the cells in groups, each of which needs the results of those before it."""
        return [self.cells(size)]

    def prepare(self, results: Sequence[CellResult]) -> None:  # noqa: B027 - optional
        """Read the results of the stages so far, before the next is measured."""

    @abstractmethod
    def measure(self, cell: Cell) -> dict[str, Any]:
        """Measure one cell, in a separate process."""

    @abstractmethod
    def judge(self, results: Sequence[CellResult]) -> Verdict:
        """Return the verdict by the claim's conditions. Their code, and what it uses, is hashed and stored."""

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        """Return the sides of the comparisons that `judge` makes at the best of several learning rates."""
        return []

    def verdict(self, results: Sequence[CellResult]) -> Verdict:
        """Return the verdict by `judge`; undecided if a best learning rate is at an end of those tried."""
        return require_inside(self.judge(results), self.sides(results))

    def setting(self, results: Sequence[CellResult]) -> str:
        """Return the models and the data of results in a sentence or two, beside the sizes that the cells hold."""
        return ""

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        """Return what to write beside the observations of conditions, by the name of the condition."""
        return {}

    def caption(self, results: Sequence[CellResult]) -> str:
        """Return how to read the figure, in a sentence or two, after its alternative text."""
        return ""

    def result(self, results: Sequence[CellResult]) -> str:
        """Return the result in a few sentences: the numbers that matter, in words that fit every verdict and size."""
        return ""

    @abstractmethod
    def table(self, results: Sequence[CellResult]) -> Rows: ...

    def remark(self, results: Sequence[CellResult]) -> str:
        """Return what the results show beyond the claim in a sentence or two, or nothing."""
        return ""

    @abstractmethod
    def draw(self, results: Sequence[CellResult]) -> Any:
        """Return a figure made by `lab/figures.py`."""


# By the number of their claim. A module of `experiments/` has one class, called `Claim`, and its texts beside it.
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
    "experts",
    "sort_positions",
    "tagging",
    "encoder_decoder",
    "graph",
)


def find(name: str) -> Experiment:
    """Return an experiment by its name."""
    if name not in NAMES:
        raise ConfigError([Fault("", f"'{name}' is not an experiment; {did_you_mean(name, NAMES)}")])
    experiment: Experiment = importlib.import_module(f"anyformer.lab.experiments.{name}").Claim()
    return experiment


def every() -> list[Experiment]:
    return [find(name) for name in NAMES]
