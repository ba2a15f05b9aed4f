"""Invented tasks: digits to sort, copy or reverse, dates to read, numbers to add. Imports no torch.

A row belongs to a split by a hash of its source, whatever the seed: one sixteenth valid, one sixteenth test, the rest
train. So nothing that is tested was ever trained on, and runs of different seeds are tested on the same rows: the seed
changes the training rows only. Those may repeat; valid and test rows are distinct.
"""

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple, assert_never

from anyformer.config.spec import ConfigError, Fault
from anyformer.hardware import memory
from anyformer.recipe import Additions, CopyDigits, ReverseDigits, SortDigits, Synthetic, WrittenDates

Split = Literal["train", "valid", "test"]

SHARES = 16  # how many parts the hash makes: the first is valid, the second test
ROW_BYTES = 150  # that a row takes at least: two strings and their places in two lists
SMALL = 2_000  # rows that are listed at once; past that a split surely holds about its share of a pool


class Pair(NamedTuple):
    """One example."""

    source: str
    target: str


class Pool(NamedTuple):
    """All examples of one shape, one for each combination of an item from every part; `key` decides the split."""

    parts: tuple[Sequence[Any], ...]
    key: Callable[..., str]
    write: Callable[..., Pair]

    def size(self) -> int:
        return math.prod(map(len, self.parts))

    def draws(self, split: Split, rng: Random) -> Iterator[Pair]:
        """Examples of the split by chance, without end."""
        random = rng.random
        while True:
            items = [part[int(random() * len(part))] for part in self.parts]
            if split_of(self.key(*items)) == split:
                yield self.write(*items)

    def every(self, split: Split) -> list[Pair]:
        """All examples of the split."""
        return [self.write(*items) for items in itertools.product(*self.parts) if split_of(self.key(*items)) == split]


def generate(spec: Synthetic, split: Split, seed: int) -> dict[str, list[str]]:
    """`spec.count` pairs of the split, as many of each shape as there are; the same for the same arguments."""
    there, shortest = memory(), spec.shortest if isinstance(spec, SortDigits | CopyDigits | ReverseDigits) else 0
    needed = spec.count * (ROW_BYTES + 4 * shortest)
    if there is not None and needed > there:
        what = f"at least {needed / 2**30:,.0f} GiB of memory, and there are {there / 2**30:,.0f} GiB"
        raise ConfigError([Fault("count", f"= {spec.count}: the rows need {what}")])
    rng = Random(f"{spec.kind} {split} {seed if split == 'train' else ''}")
    streams = [_repeating(pool, rng) if split == "train" else _distinct(pool, split, rng) for pool in pools(spec)]
    rng.shuffle(streams)
    waiting, rows, seen = deque(streams), list[Pair](), set[str]()
    while waiting and len(rows) < spec.count:
        stream = waiting.popleft()
        if (row := next(stream, None)) is None:
            continue
        waiting.append(stream)
        if split != "train":
            if row.source in seen:  # two shapes may write the same: May is its own abbreviation
                continue
            seen.add(row.source)
        rows.append(row)
    if len(rows) < spec.count:
        most = f"must be at most {len(rows)}, the distinct rows of this kind that are in the {split} split"
        raise ConfigError([Fault("count", f"= {spec.count}: {most}")])
    rng.shuffle(rows)
    return {"source": [row.source for row in rows], "target": [row.target for row in rows]}


def split_of(key: str) -> Split:
    """Where a row belongs, in every process and for every seed."""
    share = hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % SHARES
    return "valid" if share == 0 else "test" if share == 1 else "train"


def _repeating(pool: Pool, rng: Random) -> Iterator[Pair]:
    """Training rows of a pool without end; none if there are none."""
    if pool.size() > SMALL:
        yield from pool.draws("train", rng)
    members = pool.every("train")
    while members:
        yield rng.choice(members)


def _distinct(pool: Pool, split: Split, rng: Random) -> Iterator[Pair]:
    """All rows of a pool that are in the split, in random order, each once."""
    size, seen = pool.size(), set[Pair]()
    if size > SMALL:
        for row in pool.draws(split, rng):
            if row not in seen:
                seen.add(row)
                yield row
            if len(seen) * SHARES * 2 > size:  # about half of them: by chance the others would take ever longer
                break
    rest = [row for row in pool.every(split) if row not in seen]
    rng.shuffle(rest)
    yield from rest


def pools(spec: Synthetic) -> Iterator[Pool]:
    """The shapes that the rows of a task have."""
    match spec:
        case SortDigits():
            return _digits(spec.shortest, spec.longest, sorted)
        case CopyDigits():
            return _digits(spec.shortest, spec.longest, iter)
        case ReverseDigits():
            return _digits(spec.shortest, spec.longest, reversed)
        case WrittenDates():
            return _dates()
        case Additions():
            return _additions(spec.digits)
        case _:
            assert_never(spec)


# -- digits -----------------------------------------------------------------------------------------------------------

FIGURES = tuple(tuple(f"{i:0{n}}" for i in range(10**n)) for n in range(1, 4))  # by one, two and three digits


def _figures(length: int) -> tuple[Sequence[str], ...]:
    """The parts of a string of digits, three at a time: fewer draws."""
    threes, rest = divmod(length, 3)
    return (FIGURES[2],) * threes + ((FIGURES[rest - 1],) if rest else ())


def _digits(shortest: int, longest: int, answer: Callable[[str], Iterable[str]]) -> Iterator[Pool]:
    """One pool for each length; digits stand apart by spaces."""
    for length in range(shortest, longest + 1):
        yield Pool(_figures(length), _spaced, partial(_answered, answer))


def _spaced(*figures: str) -> str:
    return " ".join("".join(figures))


def _answered(answer: Callable[[str], Iterable[str]], *figures: str) -> Pair:
    return Pair(_spaced(*figures), " ".join(answer("".join(figures))))


def _additions(most: int) -> Iterator[Pool]:
    """One pool for each pair of lengths, numbers as one writes them: the highest digit first, no leading zeros."""
    for left, right in itertools.product(range(1, most + 1), repeat=2):
        yield Pool(_number(left) + _number(right), partial(_either_way, left), partial(_added, left))


def _either_way(left: int, *figures: str) -> str:
    """b+a is in the split of a+b."""
    digits = "".join(figures)
    return "+".join(sorted((digits[:left], digits[left:])))


def _added(left: int, *figures: str) -> Pair:
    digits = "".join(figures)
    a, b = digits[:left], digits[left:]
    return Pair(f"{a}+{b}", str(int(a) + int(b)))


def _number(length: int) -> tuple[Sequence[str], ...]:
    return (FIGURES[0][1:], *_figures(length - 1)) if length > 1 else _figures(1)


# -- dates ------------------------------------------------------------------------------------------------------------

MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DAYS = range(date(1900, 1, 1).toordinal(), date(2099, 12, 31).toordinal() + 1)
CASES = (str, str.lower, str.upper)

# Four digits of year, and in figures the year first: nothing here could be read as two dates.
IN_FIGURES = ("{year}/{mm}/{dd}", "{year}.{m}.{d}", "{year}{mm}{dd}")
IN_WORDS = (
    "{weekday}, {month} {d} {year}",
    "{weekday}, {d} {month} {year}",
    "{weekday}, {month} {nth}, {year}",
    "{wday} {d} {mon} {year}",
    "{wday}, {mon} {nth} {year}",
    "{d} {month} {year}",
    "{d} {mon} {year}",
    "{dd}-{mon}-{year}",
    "{month} {d}, {year}",
    "{mon} {d} {year}",
    "{nth} {month} {year}",
    "the {nth} of {month}, {year}",
    "{year} {month} {d}",
)


def _dates() -> Iterator[Pool]:
    """One pool for each way of writing; the date alone is the key, so a date of the test is unseen in every form."""
    yield from (Pool((DAYS,), _iso, partial(_written, form)) for form in IN_FIGURES)
    yield from (Pool((DAYS, CASES), _iso, partial(_written, form)) for form in IN_WORDS)


def _iso(day: int, case: object = None) -> str:
    return date.fromordinal(day).isoformat()


def _written(form: str, day: int, case: Callable[[str], str] = str) -> Pair:
    return Pair(case(form.format_map(_fields(date.fromordinal(day)))), _iso(day))


def _fields(when: date) -> dict[str, str]:
    """What the forms are filled with; not by strftime, whose names follow the machine's language."""
    d, month, weekday = when.day, MONTHS[when.month - 1], WEEKDAYS[when.weekday()]
    ending = "th" if 10 < d < 20 else {1: "st", 2: "nd", 3: "rd"}.get(d % 10, "th")
    return {
        "year": str(when.year),
        "m": str(when.month),
        "mm": f"{when.month:02}",
        "month": month,
        "mon": month[:3],
        "d": str(d),
        "dd": f"{d:02}",
        "nth": f"{d}{ending}",
        "weekday": weekday,
        "wday": weekday[:3],
    }
