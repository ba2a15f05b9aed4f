"""The hash of a rule changes with the rule, and with nothing else."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from anyformer.lab.cells import read_results
from anyformer.lab.experiment import NAMES, find
from anyformer.lab.measurements import measure_together
from anyformer.lab.rules import canonical, rule_hash

SOURCE = '''
"""A claim."""

from anyformer.lab.decision import Fact, decide
from anyformer.lab.experiment import Experiment
from anyformer.lab.experiments.common import found

BOUND = 0.5
OTHER = 1


class Claim(Experiment):
    name, number, claim, idea = "made_up", 99, "A bound is met.", ""
    prediction = "All are above the bound."
    parts, minutes, alt = (), (0, 0, 0), ""

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
RULE = [("0.5", "0.4"), ("min(found", "max(found"), ("A bound is met.", "It is met."), ("All are", "Some are")]
NO_RULE = [
    ("OTHER = 1", "OTHER = 2"),
    ("range(3)", "range(4)"),
    ("Return the lowest value.", "Return the smallest."),
    ('return decide([Fact("above", _lowest(results) > BOUND)])',
     'x = 1  # a comment\n        return decide([Fact("above", _lowest(results) > BOUND)])'.replace("x = 1  ", "")),
    ("def _lowest(results):", "def _lowest(results: list) -> float:"),
]  # fmt: skip


def hash_of(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"made_up_{abs(hash(source))}"
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module(name)
    sys.modules.pop(name)
    monkeypatch.setitem(sys.modules, name, module)
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


def test_results_are_stored_with_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "heads.jsonl"
    heads = find("heads")
    heads.cells = lambda size: [{"width": 8, "length": 4, "heads": 1, "repeats": 1}]  # type: ignore[method-assign]
    found = measure_together([heads], "quick", {"heads": path})["heads"]
    assert [r.rule for r in found] == [r.rule for r in read_results(path)] == [heads.rule([])]
