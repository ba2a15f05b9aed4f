"""Named test sets, and metrics for each value of a column."""

import json
from pathlib import Path

import pytest

from anyformer.config import ConfigError, io
from anyformer.data.fingerprint import fingerprint
from anyformer.recipe import Classify, NamedSources, Recipe, splits
from anyformer.training.train import evaluate
from tests.test_cli import done, refused
from tests.training.small import labelled, make, mixed, parities, quiet, run, said

SETS = """{{ "2016" = {{kind='table', path='{0}/a.tsv', text='text', label='label'}},
 "새것" = {{kind='lines', path='{0}/b.txt', pattern='(?P<label>\\w+)\\|(?P<domain>.*)\\|(?P<text>.*)'}} }}""".replace(
    "\n", ""
)
TWICE = "{name='a', rows={kind='folders', path='x'}}"
DOMAINS = ["책", "", "news"]


def recipe(folder: Path) -> Recipe:
    """With two test sets, whose rows have a domain."""
    rows = parities(24)
    lines = [f"{text}\t{label}\t{DOMAINS[i % 3]}" for i, (text, label) in enumerate(rows)]
    (folder / "a.tsv").write_text("\n".join(["text\tlabel\tdomain", *lines]), encoding="utf-8")
    matched = [f"{label}|{DOMAINS[i % 3]}|{text}" for i, (text, label) in enumerate(rows[:12])]
    (folder / "b.txt").write_text("\n".join(matched), encoding="utf-8")
    return io.override(labelled(folder, Classify(), parities(), steps=2), [f"data.test={SETS.format(folder)}"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sets")
    run(recipe(home), home / "run")
    return home


def test_test_sets_are_written_and_read_back(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    assert isinstance(made.data.test, NamedSources)
    assert [one.name for one in splits(made.data)] == ["train", "valid", "2016", "새것"]
    for format in ("toml", "json"):
        assert io.loads(Recipe, io.dumps(made, format), format) == made
    assert io.override(made, [f'data.test={{kind="named", {SETS.format(tmp_path).strip("{ }")}}}}}']) == made
    assert {key for key in fingerprint(made.data) if "test" in key} == {
        "data.test.parts.0.rows.path",
        "data.test.parts.1.rows.path",
    }


def test_each_set_has_its_metrics(folder: Path) -> None:
    """`test` is all of them, each as if it were the only test set."""
    every = evaluate(folder / "run")
    for name, count in (("2016", 24), ("새것", 12)):
        one = evaluate(folder / "run", split=name)
        assert one.count == count
        assert {f"{name}.{key}": value for key, value in one.values.items()}.items() <= every.values.items()
        assert every.notes[name] == one.notes
    assert every.count == 36
    alone = [f"data.test={{kind='table', path='{folder}/a.tsv', text='text', label='label'}}"]
    assert evaluate(folder / "run", alone) == evaluate(folder / "run", split="2016")
    assert "2016.accuracy" in done("evaluate", folder / "run")
    found = json.loads(done("evaluate", folder / "run", "--split", "새것", "--json"))
    assert (found["split"], found["n"]) == ("새것", 12)


def test_unknown_sets_are_refused(folder: Path) -> None:
    (line,) = refused("evaluate", folder / "run", "--split", "2017")
    assert line.startswith("data.2017: is not in ")
    assert line.endswith("; --split can be train, valid, 2016, 새것, test")


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("{a = {kind='table', path='x.tsv', text='t'}}", "data.test.parts.0.rows: the task classify needs the columns"),
        ("{a = {kind='tabel', path='x.tsv'}}", "data.test.parts.0.rows.kind = 'tabel': unknown kind; did you mean "),
        ("{valid = {kind='folders', path='x'}}", "data.test.parts.0.name = 'valid': is the name of a split"),
        (f"{{kind='named', parts=[{TWICE}, {TWICE}]}}", "data.test.parts.1.name = 'a': is the name of two test sets"),
        ("{}", "data.test.parts"),
        ("{'a b' = {kind='folders', path='x'}}", "data.test.parts.0.name = 'a b': "),
    ],
)  # fmt: skip
def test_wrong_sets_are_faults_of_the_recipe(test: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        io.override(labelled(tmp_path, Classify(), parities()), [f"data.test={test}"])
    assert str(error.value).startswith(why)


def test_sets_are_read_before_training(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    (tmp_path / "b.txt").write_text("even|x|1\nneither|x|2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.test\.parts\.1\.rows: 1 bad row"):
        make(made, tmp_path / "run")
    console = quiet()
    make(io.override(made, ["data.on_bad_row=skip"]), tmp_path / "run", console=console)
    assert "새것: 1 bad rows skipped" in said(console)


# -- by a column ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("2016", 8), ("새것", 4)])
def test_metrics_by_a_column_are_those_of_its_rows(folder: Path, name: str, size: int, tmp_path: Path) -> None:
    plain, found = evaluate(folder / "run", split=name), evaluate(folder / "run", split=name, by="domain")
    tables = found.notes["by"]["domain"]
    assert (found.values, found.count) == (plain.values, plain.count)
    assert {value: table["n"] for value, table in tables.items()} == dict.fromkeys(sorted(DOMAINS), size)
    mean = sum(table["accuracy"] * table["n"] for table in tables.values()) / found.count
    assert mean == pytest.approx(found.values["accuracy"])
    rows = [line.split("\t") for line in (folder / "a.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    if name == "2016":
        some = [f"{text}\t{label}" for text, label, domain in rows if domain == "책"]
        (tmp_path / "only.tsv").write_text("\n".join(["text\tlabel", *some]), encoding="utf-8")
        only = [f"data.test={{kind='table', path='{tmp_path}/only.tsv', text='text', label='label'}}"]
        assert {"n": size, **evaluate(folder / "run", only).values} == tables["책"]


def test_metrics_by_a_column_of_all_sets(folder: Path) -> None:
    text = done("evaluate", folder / "run", "--by", "domain")
    assert "새것.by.domain.책.accuracy" in text
    notes = json.loads(done("evaluate", folder / "run", "--split", "2016", "--by", "label", "--json"))["notes"]
    assert notes["by"]["label"].keys() == {"even", "odd"}


def test_a_mixture_has_metrics_by_a_column(tmp_path: Path) -> None:
    run(mixed(tmp_path, steps=2), tmp_path / "run")
    found = evaluate(tmp_path / "run", split="valid", by="source")
    assert [table["n"] for table in found.notes["by"]["source"].values()] == [2] * 8


@pytest.mark.parametrize(
    ("changes", "by", "why"),
    [
        ([], "domian", "by = 'domian': no such column in {0}/a.tsv, separated by tabs; did you mean 'domain'?"),
        (
            ["data.test={{kind='folders', path='{0}'}}"],
            "x",
            "by = 'x': only a table or lines with a pattern have columns",
        ),
    ],
)
def test_wrong_columns_are_refused(changes: list[str], by: str, why: str, folder: Path) -> None:
    (line,) = refused("evaluate", folder / "run", *(text.format(folder) for text in changes), "--by", by)[:1]
    assert line.startswith(why.format(folder))
    (line,) = refused("evaluate", folder / "run", "--split", "새것", "--by", by)
    assert line.startswith(f"by = '{by}': the pattern has no group of this name; ")


def test_too_many_values_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.training.train.MAX_VALUES", 2)
    with pytest.raises(ConfigError, match=r"^by = 'domain': has 3 values: metrics are reported for at most 2$"):
        evaluate(folder / "run", by="domain")
