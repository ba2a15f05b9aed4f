"""`predict` of each task that writes where tokens are read one step late, as on a GPU (`tests/gpu/test_predict.py`)."""

import random
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import pytest

from anyformer.generation.batch.predictor import Predictor
from anyformer.generation.engine.interface import Limits
from anyformer.generation.engine.paged_server import PagedServer
from anyformer.nn.model import Transformer
from tests.batch.writers import WRITERS, agreement


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PagedServer.__init__

    def begin_late(self: PagedServer, body: Transformer, limits: Limits, adapters: Mapping[str, Transformer]) -> None:
        begin(self, body, limits, adapters)
        self.overlaps = True

    monkeypatch.setattr(PagedServer, "__init__", begin_late)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", WRITERS)
def test_answers_are_those_alone(name: str, tmp_path: Path) -> None:
    assert agreement(name, 24, tmp_path, checked=6) == 1


@pytest.mark.usefixtures("late")
def test_thousands_of_rows_of_a_trained_run() -> None:
    """Many rows end at each step, and other prompts take their place: three windows of texts."""
    rng = random.Random(0)
    rows = [[rng.choice("0123456789") for _ in range(rng.randint(1, 9))] for _ in range(3000)]
    predictor = Predictor(str(files("anyformer.explore") / "bundled_runs" / "sort"), device="cpu")
    assert predictor.predict(map(" ".join, rows)) == [" ".join(sorted(row)) for row in rows]
