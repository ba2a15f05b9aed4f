"""The table of planted faults names places that exist, once each."""

import ast

import pytest

from tests.planted_faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    text = (ROOT / "anyformer" / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.right) == 1
    ast.parse(text.replace(fault.right, fault.wrong))
    assert all((ROOT / "tests" / name).exists() for name in fault.tests.split())


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
