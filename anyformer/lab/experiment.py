"""The base class of experiments: a claim, the cells to measure, and a verdict computed from the results.

An experiment states before it is measured its hypothesis (`claim`), measure (`measured`), decision rule (`prediction`),
the code of that rule (`judge`), and seeds and sizes (`cells`). The texts are class attributes, or stand beside the file
of the class in `KIND.toml`. The hash of the rule is stored with every result.
"""

import inspect
import json
import math
import tomllib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from anyformer.config import ConfigError, Fault
from anyformer.config.outside import find as find_parts
from anyformer.config.part import Part, kind_of
from anyformer.config.spec import did_you_mean
from anyformer.lab.cells import Cell, CellResult
from anyformer.lab.decision import Side, Verdict, require_inside
from anyformer.lab.rules import rule_hash, tries_rates

GROUP = "anyformer.claims"  # of entry points: modules with experiments, which only `anyformer lab` imports
OTHERS = (
    "ours are in the package anyformer-claims (pip install anyformer-claims, or ./claims in the repository), "
    "yours in a file: --import FILE"
)
NEEDED = ("claim", "prediction", "minutes")  # texts and facts that every experiment has
VERDICTS = "verdicts.json"  # beside the files of experiments: their verdicts in published results

Size = Literal["quick", "cpu", "gpu"]
SIZES: tuple[Size, ...] = ("quick", "cpu", "gpu")
Rows = Sequence[Sequence[str]]  # a table, its header first


class StoredVerdict(NamedTuple):
    """A published verdict, the hash of the rule under which its data was measured, and the minutes that this took."""

    word: str
    rule: str
    minutes: float


class Experiment(Part):
    """One claim. A cell holds everything that its measurement depends on, so stale results are never reused."""

    number: ClassVar[int] = 0  # of the claim in lists; 0: it has none
    timed: ClassVar[bool] = False  # whether cells measure time: they are measured one after another

    # texts, in Markdown, and facts for the page
    claim: ClassVar[str]  # the hypothesis in one sentence
    idea: ClassVar[str] = ""  # for a learner: a few sentences with the formula
    measured: ClassVar[str] = ""  # what is measured of each cell, in one sentence
    prediction: ClassVar[str]  # the decision rule: what must be observed if the claim is true
    explanation: ClassVar[str] = ""  # what the words of the rule mean, beside it and no part of it
    unit: ClassVar[str] = ""  # of losses: "nats per token"
    sizes: ClassVar[dict[str, str]] = {}  # values of cells for the set-up and how they are written; "" leaves one out
    columns: ClassVar[str] = ""  # the meaning of the table's columns
    limits: ClassVar[str] = ""  # what the results do not show, in one or two sentences
    sources: ClassVar[Sequence[str]] = ()  # papers: "Vaswani et al. (2017), [Title](URL)"
    parts: ClassVar[Sequence[str]] = ()  # files of the package that it is about: "attention/attend.py"
    minutes: ClassVar[Sequence[float]]  # quick, cpu, gpu: estimates, listed where nothing is measured
    alt: ClassVar[str] = ""  # what the figure shows, in one sentence: its alternative text
    spread: ClassVar[str] = "Bands: one standard deviation over seeds."  # in the figure, where there are seeds
    changed: ClassVar[str] = ""  # what was changed after a look at the data, in one sentence

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Set the texts of the TOML file beside the class's own file, if there is one."""
        super().__pydantic_init_subclass__(**options)
        if cls.is_family():
            return
        texts = _file_of(cls).with_name(f"{kind_of(cls)}.toml")
        if texts.exists():
            for field, value in tomllib.loads(texts.read_text(encoding="utf-8")).items():
                setattr(cls, field, value)
        if missing := [name for name in NEEDED if not getattr(cls, name, "")]:
            raise ConfigError([Fault(cls.__name__, f"lacks {', '.join(missing)}: set it here or in {texts.name}")])

    @property
    def file(self) -> Path:
        """The file of the class."""
        return _file_of(type(self))

    def rule(self, cells: Iterable[Cell]) -> str:
        """Return the hash of the decision rule for these cells."""
        return rule_hash(type(self), tries_rates(cells))

    def rule_for(self, results: Sequence[CellResult]) -> str:
        """Return the hash of the rule of today for the cells of results."""
        return self.rule(result.cell for result in results)

    def is_stale(self, results: Sequence[CellResult]) -> bool:
        """Test whether some results were measured under another rule than that of today."""
        return {result.rule for result in results} != {self.rule_for(results)}

    @abstractmethod
    def cells(self, size: Size) -> list[Cell]:
        """Return the cells to measure."""

    def stages(self, size: Size) -> list[list[Cell]]:
        """Return the cells in groups, each of which needs the results of those before it."""
        return [self.cells(size)]

    def prepare(self, results: Sequence[CellResult]) -> None:
        """Read the results of the stages so far, before the next is measured; keep them in a private attribute."""

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

    @cached_property
    def published(self) -> dict[Size, StoredVerdict]:
        """The published verdicts by size."""
        file = self.file.with_name(VERDICTS)
        found = json.loads(file.read_text(encoding="utf-8")).get(self.kind, {}) if file.exists() else {}
        return {size: StoredVerdict(**one) for size, one in found.items()}

    def described(self, size: Size) -> str:
        """Return the published verdict and the minutes of a size, or estimated minutes where nothing was measured."""
        if (stored := self.published.get(size)) is None:
            return f"about {self.minutes[SIZES.index(size)]:g} min"
        stale = "" if stored.rule == self.rule(self.cells(size)) else ", stale"
        return f"{stored.word}{stale}, {stored.minutes:g} min"

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
    def table(self, results: Sequence[CellResult]) -> Rows:
        """Return the measurements as a table."""

    def remark(self, results: Sequence[CellResult]) -> str:
        """Return what the results show beyond the claim in a sentence or two, or nothing."""
        return ""

    @abstractmethod
    def draw(self, results: Sequence[CellResult]) -> Any:
        """Return a figure made by `lab/figures.py`."""


def _file_of(kind: type[Any]) -> Path:
    """Return the file of a class; for one that was typed in, as in a notebook, a file of the current folder."""
    try:
        return Path(inspect.getfile(kind))
    except (OSError, TypeError):
        return Path(f"{kind.__name__}.py")


def every() -> list[Experiment]:
    """Return all experiments: of installed packages by their numbers, then those of the user's files."""
    find_parts(GROUP)
    if not (parts := Experiment.choices()):
        raise ConfigError([Fault("", f"there are no experiments here: {OTHERS}")])
    return sorted((part() for part in parts), key=lambda one: one.number or math.inf)


def find(name: str) -> Experiment:
    """Return an experiment by its kind."""
    known = {experiment.kind: experiment for experiment in every()}
    if name not in known:
        hint = "" if entry_points(group=GROUP) else f"; {OTHERS}"
        raise ConfigError([Fault("", f"'{name}' is not an experiment; {did_you_mean(name, known)}{hint}")])
    return known[name]
