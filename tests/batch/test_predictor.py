"""`Predictor` as other programs use it: pickled, and called with batches of columns."""

import pickle
from pathlib import Path

import numpy as np
import pytest

import anyformer as af
from anyformer.config import ConfigError
from anyformer.generation.batch import Predictor
from tests.explore import made

TEXTS = ["the fox", "a lazy dog", "", "over 1 2 3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.written("classify", tmp_path_factory.mktemp("runs"))


def test_a_pickled_predictor_has_the_same_answers(folder: Path) -> None:
    expected = af.load(folder, "cpu").predict(TEXTS)
    one = Predictor(folder, device="cpu")
    assert one({"text": TEXTS, "id": [1, 2, 3, 4]}) == {"text": TEXTS, "id": [1, 2, 3, 4], "prediction": expected}
    raw = pickle.dumps(one)  # without the weights
    assert len(raw) < 1000
    other = pickle.loads(raw)
    assert "_loaded" not in other.__dict__
    assert other({"text": np.array(TEXTS, dtype=object)})["prediction"] == expected


def test_columns_and_options(folder: Path) -> None:
    found = Predictor(str(folder), column="review", output="label", scores=True)({"review": TEXTS[:2]})
    assert [answer.partition("\t")[0] for answer in found["label"]] == af.load(folder).predict(TEXTS[:2])
    with pytest.raises(ConfigError, match="column = 'text': is not in the batch, which has review"):
        Predictor(folder)({"review": TEXTS})
    with pytest.raises(ConfigError, match="bits = 5: must be 8 or 4"):
        Predictor(folder, bits=5).predict(["a"])


def test_datasets(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    found = rows.map(Predictor(folder), batched=True, batch_size=2)
    assert found["prediction"] == af.load(folder).predict(TEXTS)
