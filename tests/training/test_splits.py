"""Training, validation and test rows are read and checked before training, and all their faults come at once."""

from pathlib import Path

import pytest

from anyformer.config import ConfigError, io
from anyformer.recipe import Classify, JoinedSources, Recipe, TableFile
from anyformer.training.plan import plan
from tests.test_cli import refused
from tests.training.small import labelled, make, pairs, parities, quiet, said


def with_test(folder: Path, text: str) -> Recipe:
    """Labels of rows, with test rows of their own."""
    recipe = labelled(folder, Classify(), parities(), steps=2)
    (folder / "test.tsv").write_text(text, encoding="utf-8")
    source = TableFile(path=str(folder / "test.tsv"), text="text", label="label")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"test": source})})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("text\tnumber\n1 2\todd\n", r"data\.test\.label = 'label': no such column"),
        ("text\tlabel\n1 2\tneither\n", r"data\.test: 1 bad row .*\n.*test\.tsv:2: the label 'neither' does not"),
    ],
)
def test_test_rows_are_checked_before_training(tmp_path: Path, text: str, why: str) -> None:
    recipe = with_test(tmp_path, text)
    with pytest.raises(ConfigError, match=why):
        make(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=why):
        plan(recipe, quiet())


def test_faults_of_all_splits_come_together(tmp_path: Path) -> None:
    recipe = pairs()
    missing = {
        name: {"kind": "parallel", "source": f"{name}.a", "target": f"{name}.b"} for name in ("train", "valid", "test")
    }
    data = recipe.data.model_copy(update={**missing, "root": str(tmp_path)})
    with pytest.raises(ConfigError) as error:
        make(recipe.model_copy(update={"data": data}), tmp_path / "run")
    keys = [fault.path for fault in error.value.faults]
    assert keys == [f"data.{split}.{side}" for split in missing for side in ("source", "target")]


def test_skipped_test_rows_get_a_line(tmp_path: Path) -> None:
    recipe = with_test(tmp_path, "text\tlabel\n1 2\todd\n2 1\tneither\n")
    console = quiet()
    make(io.override(recipe, ["data.on_bad_row=skip"]), tmp_path / "run", console=console)
    assert "test: 1 bad rows skipped: " in said(console)


# -- faults of sources ------------------------------------------------------------------------------------------------


def test_a_table_without_a_format_is_a_fault_of_the_recipe(tmp_path: Path) -> None:
    """In each split that has one, together with its other faults."""
    table = "{kind='table', path='rows.dat', source='a'}"
    lines = refused("train", "sort", f"data.train={table}", f"data.valid={table}", "--out", tmp_path / "run")
    assert [line.partition(":")[0] for line in lines] == [
        "data.train.format",
        "data.train",
        "data.valid.format",
        "data.valid",
    ]


def test_config_check_finds_a_missing_format(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    recipe = io.override(pairs(), ["data.train={kind='table', path='a.tsv', source='a', target='b'}"])
    path.write_text(io.dumps(recipe, "json").replace("a.tsv", "a.dat"), encoding="utf-8")
    (line,) = refused("config", "check", path)
    assert line.startswith(f"{path}: data.train.format: is not clear from the name 'a.dat': set it to 'tsv', ")


def test_a_wrong_key_within_a_list_is_its_only_fault() -> None:
    with pytest.raises(ConfigError) as error:
        JoinedSources(parts=[{"kind": "sort", "count": 3, "shortst": 2}])  # type: ignore[arg-type]
    assert str(error.value) == "parts.0.shortst: unknown key; did you mean 'shortest'?"
    with pytest.raises(ConfigError) as error:
        JoinedSources(parts=())
    assert str(error.value) == "parts = (): must have at least 1 item"


def test_a_fault_of_labels_is_short(tmp_path: Path) -> None:
    rows = [(text, f"{n} " + "long" * 100) for n, (text, _) in enumerate(parities())]
    with pytest.raises(ConfigError) as error:
        make(labelled(tmp_path, Classify(), rows), tmp_path / "run")
    assert "the task has 40 labels: " in str(error.value)
    assert str(error.value).endswith("and 30 more")
    assert len(str(error.value)) < 1000
