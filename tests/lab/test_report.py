"""The pages of docs/lab are those of the results beside them, and each names a figure that is there."""

from pathlib import Path

import pytest

from anyformer.lab.experiment import NAMES, find
from anyformer.lab.report import index_of, page_of, setup, stored

LAB = Path(__file__).parents[2] / "docs" / "lab"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_that_of_its_results(name: str) -> None:
    found = stored(find(name), LAB)
    assert found, f"no whole set of results for {name}: run `anyformer lab {name}` and store it"
    assert (LAB / f"{name}.md").read_text(encoding="utf-8") == page_of(find(name), found), "run `make lab-report`"
    assert all((LAB / "figures" / f"{name}-{size}.png").exists() for size in found)


@pytest.mark.parametrize("name", NAMES)
def test_listed_minutes_are_those_of_the_results(name: str) -> None:
    """`anyformer lab` lists minutes with two jobs on two cores, or on a GPU; differences of 20 seconds are ignored."""
    experiment = find(name)
    for size, listed in zip(("quick", "cpu", "gpu"), experiment.minutes, strict=True):
        for results in (some for at, some in stored(experiment, LAB).items() if at == size):
            measured = sum(r.seconds for r in results) / 60 / (1 if size == "gpu" else 2)
            assert abs(listed - measured) < max(0.33, 0.15 * measured), f"{size}: {measured:.1f} minutes"


def test_a_set_up_states_seeds_and_sizes() -> None:
    results = stored(find("norms"), LAB)["quick"]
    assert setup(results) == (
        "3 or 6 seeds for each setting; ± is one standard deviation over seeds; width 32; depth 2 or 12; 4 heads; "
        "200 training steps; learning rate 0.001 or 0.004; 320 tokens per batch"
    )
    assert setup(stored(find("heads"), LAB)["quick"]).startswith("each setting measured once; times are medians of 9")


def test_the_index_is_that_of_the_results() -> None:
    index = [(experiment, found) for experiment in map(find, NAMES) if (found := stored(experiment, LAB))]
    assert (LAB / "README.md").read_text(encoding="utf-8") == index_of(index), "run `make lab-report`"


def test_no_result_is_of_an_experiment_that_is_gone() -> None:
    files = [path for path in (LAB / "results").glob("*/*") if path.stem not in NAMES or path.suffix != ".jsonl"]
    assert not files
