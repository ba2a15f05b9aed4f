"""Verdicts that come with the package: those of the results in docs/lab, listed by `anyformer lab`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from anyformer.lab.cells import CellResult
from anyformer.lab.experiment import Experiment, Size

VERDICTS = Path(__file__).parent / "verdicts.json"


class Stored(NamedTuple):
    """A verdict, the hash of the rule under which its data was measured, and the minutes that this took."""

    word: str
    rule: str
    minutes: float


def known_verdicts() -> dict[str, dict[Size, Stored]]:
    """Return the verdicts by experiment and size."""
    found = json.loads(VERDICTS.read_text(encoding="utf-8"))
    return {name: {size: Stored(**one) for size, one in sizes.items()} for name, sizes in found.items()}


def described(experiment: Experiment, size: Size, stored: Stored | None) -> str:
    """Return the verdict and the minutes of a size, or estimated minutes where nothing was measured."""
    if stored is None:
        estimate = experiment.minutes[("quick", "cpu", "gpu").index(size)]
        return f"about {estimate:g} min"
    stale = "" if stored.rule == experiment.rule(experiment.cells(size)) else ", stale"
    return f"{stored.word}{stale}, {stored.minutes:g} min"


def minutes_of(results: Sequence[CellResult]) -> float:
    """Return the minutes of one process that results took."""
    total = sum(r.seconds for r in results) / 60
    return max(0.1, round(total, 1)) if total < 10 else round(total)
