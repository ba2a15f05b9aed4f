"""The pages of docs/lab are those of the results beside them, and each names a figure that is there."""

from pathlib import Path

import pytest

from anyformer.lab.experiment import NAMES, find
from anyformer.lab.report import index_of, page_of, stored

LAB = Path(__file__).parents[2] / "docs" / "lab"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_that_of_its_results(name: str) -> None:
    found = stored(find(name), LAB)
    assert found, f"no whole set of results for {name}: run `anyformer lab {name}` and store it"
    assert (LAB / f"{name}.md").read_text(encoding="utf-8") == page_of(find(name), found), "run `make lab-report`"
    assert all((LAB / "figures" / f"{name}-{size}.png").exists() for size in found)


def test_the_index_is_that_of_the_results() -> None:
    index = [(experiment, found) for experiment in map(find, NAMES) if (found := stored(experiment, LAB))]
    assert (LAB / "README.md").read_text(encoding="utf-8") == index_of(index), "run `make lab-report`"


def test_no_result_is_of_an_experiment_that_is_gone() -> None:
    files = [path for path in (LAB / "results").glob("*/*") if path.stem not in NAMES or path.suffix != ".jsonl"]
    assert not files
