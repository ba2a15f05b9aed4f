"""Runs beside each other: metrics equal those of `evaluate`, and intervals cover the true difference."""

import json
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.cli.app import json_line
from anyformer.config import ConfigError, io
from anyformer.lab.comparison import bootstrap, measures
from anyformer.lab.comparison.bootstrap import paired, resample
from anyformer.lab.comparison.compare import _blocks, compare
from anyformer.lab.comparison.page import page, text, verdicts
from anyformer.recipe import Classify
from anyformer.tasks.metrics import bleu, span_scores, word_error_rate
from anyformer.training.train import evaluate
from tests.training import small

WORDS = st.lists(st.sampled_from(["ein", "Hund", "läuft", "개", "狗"]), min_size=1, max_size=7).map(" ".join)
TAGS = st.lists(st.sampled_from(["O", "B-x", "I-x", "B-y", "I-y"]), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=2, max_size=12))
def test_metrics_of_sums_are_the_corpus_metrics(rows: list[tuple[str, str]]) -> None:
    predicted, true = map(list, zip(*rows, strict=True))
    assert measures.bleu(predicted, true, "13a").total == pytest.approx(bleu(predicted, true, "13a")[0], abs=1e-9)
    assert measures.word_error_rate(predicted, true).total == pytest.approx(word_error_rate(predicted, true))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        TAGS.flatmap(
            lambda a: st.tuples(
                st.just(a),
                st.lists(st.sampled_from(["O", "B-x", "I-x", "B-y", "I-y"]), min_size=len(a), max_size=len(a)),
            )
        ),
        min_size=1,
        max_size=8,
    )
)
def test_span_f1_of_sums(rows: list[tuple[list[str], list[str]]]) -> None:
    predicted, true = map(list, zip(*rows, strict=True))
    assert measures.span_f1(predicted, true).total == pytest.approx(span_scores(predicted, true)[0]["span_f1"])


def test_the_interval_covers_the_true_difference() -> None:
    """Over many samples of rows, the 95 % interval contains the difference of the population about 95 times of 100."""
    generator, covered = np.random.default_rng(1), 0
    for seed in range(200):
        hard = generator.random(200)  # rows that are hard for one run are hard for the other
        first = measures.mean("accuracy", (hard + 0.5 * generator.random(200) < 0.9).astype(float).tolist())
        second = measures.mean("accuracy", (hard + 0.5 * generator.random(200) < 0.8).astype(float).tolist())
        found = paired(first, second, tuple(resample([first, second], 400, seed)))
        covered += found.low <= -0.1 <= found.high  # P(hard + u/2 < c) = c - 1/4 between 1/2 and 1
    assert 180 <= covered <= 198


def test_equal_runs_do_not_differ() -> None:
    one = measures.mean("accuracy", [0.0, 1.0] * 20)
    found = paired(one, one, tuple(resample([one, one])))
    assert (found.value, found.low, found.high, found.p, found.significant) == (0, 0, 0, 1, False)


@given(st.integers(1, 2**12))
@settings(max_examples=20, deadline=None)
def test_blocks_of_samples_do_not_change_the_values(limit: int) -> None:
    values = np.random.default_rng(0).integers(0, 9, (3, 40)).astype(float)  # whole numbers: sums are exact
    each = [measures.mean("a", values[0].tolist()), measures.ratio("b", values[1].tolist(), values[2].tolist())]
    whole = resample(each, 50)
    with mock.patch.object(bootstrap, "MAX_COUNTS", limit):
        assert all(map(np.array_equal, whole, resample(each, 50)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs that reverse digits: one hardly trained, one longer and wider."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = small.pairs("encoder-decoder", valid=60, dropout=0.0, steps=5, evaluate_every=5)
    small.run(recipe, folder / "short")
    longer = io.override(recipe, ["train.steps=80", "train.optimizer.lr=0.02", "model.width=16"])
    small.run(longer, folder / "long")
    return folder / "short", folder / "long"


def test_metrics_equal_those_of_evaluate(trained: tuple[Path, Path]) -> None:
    found = compare(trained, split="valid")
    for i, run in enumerate(trained):
        alone = evaluate(run, split="valid").values
        for name in found.metrics:
            assert found.metrics[name][i] == pytest.approx(alone[name], rel=1e-4), name
    assert found.rows == 60
    assert found.names == ("short", "long")
    assert found.settings["train.steps"] == ("5", "80")
    assert "seed" not in found.settings
    assert found.differences["loss"][0].significant
    assert found.differences["loss"][0].value < 0
    assert "loss: long is better than short" in "\n".join(verdicts(found))
    assert set(found.curves) == {"short", "long"}
    assert all(len(set(one.predictions)) > 1 for one in found.examples)


def test_command_writes_page_figure_and_json(trained: tuple[Path, Path], tmp_path: Path) -> None:
    runs = [str(run) for run in trained]
    shown = CliRunner().invoke(app, ["compare", *runs, "--split", "valid", "--out", str(tmp_path / "c.html")])
    assert shown.exit_code == 0, shown.output
    assert "train.steps" in shown.output
    written = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in written
    assert "http" not in written  # loads nothing
    found = CliRunner().invoke(app, ["compare", *runs, "--split", "valid", "--out", str(tmp_path / "c.png"), "--json"])
    assert json.loads(found.stdout.splitlines()[-1])["names"] == ["short", "long"]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.html", "c.png"]


def test_json_has_no_nan() -> None:
    assert json.loads(json_line({"a": [math.nan, 1.5], "b": {"c": -math.inf}})) == {"a": [None, 1.5], "b": {"c": None}}


@pytest.mark.parametrize(("words", "what"), [
    (["a"], "name at least two runs"),
    (["a", "b", "--split", "test"], "data.test"),
    (["a", "a"], "each run must be named once"),
    (["a", "b", "--out", "x.pdf"], "must end in .html or .png"),
    (["a", "b", "--out", "nowhere/x.png"], "--out = nowhere/x.png: there is no folder nowhere"),
])  # fmt: skip
def test_wrong_input_is_one_line(trained: tuple[Path, Path], words: list[str], what: str) -> None:
    names = {"a": str(trained[0]), "b": str(trained[1])}
    found = CliRunner().invoke(app, ["compare", *(names.get(word, word) for word in words)])
    assert found.exit_code == 2
    assert what in found.stderr


def test_runs_of_other_tasks_are_refused(trained: tuple[Path, Path], tmp_path: Path) -> None:
    small.run(small.text(tmp_path, steps=2), tmp_path / "lm")
    with pytest.raises(ConfigError, match="different tasks: seq2seq, lm"):
        compare([trained[0], tmp_path / "lm"], split="valid")


def test_language_models_are_compared_by_bits_per_byte(tmp_path: Path) -> None:
    recipe = small.text(tmp_path, steps=2)
    (tmp_path / "text.txt").write_text("".join(f"line {i} of the text\n" * 90 for i in range(30)), encoding="utf-8")
    for steps in (2, 40):
        small.run(io.override(recipe, [f"train.steps={steps}", "data.valid.start=0"]), tmp_path / f"run{steps}")
    found = compare([tmp_path / "run2", tmp_path / "run40"], split="valid")
    assert found.rows >= 10
    assert found.metrics["bits_per_byte"][1] < found.metrics["bits_per_byte"][0]
    assert "bits_per_byte" in text(found)


def test_a_text_of_one_line_has_blocks() -> None:
    assert len(list(_blocks(["가나다 " * 30_000]))) >= 50
    assert "".join(_blocks(["a line\n" * 500])) == "a line\n" * 500


def test_labels_and_tags(tmp_path: Path) -> None:
    """Accuracy equals that of `evaluate` for labels and tags."""
    recipes = {
        "labelled": small.labelled(tmp_path, Classify(), small.parities()),
        "tagging": small.tagging(tmp_path),
    }
    for name, recipe in recipes.items():
        for seed in (0, 1):
            small.run(io.override(recipe, [f"seed={seed}", "train.steps=3"]), tmp_path / f"{name}{seed}")
        runs = [tmp_path / f"{name}{seed}" for seed in (0, 1)]
        found = compare(runs, split="train")
        alone = [evaluate(run, split="train").values["accuracy"] for run in runs]
        assert found.metrics["accuracy"] == pytest.approx(alone)
        assert "<table>" in page(found)
