"""Decisions on claims: conditions with intervals and effect sizes, corrected for the number of comparisons.

A claim states its conditions before it is measured. It holds if all of them are met, does not hold if one is refuted,
and is undecided otherwise. Comparisons over seeds use Welch's t-test; their p values are adjusted by Holm's method.
Sides of a comparison that choose a learning rate among several must find the best one inside the range that was tried.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from anyformer.lab.stats import difference, hedges, holm, is_constant, welch

ALPHA = 0.05  # adjusted p values below it are significant
METHOD = f"Welch's t-test over seeds, p values adjusted by Holm's method, significant below {ALPHA}"
NO_VARIATION = "no variation over seeds"
INSIDE = "every best learning rate lies inside the range that was tried"
RATES = f"Nothing is concluded unless {INSIDE}: beyond an end there may be a better one"

Word = Literal["holds", "does not hold here", "undecided at this size"]
Role = Literal["condition", "precondition", "part"]  # the last two are shown and do not count as conditions


@dataclass(frozen=True)
class More:
    """The condition that `a` exceeds `b` by more than `margin`, as means over seeds; `b` may be a known bound."""

    name: str
    a: Sequence[float]
    b: Sequence[float] | float
    margin: float = 0.0


@dataclass(frozen=True)
class Fact:
    """A condition without a test: an exact count, a fitted exponent, or all seeds on one side of a threshold."""

    name: str
    holds: bool | None
    seen: str = ""  # the value that was observed


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its scores over seeds at each learning rate that was tried."""

    name: str
    scores: Mapping[float, Sequence[float]]  # the best rate has the lowest mean, or the highest
    higher: bool = False

    @property
    def best(self) -> float:
        """The best learning rate; of equal ones, one inside the range."""
        sign = -1 if self.higher else 1
        ends = min(self.scores), max(self.scores)
        return min(sorted(self.scores), key=lambda rate: (sign * fmean(self.scores[rate]), rate in ends))

    @property
    def end(self) -> str:
        """Which end of several rates the best one is; empty inside, and where a single rate was tried."""
        ends = {min(self.scores): "smallest", max(self.scores): "largest"}
        return ends.get(self.best, "") if len(self.scores) > 1 else ""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a condition: met (True), refuted (False) or undecided (None)."""

    name: str
    holds: bool | None
    seen: str
    effect: float = math.nan  # Hedges' g of a comparison; NaN if nothing varies
    p: float = math.nan  # of a comparison, adjusted for the number of comparisons; NaN if nothing varies
    bound: bool = False  # whether the comparison is with a known bound
    role: Role = "condition"


@dataclass(frozen=True)
class Verdict:
    """The result of a claim, with the reason or the conditions that support it."""

    word: Word
    why: str
    outcomes: tuple[Outcome, ...] = ()

    def __str__(self) -> str:
        return f"{self.word}: {self.why}"


def verdict(holds: bool | None, why: str, outcomes: Sequence[Outcome] = ()) -> Verdict:
    """Return a verdict; None is undecided."""
    if holds is None:
        return Verdict("undecided at this size", why, tuple(outcomes))
    return Verdict("holds" if holds else "does not hold here", why, tuple(outcomes))


def decide(
    conditions: Sequence[More | Fact], *, requires: Sequence[Fact] = (), also: Sequence[Outcome] = ()
) -> Verdict:
    """Return the verdict on a claim with these conditions.

    `requires` lists what must be true for the conditions to say anything about the claim, such as that the
    unchanged model learns the task. If one of them fails, the claim is undecided. `also` lists outcomes that a
    condition is made of: they are shown, and do not count again.
    """
    counted = outcomes_of(conditions)
    needs = [Outcome(need.name, need.holds, need.seen, role="precondition") for need in requires]
    outcomes = [*needs, *counted, *(replace(part, role="part") for part in also)]
    if missing := [need.name for need in requires if not need.holds]:
        return verdict(None, f"nothing can be concluded unless {' and '.join(missing)}", outcomes)
    for word, name in ((False, "refuted"), (None, "undecided")):
        if some := [one for one in counted if one.holds is word]:
            listed = "; ".join(f"“{one.name}”{f' (observed: {one.seen})' if one.seen else ''}" for one in some)
            verb = "is" if len(some) == 1 else "are"
            why = f"{len(some)} of {len(counted)} conditions {verb} {name}: {listed}{_others(counted, word)}"
            return verdict(word, why, outcomes)
    number = {1: "its condition", 2: "both conditions"}.get(len(counted), f"all {len(counted)} conditions")
    before = {0: "", 1: "the precondition and ", 2: "both preconditions and "}.get(
        len(needs), f"all {len(needs)} preconditions and "
    )
    return verdict(True, f"{before}{number} {'are' if needs or len(counted) > 1 else 'is'} met", outcomes)


def require_inside(found: Verdict, sides: Sequence[Side]) -> Verdict:
    """Return a verdict that is undecided if the best learning rate of a side is at an end of those tried."""
    tuned = [side for side in sides if len(side.scores) > 1]
    if not tuned:
        return found
    ends = [f"{side.name}: {side.best:.2g}, the {side.end} tried" for side in tuned if side.end]
    seen = "; ".join(ends) or ", ".join(dict.fromkeys(f"{side.best:.2g}" for side in tuned))
    outcomes = Outcome(INSIDE, not ends, seen, role="precondition"), *found.outcomes
    if ends:
        return verdict(None, f"nothing can be concluded unless {INSIDE}", outcomes)
    return replace(found, why=f"{found.why}; {INSIDE}", outcomes=outcomes)


def _others(outcomes: Sequence[Outcome], named: bool | None) -> str:
    """Return how many conditions have another outcome than the one that is named: "; the other 5 are met"."""
    words = {True: "met", None: "undecided", False: "refuted"}
    counts = {word: sum(one.holds is word for one in outcomes) for word in words if word is not named}
    found = [(number, words[word]) for word, number in counts.items() if number]
    if not found:
        return ""
    (number, first), *rest = found
    if not rest:
        return f"; the other {'one is' if number == 1 else f'{number} are'} {first}"
    return "; of the others " + " and ".join(f"{n} {'is' if n == 1 else 'are'} {word}" for n, word in found)


def outcomes_of(conditions: Sequence[More | Fact]) -> list[Outcome]:
    """Return the outcome of each condition; p values are adjusted over all comparisons among them."""
    compared = [one for one in conditions if isinstance(one, More)]
    adjusted = dict(zip(map(id, compared), holm([_p(one) for one in compared]), strict=True))
    return [
        _outcome(one, adjusted[id(one)]) if isinstance(one, More) else Outcome(one.name, one.holds, one.seen)
        for one in conditions
    ]


def _p(condition: More) -> float:
    other = _other(condition)
    return welch(condition.a, [x + condition.margin for x in other])


def _outcome(condition: More, p: float) -> Outcome:
    other = _other(condition)
    gap = difference(condition.a, other)
    holds = gap.mean > condition.margin if p < ALPHA else None
    more = f", more than {condition.margin:+g} expected" if condition.margin else ""
    if is_constant(condition.a) and is_constant(other):  # the means decide; there is nothing to test
        return Outcome(condition.name, holds, f"{gap.mean:+.4f} ({NO_VARIATION}){more}")
    bound = isinstance(condition.b, float | int)
    return Outcome(condition.name, holds, f"{gap}{more}", hedges(condition.a, condition.b), p, bound=bound)


def _other(condition: More) -> Sequence[float]:
    return [condition.b] * len(condition.a) if isinstance(condition.b, float | int) else condition.b
