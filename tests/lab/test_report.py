"""The pages of docs/lab are those of the results beside them, and each names a figure that is there."""

import inspect
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from anyformer.lab.cells import Cell, CellResult, append
from anyformer.lab.experiment import VERDICTS, Experiment, StoredVerdict, find
from anyformer.lab.stats import summary
from anyformer_claims.warmup import _by_layer
from docs_site.lab_page import LAB, measured_on, page_of, reading, setup
from docs_site.lab_report import index_of, stored, unused_figures, verdicts_of
from tests.lab.made_up import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_that_of_its_results(name: str) -> None:
    found = stored(find(name), LAB)
    assert found, f"no whole set of results for {name}: run `anyformer lab {name}` and store it"
    assert (LAB / f"{name}.md").read_text(encoding="utf-8") == page_of(find(name), found), "run `make lab-report`"
    assert all((LAB / "figures" / f"{name}-{size}.png").exists() for size in found)


def test_a_set_up_states_seeds_and_sizes() -> None:
    norms, heads = find("norms"), find("heads")
    results = stored(norms, LAB).popitem()[1]
    assert "seeds (200 to 20" in reading(norms, results)
    assert "for each of 6 settings (depth 2)" in reading(norms, results)
    assert "± is one standard deviation over seeds" in reading(norms, results)
    assert "losses are in nats per token" in reading(norms, results)
    assert "2 or " in setup(norms, results)
    counted = stored(heads, LAB).popitem()[1]
    assert reading(heads, counted).startswith("each setting measured once; times are medians of 9")


def test_results_of_several_machines_are_said_to_be_pooled() -> None:
    results = stored(find("norms"), LAB).popitem()[1]
    one, other = ([replace(r, machine=machine) for r in results] for machine in ("A, torch 1", "B, torch 2"))
    assert measured_on(one).endswith("each on A, torch 1.")
    shallow = [b if b.cell["depth"] == 2 else a for a, b in zip(one, other, strict=True)]
    assert "of 12 settings 6 ran on (1) alone, 6 ran on (2) alone." in measured_on(shallow)
    assert "1 on more than one" in measured_on([*one[:-1], other[-1]])


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_how_to_repeat_it(name: str) -> None:
    text = (LAB / f"{name}.md").read_text(encoding="utf-8")
    assert text.count("**Repeat with:** `anyformer lab ") == 1
    for figure in text.split("![")[1:]:
        assert figure.splitlines()[2].startswith("*"), "a figure has a caption"


def test_minutes_of_measurements_that_may_share_a_gpu_are_an_upper_bound() -> None:
    for name, bound in (("norms", True), ("heads", False)):
        experiment = find(name)
        some = stored(experiment, LAB).popitem()[1]
        assert ("on one GPU, or less: " in page_of(experiment, {"gpu": some})) is bound
        assert ", or less: " not in page_of(experiment, {"cpu": some})


def test_a_best_rate_at_an_end_of_those_tried_is_named() -> None:
    experiment = find("width")
    inside, widest = (stored(experiment, LAB)[size] for size in ("cpu", "gpu"))
    assert "tried" not in experiment.result(inside)
    assert "at 1,024 (the smallest tried)" in experiment.result(widest)
    at_least = [any("at least" in text for text in experiment.beside(some).values()) for some in (inside, widest)]
    assert at_least == [False, True]


def test_a_page_names_the_sizes_that_were_not_measured() -> None:
    experiment = find("norms")
    results = stored(experiment, LAB).popitem()[1]
    assert "Not measured on a CPU or on a GPU." in page_of(experiment, {"quick": results})
    assert "Not measured on a GPU." in page_of(experiment, {"cpu": results})
    assert "Not measured" not in page_of(experiment, {"cpu": results, "gpu": results})


def test_preconditions_and_parts_are_shown_apart() -> None:
    norms, warmup = (page_of(find(name), stored(find(name), LAB)) for name in ("norms", "warmup"))
    assert "| precondition: 2 layers learn with norms and residuals |" in norms
    assert "| part of a condition: post-norm at " in warmup
    assert "|  |" not in norms


@pytest.mark.parametrize("name", NAMES)
def test_a_page_states_the_set_up_and_what_was_observed_of_every_condition(name: str) -> None:
    experiment = find(name)
    for results in stored(experiment, LAB).values():
        assert experiment.setting(results)
        outcomes, beside = experiment.verdict(results).outcomes, experiment.beside(results)
        assert not beside.keys() - {one.name for one in outcomes}
        assert not [one.name for one in outcomes if not (one.seen or beside.get(one.name))]


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_says_what_a_reader_needs(name: str) -> None:
    experiment = find(name)
    texts = Path(inspect.getfile(type(experiment))).with_suffix(".toml")
    assert not tomllib.loads(texts.read_text(encoding="utf-8")).keys() - Experiment.__annotations__.keys()
    assert experiment.measured.endswith(".")
    assert experiment.limits.endswith(".")
    assert 2 <= len(experiment.sources) <= 4
    assert all("](https://" in source for source in experiment.sources)
    for size in ("cpu", "gpu"):
        settings = [{**cell, "seed": None} for cell in experiment.cells(size) if "seed" in cell]
        if not experiment.timed:
            assert max(settings.count(one) for one in settings) >= 5


def test_results_under_another_rule_are_stale() -> None:
    experiment = find("norms")
    results = stored(experiment, LAB).popitem()[1]
    fresh, other = ([replace(r, rule=rule) for r in results] for rule in (experiment.rule_for(results), "0" * 12))
    assert "stale" not in page_of(experiment, {"cpu": fresh}).lower()
    for some in (other, [*fresh[:-1], other[-1]]):
        text = page_of(experiment, {"cpu": some})
        assert "but this verdict is stale" in text
        assert "(stale)\n" in text
        assert "`000000000000`" in text
        assert "(stale)" in index_of([(experiment, {"cpu": some})])
    assert experiment.rule_for(results) in page_of(experiment, {"cpu": fresh})


def test_stale_results_are_shown_as_they_are_until_all_cells_are_measured_again(tmp_path: Path) -> None:
    experiment, file = find("norms"), tmp_path / "results" / "cpu" / "norms.jsonl"
    cells = experiment.cells("cpu")
    found = {"final": 1.0, "mean": 1.0, "exact_match": 0.0, "diverged": False, "curve": [[1, 1.0]]}

    def write(some: list[Cell], rule: str) -> list[CellResult]:
        file.unlink(missing_ok=True)
        results = [CellResult(dict(cell), found, 1.0, "made up", rule) for cell in some]
        for result in results:
            append(file, result)
        return results

    fresh = experiment.rule(cells)
    assert stored(experiment, tmp_path) == {}
    whole = write(cells, fresh)
    assert stored(experiment, tmp_path) == {"cpu": whole}
    write(cells[1:], fresh)
    assert stored(experiment, tmp_path) == {}
    before = write([cell for cell in cells if cell["lr"] < 0.002][::-1], "older")  # workers end in any order
    assert stored(experiment, tmp_path) == {"cpu": sorted(before, key=lambda result: result["seed"])}
    assert "`anyformer lab norms` (about " in page_of(experiment, {"cpu": before})
    append(file, CellResult(dict(cells[-1]), found, 1.0, "made up", fresh))
    assert stored(experiment, tmp_path) == {}


def test_listed_verdicts_are_those_of_the_results() -> None:
    index = [(experiment, found) for experiment in map(find, NAMES) if (found := stored(experiment, LAB))]
    file = index[0][0].file.with_name(VERDICTS)
    assert file.read_text(encoding="utf-8") == verdicts_of(index), "run `make lab-report`"
    assert all(experiment.published.keys() == found.keys() for experiment, found in index)


def test_a_listed_verdict_says_whether_it_is_stale() -> None:
    experiment = find("norms")
    today = experiment.rule(experiment.cells("cpu"))
    for rule, described in ((today, "holds, 3.5 min"), ("other", "holds, stale, 3.5 min")):
        vars(experiment)["published"] = {"cpu": StoredVerdict("holds", rule, 3.5)}
        assert experiment.described("cpu") == described
    assert experiment.described("gpu") == f"about {experiment.minutes[2]:g} min"


def test_the_index_is_that_of_the_results() -> None:
    index = [(experiment, found) for experiment in map(find, NAMES) if (found := stored(experiment, LAB))]
    assert (LAB / "README.md").read_text(encoding="utf-8") == index_of(index), "run `make lab-report`"


def test_the_index_gives_the_result_of_each_size() -> None:
    scale = find("scale")
    found = stored(scale, LAB)
    rows = index_of([(scale, found)])
    assert f"<br>On a CPU: {scale.result(found['cpu'])}<br>On a GPU: {scale.result(found['gpu'])} |" in rows
    alone = index_of([(scale, {"gpu": found["gpu"]})])
    assert "On a CPU" not in alone
    assert f"<br>On a GPU: {scale.result(found['gpu'])} |" in alone


def test_trainings_that_diverged_are_named_beside_their_loss() -> None:
    norms = find("norms")
    some = stored(norms, LAB)["gpu"]
    assert "without norms (5 of 5 diverged) and" in norms.result(some)
    assert "the last at step 28, where the curve ends." in norms.caption(some)
    stable = [replace(r, found={**r.found, "diverged": False}) for r in some]
    assert "diverged" not in norms.result(stable)
    assert "step 28" not in norms.caption(stable)


def test_the_first_gradients_of_a_seed_count_once() -> None:
    for results in stored(find("warmup"), LAB).values():
        seeds = len({r["seed"] for r in results})
        assert all(len(values) == len(set(values)) == seeds for values in _by_layer(results, "post").values())


def test_the_best_rate_in_the_table_is_that_of_the_losses_beside_it() -> None:
    scale = find("scale")
    for results in stored(scale, LAB).values():
        head, *rows = scale.table(results)
        for row in rows:
            init, k, _, *_, rate, loss = row
            way = "inv_sqrt_key" if row[2].startswith("with ") else "none"
            cell = {"part": "training", "init": init, "k": int(k), "scale": way, "lr": float(rate)}
            assert loss == str(summary([r["loss"] for r in results if cell.items() <= r.cell.items()]))
        assert head[-2] == "best rate"


def test_no_figure_is_of_results_that_are_gone() -> None:
    assert not unused_figures([(experiment, stored(experiment, LAB)) for experiment in map(find, NAMES)], LAB)


def test_no_result_is_of_an_experiment_that_is_gone() -> None:
    files = [path for path in (LAB / "results").glob("*/*") if path.stem not in NAMES or path.suffix != ".jsonl"]
    assert not files
