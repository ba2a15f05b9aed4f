"""What `evaluate`, `predict` and `train --dry-run` print about splits, counts, unfinished runs and unknown tokens."""

import json
from pathlib import Path

import pytest

from anyformer.recipe import Classify, Data, MaskedLanguageModel, Padded, ParallelFiles, Recipe, Words
from anyformer.training.plan import plan
from tests.test_cli import done, run
from tests.training.small import corrupted, labelled, pairs, parities, quiet, run as train, stop_at


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    recipe = labelled(folder, Classify(), [*parities(), ("7 8 odd", "odd")], steps=2)
    train(recipe, folder / "run")
    return folder / "run"


def test_the_table_names_task_split_and_count_and_has_no_python_in_it(labels: Path) -> None:
    text = done("evaluate", labels, "--split", "valid")
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert (lines["task"], lines["split"], lines["n"]) == ("classify", "valid", "41")
    assert {"loss", "accuracy", "macro_f1"} < lines.keys()
    assert {"f1.odd", "f1.even"} & lines.keys()
    assert "{" not in text
    found = json.loads(done("evaluate", labels, "--split", "valid", "--json"))
    assert (found["split"], found["n"]) == ("valid", 41)


def test_rows_that_were_left_out_are_lines(labels: Path, tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("text\tlabel\n1 2\todd\n3\tneither\n", encoding="utf-8")
    source = f"data.test={{kind='table', path='{tmp_path / 'test.tsv'}', text='text', label='label'}}"
    lines = done("evaluate", labels, source, "data.on_bad_row=skip").splitlines()
    assert any(line.split() == ["left_out.rows", "1"] for line in lines)
    assert any(line.startswith("left_out.first") and "'neither' does not occur" in line for line in lines)


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    assert stop_at(pairs(steps=40), tmp_path / "run", 3)
    step = json.loads(done("evaluate", tmp_path / "run", "--split", "valid", "--json"))["notes"]["unfinished"]
    assert step.startswith("training has not finished: this is its checkpoint at step ")
    assert step.endswith(" of 40")
    assert "unfinished" in done("evaluate", tmp_path / "run", "--split", "valid")


def test_the_table_has_each_metric_beside_its_signature(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    recipe = pairs(steps=2)
    train(recipe.model_copy(update={"task": recipe.task.model_copy(update={"metrics": ("bleu",)})}), tmp_path / "run")
    text = done("evaluate", tmp_path / "run", "--split", "valid")
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    values = json.loads(done("evaluate", tmp_path / "run", "--split", "valid", "--json"))["metrics"]
    assert values.keys() < lines.keys()
    assert float(lines["bleu"]) == pytest.approx(values["bleu"])
    assert "bleu.signature" in lines


def test_a_finished_run_does_not(labels: Path) -> None:
    assert "unfinished" not in done("evaluate", labels, "--split", "valid")


def test_predict_names_lines_with_unknown_tokens(labels: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("1 2\n3 漢 4\n\n한국어\n", encoding="utf-8")
    found = run("predict", labels, tmp_path / "in.txt")
    assert found.exit_code == 0
    assert len(found.stdout.splitlines()) == 4
    (line,) = found.stderr.splitlines()
    assert line.startswith("2 of 4 lines have parts that are not in the vocabulary")
    assert line.endswith("<unk>: line 2, 4")
    (tmp_path / "in.txt").write_text("1 2\n", encoding="utf-8")
    assert done("predict", labels, tmp_path / "in.txt")


def test_a_mask_in_a_text_is_known(tmp_path: Path) -> None:
    train(corrupted(tmp_path, MaskedLanguageModel(), steps=1), tmp_path / "run")
    (tmp_path / "in.txt").write_text("n1 <mask> n3\nn1 漢 <mask>\n", encoding="utf-8")
    found = run("predict", tmp_path / "run", tmp_path / "in.txt")
    assert found.exit_code == 0
    assert found.stderr.startswith("1 of 2 lines have parts that are not in the vocabulary")


def test_generate_names_unknown_tokens_of_a_prompt(tmp_path: Path) -> None:
    train(pairs(steps=1), tmp_path / "run")
    found = run("generate", tmp_path / "run", "--prompt", "1 漢")
    assert found.exit_code == 0
    assert found.stderr.startswith("--prompt: has parts that are not in the vocabulary")
    assert done("generate", tmp_path / "run", "--prompt", "1 2")


def parallel(folder: Path, source_tokenizer: Words | None) -> Recipe:
    """Of ten source words of the validation rows one is not in the training rows; all targets are."""
    for name, word in (("train", "c"), ("valid", "x")):
        (folder / f"{name}.source").write_text(f"a b a b a\na b a b {word}\n", encoding="utf-8")
        (folder / f"{name}.target").write_text("1 2\n2 1\n", encoding="utf-8")
    sources = {
        name: ParallelFiles(source=f"{name}.source", target=f"{name}.target", encoding="utf-8")
        for name in ("train", "valid")
    }
    recipe = pairs("encoder-decoder", Padded(tokens=64), steps=2)
    change = {"data": Data(**sources, root=str(folder)), "source_tokenizer": source_tokenizer}
    return recipe.model_copy(update=change)


def test_a_dry_run_names_the_sides_and_unknown_tokens(tmp_path: Path) -> None:
    found = plan(parallel(tmp_path, Words()), quiet())
    assert found.unknown == {"train": {"source": 0, "target": 0}, "valid": {"source": 0.1, "target": 0}}
    (line,) = [line for line in found.render().splitlines() if line.startswith("tokenizer")]
    sizes = found.vocabularies
    assert sizes["source"] == sizes["target"] + 1
    shares = "train source 0.00%, train target 0.00%, valid source 10.00%, valid target 0.00%"
    both = f"source words, {sizes['source']} ids; target words, {sizes['target']} ids"
    assert line == f"tokenizer  {both}; unknown tokens: {shares}"


def test_one_tokenizer_has_no_side(tmp_path: Path) -> None:
    found = plan(parallel(tmp_path, None), quiet())
    (line,) = [line for line in found.render().splitlines() if line.startswith("tokenizer")]
    assert line == f"tokenizer  words, {found.vocabularies['']} ids; unknown tokens: train 0.00%, valid 7.14%"
