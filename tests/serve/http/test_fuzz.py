"""A short run of the fuzzer; `make fuzz-serve` is the long one."""

import pytest

from tests.serve.http.fuzz import fuzz

pytest.importorskip("schemathesis", reason="needs the package schemathesis")


@pytest.mark.system
def test_no_undeclared_response() -> None:
    assert fuzz(requests=400, seed=1) >= 400
