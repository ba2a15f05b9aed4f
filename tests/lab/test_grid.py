"""Grids of one's own: all combinations under equal budgets, divergence told, wrong ones refused before any training."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError, io
from anyformer.lab.compare import Line, aligned, cells, compare, report, verdict
from anyformer.lab.grid import (
    Axis,
    FlopBudget,
    Grid,
    Steps,
    TokenBudget,
    apply_budget,
    check,
    grid_of_recipe,
    load_grid,
    run_grid,
)
from anyformer.recipe.ready import read_recipe

SMALL = (
    "model.width=16",
    "model.decoder.blocks.0.feedforward.width=32",
    "data.train.count=60",
    "data.train.shortest=6",
    "data.valid.count=8",
    "train.schedule=constant",
    "train.evaluate_every=none",
    "train.save_every=none",
    "batches.tokens=256",
    "task.max_target=12",
)


def grid(**changes: object) -> Grid:
    axes = (
        Axis(name="position", fields=("model.decoder.position",), values=("sinusoidal", "rotary")),
        Axis(name="depth", fields=("model.decoder.depth",), values=(1, 2)),
    )
    given = {"base": "sort", "set": SMALL, "axes": axes, "seeds": (0, 1), "budget": Steps(count=20)}
    return Grid(**{**given, **changes})


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that say nothing are enough here."""
    monkeypatch.setattr("anyformer.lab.grid.MIN_STEPS", 5)


@pytest.mark.usefixtures("_few")
def test_all_combinations_are_compared(tmp_path: Path) -> None:
    short = grid(budget=Steps(count=5))
    results = run_grid(short, tmp_path)
    lines = compare(short, results)
    assert [line.setting for line in lines] == [
        {"position": p, "depth": d} for p in ("sinusoidal", "rotary") for d in (1, 2)
    ]
    assert all(len(line.values) == 2 and line.steps == 5 for line in lines)
    assert lines[1].parameters > lines[0].parameters
    page = report(short, results, tmp_path).read_text(encoding="utf-8")
    assert all(line.name in page for line in lines)
    assert (tmp_path / "figure.png").exists()
    before = (tmp_path / "results.jsonl").read_bytes()
    assert run_grid(short, tmp_path) == results
    assert (tmp_path / "results.jsonl").read_bytes() == before


def test_a_run_that_diverges_is_recorded(tmp_path: Path) -> None:
    axis = Axis(name="lr", fields=("train.optimizer.lr",), values=(1e-3, 1e30))
    found = grid(axes=(axis,), set=(*SMALL, "train.max_bad_steps=1"), seeds=(0,))
    results = run_grid(found, tmp_path)
    assert [r.found["diverged"] for r in results] == [False, True]
    fine, lost = compare(found, results)
    assert (fine.diverged, lost.diverged) == (0, 1)
    assert len(fine.values) == 1
    assert not lost.values
    assert "1 of 1" in report(found, results, tmp_path).read_text(encoding="utf-8")


def test_budgets_are_equal() -> None:
    recipe = read_recipe("sort", [*SMALL])
    deeper = io.override(recipe, ["model.decoder.depth=4"])
    tokens = [apply_budget(r, TokenBudget(count=20_000)).train.steps for r in (recipe, deeper)]
    assert tokens[0] == tokens[1]
    assert tokens[0] * 256 == pytest.approx(20_000, rel=0.2)  # a batch has at most 256 tokens, and few pads
    flops = [apply_budget(r, FlopBudget(count=1e10)).train.steps for r in (recipe, deeper)]
    assert flops[0] > 1.5 * flops[1]


WRONG = {
    "an unknown field": (
        {"axes": (Axis(name="a", fields=("model.nonsense",), values=(1,)),)},
        "model.nonsense: unknown key",
    ),
    "no axis": ({"axes": ()}, "axes"),
    "no value": ({"axes": [{"name": "a", "fields": ["seed"], "values": []}]}, "values"),
    "no seed": ({"seeds": ()}, "seeds"),
    "two of a name": ({"axes": (Axis(name="a", fields=("seed",), values=(1,)),) * 2}, "two axes are called 'a'"),
    "a value twice": ({"axes": (Axis(name="a", fields=("seed",), values=(1, 1)),)}, "1 is there twice"),
    "the seed's name": ({"axes": (Axis(name="seed", fields=("seed",), values=(1,)),)}, "choose another"),
    "too few steps": ({"budget": Steps(count=3)}, "pays for 3 steps: too few to compare"),
    "less than the warm-up": (
        {"set": (*SMALL, "train.schedule={kind='cosine', warmup=50}"), "budget": Steps(count=40)},
        "at least 51 steps (the warm-up takes 50)",
    ),
    "too few tokens": ({"budget": TokenBudget(count=500)}, "too few to compare"),
    "another metric": ({"metric": "bleu"}, "the task measures loss, exact_match"),
    "nothing to validate on": ({"set": (*SMALL, "data.valid=none")}, "has no data.valid"),
    "no such recipe": ({"base": "sorting"}, "'sorting' is neither a recipe nor a file"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_before_anything_is_trained(what: str, tmp_path: Path) -> None:
    changes, message = WRONG[what]
    with pytest.raises(ConfigError) as error:
        run_grid(grid(**changes), tmp_path / "out")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["[2]", "{ a = 1 }", "nan", "1979-05-27", "[[[]]]"])
def test_a_value_that_no_field_takes_is_one_fault(value: str) -> None:
    text = io.dumps(grid()).replace('"rotary"', value)
    with pytest.raises(
        ConfigError, match=r"^axes\.0\.values\.1 = .*must be true or false, a finite number or a string$"
    ):
        io.loads(Grid, text)


def test_a_grid_of_too_many_cells_is_refused_at_once() -> None:
    axes = tuple(Axis(name=f"a{i}", fields=("seed",), values=tuple(range(100))) for i in range(10))
    with pytest.raises(ConfigError, match="200,000,000,000,000,000,000 cells: a grid has at most 10,000"):
        grid(axes=axes)


def test_another_grid_in_the_folder_is_refused(tmp_path: Path) -> None:
    one = Axis(name="depth", fields=("model.decoder.depth",), values=(1,))
    run_grid(grid(axes=(one,), seeds=(0,)), tmp_path)
    fix = ": choose another folder with --out, or delete that one$"
    for changes, differs in (
        ({"seeds": (0, 1)}, "1 seed, not 2 seeds"),
        ({"seeds": (1,)}, "other seeds"),
        ({"budget": Steps(count=30), "set": SMALL[1:]}, "20 steps, not 30 steps"),
        ({"base": "dates", "axes": (Axis(name="width", fields=("model.width",), values=(8, 16)),)},
         "the recipe sort, not the recipe dates; of depth=1, not width=8,16"),
        ({"set": SMALL[:1]}, " ".join(SMALL) + ", not model.width=16"),
    ):  # fmt: skip
        other = grid(**{"axes": (one,), "seeds": (0,), **changes})
        with pytest.raises(ConfigError, match=f"holds results of {re.escape(differs)}{fix}"):
            run_grid(other, tmp_path)


def line(name: str, *values: float) -> Line:
    return Line({"position": name}, values, 0, "", 400, 1.0, 1, 1.0)


def test_the_verdict_names_the_best_setting_and_what_is_significant() -> None:
    none, rotary, same = line("none", 0.5, 0.51, 0.52), line("rotary", 0.1, 0.11, 0.12), line("alibi", 0.1, 0.13, 0.12)
    told = verdict([none, rotary, same], "loss")
    assert told.startswith(
        "best: position=rotary (loss 0.110 ± 0.010); significantly better than position=none (p < 0.001); "
    )
    assert "; not significantly better than position=alibi (p = 0." in told
    assert verdict([none, rotary], "exact_match").startswith("best: position=none")
    fixed = verdict([line("a", 0.5, 0.5, 0.5), line("b", 0.75, 0.75)], "loss")
    assert fixed == "best: position=a (loss 0.5 ± 0); better than position=b (no variation)"
    equal = verdict([line("a", 0.7, 0.7), line("b", *[0.7] * 7)], "loss")  # the test's p is a rounding error
    assert equal == "best: position=a (loss 0.7 ± 0); equal to position=b (no variation)"
    assert "may be chance: use more seeds" in verdict([line("a", 0.1), line("b", 0.2)], "loss")
    assert verdict([line("a", 0.1)], "loss") == "best: position=a (loss 0.1)"
    assert verdict([line("a")], "loss") == "no verdict: every training diverged"


def rated(lr: float, depth: int, *values: float) -> Line:
    return Line({"lr": lr, "depth": depth}, values, 0, "", 400, 1.0, 1, 1.0)


@given(
    st.permutations([0.001, 0.002, 0.004, 0.008]), st.lists(st.floats(0.1, 9), min_size=4, max_size=4), st.booleans()
)
def test_a_best_learning_rate_at_an_end_is_undecided(rates: list[float], scores: list[float], higher: bool) -> None:
    metric, best = ("exact_match", max) if higher else ("loss", min)
    lines = [rated(lr, 2, score, score) for lr, score in zip(rates, scores, strict=True)]
    at_best = {lr for lr, score in zip(rates, scores, strict=True) if score == best(scores)}
    worse = best(scores) + (-1 if higher else 1)
    other = rated(0.1, 3, worse, worse)  # of another depth, at a rate beyond
    told = verdict([*lines, other], metric, ["lr"])
    assert ("undecided, since lr=0.00" in told) == (not at_best & {0.002, 0.004})
    assert "undecided" not in verdict([*lines, other], metric)
    lost = [rated(0.0001, 2), rated(0.1, 2)]  # every training diverged beyond both ends
    assert "undecided" not in verdict([*lines, *lost], metric, ["lr"])


def test_axes_of_learning_rates_are_found_by_their_field() -> None:
    rate, depth = ("train.optimizer.lr",), ("model.decoder.depth",)
    axes = (Axis(name="rate", fields=rate, values=(0.1, 0.2)), Axis(name="depth", fields=depth, values=(1, 2)))
    assert grid(axes=axes).rates == ["rate"]


def test_the_table_is_aligned_and_has_the_metrics_of_the_task() -> None:
    lines = [
        dataclasses.replace(line("없음", 0.5, 0.6), others={"exact_match": (0.2, 0.3)}),
        dataclasses.replace(line("rotary", 0.1), others={"exact_match": (0.9,)}, difference="0.010"),
    ]
    header, first, second = aligned(cells(lines, "loss")).splitlines()
    assert header.split(" | ")[2:4] == ["p vs first row", "exact_match  "]
    assert [row.index("|", 2) for row in (header, second)] == [len("| position=rotary ")] * 2
    assert len(header) == len(second) == len(first) + 2  # Korean letters are twice as wide
    assert "0.250 ± 0.071" in first
    assert "diverged" not in header


@pytest.mark.usefixtures("_few")
def test_the_grid_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands there, on a table of one's own, only with fewer and smaller trainings."""
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text("utf-8")
    (found,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mygrid.toml").write_text(found, encoding="utf-8")
    (tmp_path / "korean_chatbot").mkdir()
    rows = "".join(f"질문 {i % 7} 번?,대답 {i % 7} 번.,0\n" for i in range(60))
    (tmp_path / "korean_chatbot" / "ChatbotData.csv").write_text(f"Q,A,label\n{rows}", encoding="utf-8")
    monkeypatch.setenv("ANYFORMER_DATA", str(tmp_path))
    small = [
        "model.width=12",
        "train.schedule.warmup=1",
        "tokenizer.size=300",
        "batches.tokens=64",
        "task.max_target=8",
    ]
    grid = load_grid(tmp_path / "mygrid.toml", [f"set={small}", "seeds=[0]", "budget.count=5"])
    results = run_grid(grid, tmp_path / "out")
    assert [(r.cell["position"], r.cell["depth"]) for r in results] == [
        (position, depth) for position in ("sinusoidal", "rotary", "alibi") for depth in (1, 3)
    ]
    assert "rotary" in report(grid, results, tmp_path / "out").read_text(encoding="utf-8")


def test_recipe_with_lists_of_values_is_a_grid() -> None:
    short = grid_of_recipe(
        "dates", ["model.*.position=alibi,rotary", "model.width=32,64", "seed=1"], steps=100, seeds=2
    )
    position, width = short.axes
    assert position.fields == ("model.encoder.position", "model.decoder.position")
    assert (position.values, width.values) == (("alibi", "rotary"), (32, 64))
    assert len(short.seeds) == 2
    recipe, whole = short.recipe(short.cells()[-1]), read_recipe("dates")
    assert [stack.position.kind for stack in (recipe.model.encoder, recipe.model.decoder)] == ["rotary", "rotary"]
    assert recipe.model.width == 64
    assert recipe.train.schedule.warmup == whole.train.schedule.warmup * 100 // whole.train.steps
    assert grid_of_recipe("dates", ["model.width=32,64"]).budget == Steps(count=whole.train.steps)


def test_a_recipe_without_a_list_of_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing varies: give a key several values"):
        grid_of_recipe("sort", ["model.width=32"])


def test_settings_by_name() -> None:
    """An axis of settings changes several fields by one name; it has fields or settings, and one setting per value."""
    axis = Axis(name="part", values=("base", "ema"), settings=((), ("train.ema=0.9", "model.tie=none")))
    grid = Grid(base="sort", axes=(axis,), seeds=(0,), budget=Steps(count=20))
    base, other = map(grid.recipe, grid.cells())
    assert base == read_recipe("sort", ["seed=0"])
    assert other == read_recipe("sort", ["train.ema=0.9", "model.tie=none", "seed=0"])
    with pytest.raises(ConfigError, match="are 1, and there are 2 values: each needs one"):
        Axis(name="part", values=("a", "b"), settings=((),))
    with pytest.raises(ConfigError, match="set the fields that take the values, or settings"):
        Axis(name="part", values=("a", "b"))


def test_grids_of_benchmarks_are_valid() -> None:
    for path in (Path(__file__).parents[2] / "benchmarks" / "grids").glob("*.toml"):
        grid = load_grid(path)
        check(grid, grid.cells())
