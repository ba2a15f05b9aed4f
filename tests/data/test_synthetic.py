"""Invented tasks: the answers are right, the splits never meet, and the same arguments give the same rows anywhere."""

import re
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.data.synthetic import MONTHS, WEEKDAYS, Split, generate, split_of
from anyformer.recipe import (
    Additions,
    CopyDigits,
    Data,
    PassKeys,
    PreferSorted,
    ReverseDigits,
    SortDigits,
    Synthetic,
    WrittenDates,
)

ROOT = Path(__file__).parent.parent.parent
KINDS = (SortDigits, CopyDigits, ReverseDigits, WrittenDates, Additions)
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


def pairs(spec: Synthetic, split: Split = "train", seed: int = 0) -> list[tuple[str, str]]:
    rows = generate(spec, split, seed)
    assert set(rows) == {"source", "target"}
    return list(zip(rows["source"], rows["target"], strict=True))


def specs(count: int) -> st.SearchStrategy[Synthetic]:
    lengths = st.tuples(st.integers(3, 8), st.integers(5, 8)).map(sorted)
    digits = [
        lengths.map(lambda ends, kind=kind: kind(count=count, shortest=ends[0], longest=ends[1]))
        for kind in (SortDigits, CopyDigits, ReverseDigits)
    ]
    additions = st.integers(3, 20).map(lambda n: Additions(count=count, digits=n))
    keys = st.integers(3, 9).map(lambda n: PassKeys(count=count, shortest=8, longest=20, digits=n))
    return st.one_of(*digits, additions, keys, st.just(WrittenDates(count=count)))


# -- what is asked and answered ---------------------------------------------------------------------------------------


@given(st.sampled_from(SPLITS), st.integers(0, 99))
def test_digits_are_answered_rightly(split: Split, seed: int) -> None:
    for kind, answer in ((SortDigits, sorted), (CopyDigits, list), (ReverseDigits, lambda d: d[::-1])):
        for source, target in pairs(kind(count=60, shortest=3, longest=7), split, seed):
            digits = source.split(" ")
            assert target.split(" ") == answer(digits)
            assert all(re.fullmatch("[0-9]", digit) for digit in digits)
            assert 3 <= len(digits) <= 7


@given(st.sampled_from(SPLITS), st.integers(0, 99))
def test_of_two_answers_one_is_sorted(split: Split, seed: int) -> None:
    """The other is reversed, and they are never equal."""
    rows = generate(PreferSorted(count=40, shortest=2, longest=7), split, seed)
    for source, target, rejected in zip(rows["source"], rows["target"], rows["rejected"], strict=True):
        assert target.split(" ") == sorted(source.split(" "))
        assert rejected.split(" ") == source.split(" ")[::-1]
        assert target != rejected


@given(st.sampled_from(SPLITS), st.integers(0, 99), st.sampled_from([1, 2, 5, 100]))
def test_sums_are_right(split: Split, seed: int, digits: int) -> None:
    """The highest digit first, no leading zeros, terms of every length up to the longest."""
    for source, target in pairs(Additions(count=3, digits=digits), split, seed):
        found = re.fullmatch(r"(0|[1-9]\d*)\+(0|[1-9]\d*)", source)
        assert found
        assert target == str(int(found[1]) + int(found[2]))
        assert max(len(found[1]), len(found[2])) <= digits


@given(st.sampled_from(SPLITS), st.integers(0, 99), st.integers(3, 9))
def test_pass_keys_are_in_the_text(split: Split, seed: int, digits: int) -> None:
    """The number is there once, after `pass key is`, between as many other words as the lengths allow."""
    for source, target in pairs(PassKeys(count=20, shortest=5, longest=30, digits=digits), split, seed):
        found = re.fullmatch(r"(.*?) ?the pass key is ((?:\d ?)+) \. ?(.*)", source)
        assert found
        assert found[2] == target
        assert len(target.split(" ")) == digits
        assert 5 <= len(found[1].split()) + len(found[3].split()) <= 30


def date_of(text: str) -> date:
    """A reader of dates that knows nothing of how they were written."""
    words = re.findall(r"[a-z]+|\d+", text.lower())
    if all(word.isdigit() for word in words):
        numbers = words if len(words) == 3 else [text[:4], text[4:6], text[6:]]
        return date(*map(int, numbers))
    months = [
        i for word in words for i, name in enumerate(MONTHS, 1) if len(word) > 2 and name.lower().startswith(word)
    ]
    day, year = sorted(int(word) for word in words if word.isdigit())
    when = date(year, months[0], day)
    for word in words:
        for i, name in enumerate(WEEKDAYS):
            if len(word) > 2 and name.lower().startswith(word):
                assert when.weekday() == i
    return when


def test_dates_are_read_rightly() -> None:
    found = pairs(WrittenDates(count=4000))
    assert all(date_of(source).isoformat() == target for source, target in found)
    years = [int(target[:4]) for _, target in found]
    assert min(years) < 1910
    assert max(years) > 2090
    shapes = {re.sub(r"[a-z]{4,}", "month", re.sub(r"\d+", "9", source.lower())) for source, _ in found}
    assert len(shapes) > 12
    assert {str.islower, str.isupper, str.istitle} == {
        case for case in (str.islower, str.isupper, str.istitle) for source, _ in found if case(source)
    }


def test_ordinals() -> None:
    endings: dict[str, set[str]] = {}
    for source, target in pairs(WrittenDates(count=4000)):
        endings.setdefault(target[-2:], set()).update(re.findall(r"\d+(st|nd|rd|th)", source.lower()))
    assert {day for day, found in endings.items() if found != {"th"}} == {"01", "21", "31", "02", "22", "03", "23"}
    assert endings["01"] == endings["21"] == endings["31"] == {"st"}
    assert endings["02"] == endings["22"] == {"nd"}
    assert endings["03"] == endings["23"] == {"rd"}


# -- splits -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_no_seed_trains_on_what_another_tests(data: st.DataObject) -> None:
    spec = data.draw(specs(count=100))
    seeds = st.integers(0, 2**63)
    found = {split: pairs(spec, split, data.draw(seeds)) for split in SPLITS}
    keys = {split: {key_of(spec, *pair) for pair in rows} for split, rows in found.items()}
    for one, other in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not keys[one] & keys[other]
    for split, rows in found.items():
        assert len(rows) == spec.count
        if split != "train":
            assert len({source for source, _ in rows}) == spec.count, "each row once"


def key_of(spec: Synthetic, source: str, target: str) -> object:
    """What must not be shared: a date in any form, a number in any text, a sum either way round."""
    match spec:
        case WrittenDates() | PassKeys():
            return target
        case Additions():
            return frozenset(source.split("+"))
        case _:
            return source


def test_shares() -> None:
    shares = Counter(split_of(str(i)) for i in range(16_000))
    assert abs(shares["valid"] - 1000) < 150
    assert abs(shares["test"] - 1000) < 150


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize(
    "spec",
    [
        SortDigits(count=10**6, shortest=1, longest=3),
        CopyDigits(count=10**6, shortest=1, longest=5),
        Additions(count=10**6, digits=2),
    ],
)
def test_all_there_are_and_no_more(spec: SortDigits | CopyDigits | Additions, split: Split) -> None:
    """The error names the most that can be had, which is every one there is; that many are given."""
    with pytest.raises(ConfigError, match=f"^count = 1000000: must be at most .* in the {split} split$") as error:
        generate(spec, split, 0)
    most = int(re.findall(r"at most (\d+)", str(error.value))[0])
    if isinstance(spec, Additions):
        sums = [tuple(sorted((str(a), str(b)))) for a in range(100) for b in range(100)]
        expected = sum(split_of("+".join(terms)) == split for terms in sums)
    else:
        texts = (" ".join(f"{i:0{n}}") for n in range(spec.shortest, spec.longest + 1) for i in range(10**n))
        expected = sum(split_of(text) == split for text in texts)
    assert most == expected
    assert len(set(pairs(spec.model_copy(update={"count": most}), split))) == most


# -- lengths, seeds, processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_lengths_are_balanced(split: Split) -> None:
    lengths = Counter(len(source.split(" ")) for source, _ in pairs(SortDigits(count=600), split))
    assert lengths == dict.fromkeys(range(6, 12), 100)
    few = Counter(len(source.split(" ")) for source, _ in pairs(SortDigits(count=600, shortest=1, longest=6), split))
    assert abs(few[5] - few[6]) <= 1
    assert few[5] >= 100, "what the short ones do not have the long ones give"
    shapes = Counter(tuple(map(len, source.split("+"))) for source, _ in pairs(Additions(count=90, digits=3), "train"))
    assert set(shapes.values()) == {10}


@given(specs(count=50), st.integers(0, 2**63))
def test_the_seed_is_for_training_rows(spec: Synthetic, seed: int) -> None:
    assert pairs(spec, "train", seed) == pairs(spec, "train", seed)
    assert pairs(spec, "train", seed) != pairs(spec, "train", seed + 1)
    assert pairs(spec, "test", seed) == pairs(spec, "test", seed + 1), "runs are tested on the same rows"
    assert pairs(spec, "test", seed) != pairs(spec, "valid", seed)


def test_other_processes_make_the_same_rows() -> None:
    code = """
from anyformer.data.synthetic import generate
from anyformer.recipe import *
for kind in (SortDigits, CopyDigits, ReverseDigits, WrittenDates, Additions):
    for split in ("train", "valid", "test"):
        print(generate(kind(count=20), split, 7))
"""
    here = "".join(f"{generate(kind(count=20), split, 7)}\n" for kind in KINDS for split in SPLITS)
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
            env={"PYTHONHASHSEED": seed, "LC_ALL": "C"},
        )  # fmt: skip
        assert done.stdout == here


def test_importing_costs_no_torch() -> None:
    code = "import sys, anyformer.data.readers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_long_ones() -> None:
    assert {len(source) for source, _ in pairs(CopyDigits(count=4, shortest=5000, longest=5000), "test")} == {9999}
    with pytest.raises(ConfigError, match=r"^digits = 101: must be at most 100$"):
        Additions(count=1, digits=101)
    assert Data(train=Additions(count=1)).train == Additions(count=1, digits=3)
