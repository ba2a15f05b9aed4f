"""Predictions that are killed, in one process and on a Ray cluster."""

from pathlib import Path

import pytest

from tests.torture import predictions


def test_a_killed_process(tmp_path: Path) -> None:
    predictions.run(tmp_path, 6000, local_kills=2, ray_kills=0)


def test_a_killed_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    predictions.run(tmp_path, 13_000, local_kills=0, ray_kills=1)
