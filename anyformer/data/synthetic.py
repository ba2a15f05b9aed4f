"""Synthetic tasks: digits to sort, copy or reverse, dates to normalise, numbers to add. Imports no torch.

A row belongs to a split by a hash of its source, whatever the seed: 1/16 valid, 1/16 test, the rest train. So no test
row occurs in training, and runs with different seeds have the same test rows: the seed changes the training rows only.
Training rows may repeat; valid and test rows are distinct.
"""

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from functools import partial
from random import Random
from typing import Any, NamedTuple

from anyformer.config.spec import ConfigError, Fault
from anyformer.kernels.hardware import usable_memory
from anyformer.recipe import Split as Split, Synthetic

SHARES = 16  # parts of the hash: the first is valid, the second test, the others train
ROW_BYTES = 150  # least memory of a row: two strings, and their entries in two lists
SMALL = 2_000  # rows that are listed at once; a larger pool almost surely has its share in each split


class SyntheticPair(NamedTuple):
    """One example."""

    source: str
    target: str


class SyntheticPool(NamedTuple):
    """All examples of one shape, one for each combination of an item from every part; `key` decides the split."""

    parts: tuple[Sequence[Any], ...]
    key: Callable[..., str]
    write: Callable[..., SyntheticPair]

    def size(self) -> int:
        return math.prod(map(len, self.parts))

    def draws(self, split: Split, rng: Random) -> Iterator[SyntheticPair]:
        """Yield random examples of the split, without end."""
        random = rng.random
        while True:
            items = [part[int(random() * len(part))] for part in self.parts]
            if split_of(self.key(*items)) == split:
                yield self.write(*items)

    def every(self, split: Split) -> list[SyntheticPair]:
        """Return all examples of the split."""
        return [self.write(*items) for items in itertools.product(*self.parts) if split_of(self.key(*items)) == split]


def generate(spec: Synthetic, split: Split, seed: int) -> dict[str, list[str]]:
    """Return `spec.count` pairs of the split, equally many of each shape; the same for the same arguments."""
    there, needed = usable_memory(), spec.count * (ROW_BYTES + 4 * spec.least())
    if there is not None and needed > there:
        what = f"at least {needed / 2**30:,.0f} GiB of memory, and there are {there / 2**30:,.0f} GiB"
        raise ConfigError([Fault("count", f"= {spec.count}: the rows need {what}")])
    rng = Random(f"{spec.kind} {split} {seed if split == 'train' else ''}")
    streams = [_repeating(pool, rng) if split == "train" else _distinct(pool, split, rng) for pool in spec.pools()]
    rng.shuffle(streams)
    waiting, rows, seen = deque(streams), list[SyntheticPair](), set[str]()
    while waiting and len(rows) < spec.count:
        stream = waiting.popleft()
        if (row := next(stream, None)) is None:
            continue
        waiting.append(stream)
        if not spec.keeps(row):
            continue
        if split != "train":
            if row.source in seen:  # two shapes may write the same: May is its own abbreviation
                continue
            seen.add(row.source)
        rows.append(row)
    if len(rows) < spec.count:
        most = f"must be at most {len(rows)}, the distinct rows of this kind that are in the {split} split"
        raise ConfigError([Fault("count", f"= {spec.count}: {most}")])
    rng.shuffle(rows)
    return spec.columns(rows)


def split_of(key: str) -> Split:
    """Return the split of a row, the same in every process and for every seed."""
    share = hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % SHARES
    return "valid" if share == 0 else "test" if share == 1 else "train"


def _repeating(pool: SyntheticPool, rng: Random) -> Iterator[SyntheticPair]:
    """Yield training rows of a pool without end; none if it has none."""
    if pool.size() > SMALL:
        yield from pool.draws("train", rng)
    members = pool.every("train")
    while members:
        yield rng.choice(members)


def _distinct(pool: SyntheticPool, split: Split, rng: Random) -> Iterator[SyntheticPair]:
    """Yield all rows of a pool that are in the split, in random order, each once."""
    size, seen = pool.size(), set[SyntheticPair]()
    if size > SMALL:
        for row in pool.draws(split, rng):
            if row not in seen:
                seen.add(row)
                yield row
            if len(seen) * SHARES * 2 > size:  # half are found: random draws of the others get slow
                break
    rest = [row for row in pool.every(split) if row not in seen]
    rng.shuffle(rest)
    yield from rest


# -- digits -----------------------------------------------------------------------------------------------------------

FIGURES = tuple(tuple(f"{i:0{n}}" for i in range(10**n)) for n in range(1, 4))  # strings of 1, 2 and 3 digits


def _figures(length: int) -> tuple[Sequence[str], ...]:
    """Return the parts of a string of digits, three at a time, which needs fewer draws."""
    threes, rest = divmod(length, 3)
    return (FIGURES[2],) * threes + ((FIGURES[rest - 1],) if rest else ())


def digits(shortest: int, longest: int, answer: Callable[[str], Iterable[str]]) -> Iterator[SyntheticPool]:
    """Yield one pool for each length; digits are separated by spaces."""
    for length in range(shortest, longest + 1):
        yield SyntheticPool(_figures(length), _spaced, partial(_answered, answer))


def _spaced(*figures: str) -> str:
    return " ".join("".join(figures))


def _answered(answer: Callable[[str], Iterable[str]], *figures: str) -> SyntheticPair:
    return SyntheticPair(_spaced(*figures), " ".join(answer("".join(figures))))


def additions(most: int) -> Iterator[SyntheticPool]:
    """Yield one pool for each pair of lengths; numbers have the most significant digit first and no leading zeros."""
    for left, right in itertools.product(range(1, most + 1), repeat=2):
        yield SyntheticPool(_number(left) + _number(right), partial(_either_way, left), partial(_added, left))


# -- pass keys --------------------------------------------------------------------------------------------------------

SENTENCES = "the grass is green . the sky is blue . the sun is yellow . here we go . there and back again ."
FILLER = SENTENCES.split(" ")
DEPTHS = 100  # places of the number, as parts of the text before it


def pass_keys(digits: int, words: range) -> Iterator[SyntheticPool]:
    """Yield one pool: numbers of so many digits, at all depths of texts with so many words around them."""
    yield SyntheticPool((*_figures(digits), words, range(DEPTHS + 1)), lambda *items: "".join(items[:-2]), _hidden_key)


def _hidden_key(*items: Any) -> SyntheticPair:
    """Return a text of filler words with a number in it, and the number; the last two items are size and depth."""
    *figures, words, depth = items
    number, before = " ".join("".join(figures)), words * depth // DEPTHS
    filler = [FILLER[i % len(FILLER)] for i in range(words)]
    return SyntheticPair(" ".join([*filler[:before], f"the pass key is {number} .", *filler[before:]]), number)


def _either_way(left: int, *figures: str) -> str:
    """Return a key by which b+a is in the split of a+b."""
    digits = "".join(figures)
    return "+".join(sorted((digits[:left], digits[left:])))


def _added(left: int, *figures: str) -> SyntheticPair:
    digits = "".join(figures)
    a, b = digits[:left], digits[left:]
    return SyntheticPair(f"{a}+{b}", str(int(a) + int(b)))


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


def dates() -> Iterator[SyntheticPool]:
    """Yield one pool for each format. The date alone is the key, so a test date is unseen in every format."""
    yield from (SyntheticPool((DAYS,), _iso, partial(_written, form)) for form in IN_FIGURES)
    yield from (SyntheticPool((DAYS, CASES), _iso, partial(_written, form)) for form in IN_WORDS)


def _iso(day: int, case: object = None) -> str:
    return date.fromordinal(day).isoformat()


def _written(form: str, day: int, case: Callable[[str], str] = str) -> SyntheticPair:
    return SyntheticPair(case(form.format_map(_fields(date.fromordinal(day)))), _iso(day))


def _fields(when: date) -> dict[str, str]:
    """Return the fields of formats; not by strftime, whose names depend on the locale."""
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
