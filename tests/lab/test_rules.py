"""The hash of a rule changes with the rule, and with nothing else."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from anyformer.lab.cells import read_results
from anyformer.lab.experiment import find
from anyformer.lab.measurements import measure_together
from anyformer.lab.rules import canonical, rule_hash
from tests.lab.made_up import NAMES

SOURCE = '''
"""A claim."""

from typing import Literal

from anyformer.lab.api import Experiment, Fact, decide
from beside import found

BOUND = 0.5
OTHER = 1


class Claim(Experiment):
    kind: Literal["made_up"] = "made_up"
    claim, prediction, minutes = "A bound is met.", "All are above the bound.", (1, 1, 1)

    def cells(self, size):
        return [{"seed": seed} for seed in range(3)]

    def measure(self, cell):
        return {"value": cell["seed"] + OTHER}

    def judge(self, results):
        return decide([Fact("above", _lowest(results) > BOUND)])

    def table(self, results):
        return [("lowest",), (str(_lowest(results)),)]

    def draw(self, results):
        raise NotImplementedError


def _lowest(results):
    """Return the lowest value."""
    return min(found(results, "value"))
'''
SOURCE += """SPLIT
from statistics import fmean


def found(results, name):
    return [fmean([r[name]]) for r in results]


def unused():
    return 1
"""
RULE = [("0.5", "0.4"), ("min(found", "max(found"), ("A bound is met.", "It is met."), ("All are", "Some are")]
RULE += [("[fmean([r[name]])", "[2 * fmean([r[name]])"), ("fmean", "median")]
NO_RULE = [
    ("OTHER = 1", "OTHER = 2"),
    ("return 1", "return 2"),
    ("range(3)", "range(4)"),
    ("Return the lowest value.", "Return the smallest."),
    ('return decide([Fact("above", _lowest(results) > BOUND)])',
     'x = 1  # a comment\n        return decide([Fact("above", _lowest(results) > BOUND)])'.replace("x = 1  ", "")),
    ("def _lowest(results):", "def _lowest(results: list) -> float:"),
]  # fmt: skip


def hash_of(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, package: str = "") -> str:
    """Return the hash of a claim in two files beside each other, the first of which imports the second."""
    digits = abs(hash(source + package))
    inside = f"{package}{digits}." if package else ""
    home = folder / inside.rstrip(".")
    home.mkdir(exist_ok=True)
    claim, beside = source.split("SPLIT")
    names = {f"{inside}beside{digits}": beside, f"{inside}made_up{digits}": claim}
    for name, text in names.items():
        text = text.replace("from beside", f"from {'.' if package else ''}beside{digits}")
        (home / f"{name.removeprefix(inside)}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    module = importlib.import_module(name)
    for new in set(sys.modules) - before:
        monkeypatch.setitem(sys.modules, new, sys.modules.pop(new))
    return rule_hash(module.Claim)


@pytest.mark.parametrize(("before", "after"), RULE)
def test_a_changed_rule_has_another_hash(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = SOURCE.replace(before, after)
    assert changed != SOURCE
    assert hash_of(changed, tmp_path, monkeypatch) != hash_of(SOURCE, tmp_path, monkeypatch)


@pytest.mark.parametrize(("before", "after"), NO_RULE)
def test_what_is_no_part_of_a_rule_does_not_change_its_hash(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = SOURCE.replace(before, after)
    assert changed != SOURCE
    assert hash_of(changed, tmp_path, monkeypatch) == hash_of(SOURCE, tmp_path, monkeypatch)


def test_relative_imports_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hash_of(SOURCE, tmp_path, monkeypatch, "package") == hash_of(SOURCE, tmp_path, monkeypatch)


def test_every_claim_has_a_rule_of_its_own() -> None:
    assert len({find(name).rule([]) for name in NAMES}) == len(NAMES)


def test_code_as_text_leaves_out_what_versions_of_python_write_differently() -> None:
    (function,) = ast.parse('def f(x: int = 1) -> int:\n    "Double."\n    return 2 * x\n').body
    text = canonical(function)
    assert "Double" not in text
    assert "annotation" not in text
    assert "[]" not in text
    assert text == canonical(ast.parse("def f(x=1):\n  return (2*x)  # doubled").body[0])


def test_the_text_of_an_f_string_may_be_split() -> None:
    whole, (a, b) = ast.JoinedStr([ast.Constant("{a}")]), (ast.Constant("{"), ast.Constant("a}"))
    assert canonical(whole) == canonical(ast.JoinedStr([a, b]))


def test_results_are_stored_with_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heads.jsonl"
    heads = find("heads")
    cells = [{"width": 8, "length": 4, "heads": 1, "repeats": 1}]
    monkeypatch.setattr(type(heads), "cells", lambda self, size: cells)
    found = measure_together([heads], "quick", {"heads": path})["heads"]
    assert [r.rule for r in found] == [r.rule for r in read_results(path)] == [heads.rule([])]
