"""Classification and regression: what is read, the loss, the scores and the predictions."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import processors
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import ConfigError, Tokens
from anyformer.data.loader import Cursor
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import Classify, Regress, Words
from anyformer.runs.run import Run, load, write_folder, write_model
from anyformer.tasks import sequence_level as row_tasks
from anyformer.tasks.classify import Classifying
from anyformer.tasks.metrics import f1, pearson, spearman
from anyformer.tasks.regress import Regressing
from anyformer.tasks.sequence_level import Frame, SequenceLevelTask
from anyformer.training.loop import fit
from anyformer.training.train import evaluate
from tests.test_cli import done, refused
from tests.training.small import PADDED, distances, labelled, make, parities, run

TAGS = [(text, f"{label}, long" if len(text) > 5 else label if label == "odd" else "") for text, label in parities()]


@pytest.fixture(scope="module")
def words() -> TextTokenizer:
    return train_tokenizer(Words(), ["0 1 2 3 4 5 6 7 8 9"])


def shaken(made: Run) -> Run:
    """With weights large enough for every row to have an answer of its own."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return made


RECIPES = {
    "single": lambda folder: labelled(folder, Classify(), parities(), steps=2),
    "several": lambda folder: labelled(folder, Classify(separator=","), TAGS, labels=3, steps=2),
    "pairs": lambda folder: labelled(folder, Classify(pairs=True), [(*r[:2], r[2][0]) for r in distances()], labels=10),
    "numbers": lambda folder: labelled(folder, Regress(), distances(), labels=1, types=2, steps=2),
    "numbers of texts": lambda folder: labelled(
        folder, Regress(pairs=False), [(text, str(len(text))) for text, _ in parities()], labels=1, steps=2
    ),
}


@pytest.fixture(scope="module", params=RECIPES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Rows]:
    folder = tmp_path_factory.mktemp("trained")
    recipe = RECIPES[request.param](folder)
    job = make(recipe, folder / "once")
    assert job.valid is not None
    return shaken(run(recipe, folder / "run")), job.valid


def texts_of(rows: Rows) -> list[str]:
    pairs = rows.columns.get("pair")
    return (
        rows.columns["text"] if pairs is None else list(map("\t".join, zip(rows.columns["text"], pairs, strict=True)))
    )


@torch.no_grad()
def logits_of(run: Run, rows: Rows) -> Tensor:
    """One row at a time, without padding."""
    assert isinstance(run.task, SequenceLevelTask)
    found = []
    for piece in run.task.encode(rows, run.config):
        types = None if piece.types is None else torch.tensor([list(piece.types)])
        found.append(run.model(torch.tensor([list(piece.ids)]), types=types)[0])
    return torch.stack(found)


def test_probabilities_of_labels(trained: tuple[Run, Rows], tmp_path: Path) -> None:
    run, rows = trained
    texts = texts_of(rows)[:3]
    lines = "".join(f"{text}\n" for text in (*texts, ""))
    (tmp_path / "in.txt").write_text(lines, encoding="utf-8")
    write_folder(
        folder := tmp_path / "run", lambda to: write_model(to, run.model.state_dict(), run.config, run.spec, run.task)
    )
    if not isinstance(run.spec, Classify):
        (line,) = refused("predict", folder, tmp_path / "in.txt", "--scores")
        assert line == "--scores: is for runs of the tasks classify and span, not regress"
        return
    shown = done("predict", folder, tmp_path / "in.txt", "--scores").split("\n")
    assert [line.split("\t", 2)[0] for line in shown[:3]] == run.predict(texts)
    assert [line.split("\t", 2)[2] for line in shown[:3]] == texts
    assert shown[3:] == ["\t\t", ""]
    logits = logits_of(run, rows)[:3]
    for line, row in zip(shown, logits, strict=False):
        found = [float(p) for p in line.split("\t")[1].split(",") if p]
        expected = row.softmax(-1).max()[None] if run.spec.separator is None else row.sigmoid()[row > 0]
        assert torch.tensor(found).tolist() == pytest.approx(expected.tolist(), abs=1e-3)


# -- what is read -----------------------------------------------------------------------------------------------------


def test_a_row_is_framed(words: TextTokenizer) -> None:
    a, b = words.encode("1 2"), words.encode("3")
    assert Frame(words).row(a) == [words.bos, *a, words.eos]
    pair = Frame(words, pairs=True)
    assert pair.row(a, b) == [words.bos, *a, words.sep, *b, words.eos]
    assert pair.types(a, b) == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("single", "double", "second"),
    [
        ("<bos> $A <sep>", "<bos> $A <sep> $B:1 <sep>:1", 1),  # BERT's
        ("<bos> $A <eos>", "<bos> $A <eos> <eos> $B <eos>", 0),  # RoBERTa's
        ("$A <eos>", "$A <eos> $B <eos>", 0),  # T5's
    ],
)
def test_the_frame_of_a_file_is_kept(words: TextTokenizer, single: str, double: str, second: int) -> None:
    names = {name: int(getattr(words, name)) for name in ("bos", "sep", "eos")}
    template = processors.TemplateProcessing(
        single=single, pair=double, special_tokens=[(f"<{name}>", id) for name, id in names.items()]
    )
    file = TextTokenizer.from_json(words.to_json())
    file.inner.post_processor = template
    file = TextTokenizer.from_json(file.to_json())
    a, b = "1 2", "3 4 5"
    ids = words.encode(a), words.encode(b)
    assert Frame(file).row(ids[0]) == file.inner.encode(a).ids
    frame, whole = Frame(file, pairs=True), file.inner.encode(a, b)
    assert frame.row(*ids) == whole.ids
    assert frame.types(*ids) == whole.type_ids
    assert frame.second == second


def test_types_tell_the_second_text(trained: tuple[Run, Rows]) -> None:
    made, rows = trained
    assert isinstance(made.task, SequenceLevelTask)
    piece = made.task.encode(rows, made.config)[0]
    assert isinstance(made.config.source, Tokens)
    assert (piece.types is not None) == (made.task.pairs and made.config.source.types > 1)
    if piece.types is not None:
        assert len(piece.types) == len(piece.ids)
        assert 1 in piece.types


@given(st.lists(st.sampled_from("abc"), max_size=3))
def test_labels_are_numbers_by_name(words: TextTokenizer, names: list[str]) -> None:
    several = Classifying(Classify(separator="|", labels=("a", "b", "c")), words)
    asked = several.parse_label(" | ".join(names))
    assert asked == [int(name in names) for name in "abc"]
    assert several.format_prediction(torch.tensor(asked) - 0.5) == "|".join(sorted(set(names)))
    one = Classifying(Classify(labels=("a", "b", "c")), words)
    for name in names:
        (number,) = one.parse_label(f" {name} ")
        assert one.format_prediction(F.one_hot(torch.tensor(number), 3)) == name


# -- what is lost and how well it does --------------------------------------------------------------------------------


def test_evaluation_is_what_it_is_by_hand(trained: tuple[Run, Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = trained
    logits, asked = logits_of(made, rows), rows.columns["label"]
    monkeypatch.setattr(row_tasks, "MAX_INFERENCE_TOKENS", 40)  # several batches
    found = made.task.evaluate(made.model, rows, PADDED)
    assert found.count == len(asked)
    said = made.predict(texts_of(rows))
    spec = made.spec
    if isinstance(spec, Regress):
        assert spec.mean is not None
        assert spec.deviation is not None
        numbers = [float(label) for label in asked]
        guesses = [spec.mean + spec.deviation * float(row) for row in logits]
        assert [float(text) for text in said] == pytest.approx(guesses, rel=1e-4, abs=1e-4)
        errors = [((a - b) / spec.deviation) ** 2 for a, b in zip(guesses, numbers, strict=True)]
        assert found.values["loss"] == pytest.approx(sum(errors) / len(errors), rel=1e-4)
        together = torch.corrcoef(torch.tensor([guesses, numbers], dtype=torch.float64))
        assert found.values["pearson"] == pytest.approx(float(together[0, 1]), abs=1e-4)
        return
    assert isinstance(spec, Classify)
    if spec.separator is None:
        numbers = [spec.labels.index(label) for label in asked]
        assert said == [spec.labels[int(row.argmax())] for row in logits]
        assert found.values["loss"] == pytest.approx(float(F.cross_entropy(logits, torch.tensor(numbers))), rel=1e-4)
        assert found.values["accuracy"] == pytest.approx(
            sum(a == b for a, b in zip(said, asked, strict=True)) / len(said)
        )
    else:
        sets = [{name.strip() for name in label.split(",") if name.strip()} for label in asked]
        there = torch.tensor([[float(name in names) for name in spec.labels] for names in sets])
        assert [set(filter(None, text.split(","))) for text in said] == [
            {name for name, x in zip(spec.labels, row, strict=True) if x > 0} for row in logits
        ]
        chances = logits.sigmoid()
        by_hand = -(there * chances.log() + (1 - there) * (1 - chances).log()).mean()
        assert found.values["loss"] == pytest.approx(float(by_hand), rel=1e-3)
        hits = [set(filter(None, text.split(","))) == names for text, names in zip(said, sets, strict=True)]
        assert found.values["accuracy"] == pytest.approx(sum(hits) / len(hits))
    scores = found.notes["f1"]
    assert scores.keys() <= set(spec.labels)
    assert found.values["macro_f1"] == pytest.approx(sum(scores.values()) / len(scores))


def test_a_training_step_loses_what_evaluation_counts(trained: tuple[Run, Rows]) -> None:
    """And rows of a process that has none left lose nothing."""
    made, rows = trained
    assert isinstance(made.task, SequenceLevelTask)
    batch, _ = made.task.loader(rows, PADDED.model_copy(update={"tokens": 10_000}), 0, made.model).read(Cursor())
    with torch.no_grad():
        logits = made.model(batch.ids, segments=batch.segments, types=batch.types)
    loss = made.task.loss(logits, batch.labels)
    assert batch.target_count == batch.labels.numel()
    assert float(loss) / batch.target_count == pytest.approx(
        made.task.evaluate(made.model, rows, PADDED).values["loss"], rel=1e-4
    )
    assert float(made.task.loss(logits, torch.full_like(batch.labels, IGNORE))) == 0


def test_padding_changes_no_logits(trained: tuple[Run, Rows]) -> None:
    made, rows = trained
    assert isinstance(made.task, SequenceLevelTask)
    pieces = made.task.encode(rows, made.config)
    assert len({len(piece.ids) for piece in pieces}) > 2
    other: Any = SimpleNamespace(pad=3, media=None)
    together = dict(row_tasks.read_rows(made.model, pieces, other))
    alone = logits_of(made, rows)
    torch.testing.assert_close(torch.stack([together[i] for i in range(len(pieces))]), alone, rtol=1e-4, atol=1e-5)


def test_answers_come_in_the_order_asked(trained: tuple[Run, Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    made, rows = trained
    asked = texts_of(rows)[:20]
    asked.insert(3, " ")
    one_by_one = [made.predict([text])[0] for text in asked]
    monkeypatch.setattr(row_tasks, "MAX_INFERENCE_TOKENS", 30)
    done: list[int] = []
    together = made.predict(asked, progress=done.append)
    if made.spec.kind == "regress":  # rounding depends on the batch
        assert [float(x or "nan") for x in together] == pytest.approx(
            [float(x or "nan") for x in one_by_one], rel=1e-4, nan_ok=True
        )
    else:
        assert together == one_by_one
    assert together[3] == one_by_one[3] == ""
    assert sum(done) == len(asked)
    assert len({*one_by_one} - {""}) > (made.spec.kind == "regress")
    assert made.predict([]) == []


def test_a_run_keeps_what_its_rows_taught(trained: tuple[Run, Rows]) -> None:
    made, _ = trained
    kept = load(made.folder)
    assert kept.spec == made.spec == made.task.spec
    if isinstance(kept.spec, Classify):
        assert list(kept.spec.labels) == sorted(kept.spec.labels)
        assert len(kept.spec.labels) >= 2
    else:
        assert isinstance(kept.spec, Regress)
        assert kept.spec.deviation
    assert evaluate(made.folder, split="valid").count
    change = "task.labels=['x', 'y']" if isinstance(made.spec, Classify) else "task.mean=1.0"
    with pytest.raises(ConfigError, match="cannot be changed"):
        evaluate(made.folder, [change], split="valid")


def test_it_learns(tmp_path: Path) -> None:
    made = run(labelled(tmp_path, Classify(), parities(), width=16, steps=60), tmp_path / "run")
    assert evaluate(made.folder, split="valid").values["accuracy"] > 0.9
    (tmp_path / "b").mkdir()
    made = run(labelled(tmp_path / "b", Regress(), distances(), labels=1, width=16, steps=80), tmp_path / "b" / "run")
    assert evaluate(made.folder, split="valid").values["spearman"] > 0.8


def test_the_best_checkpoint_may_be_the_most_accurate(tmp_path: Path) -> None:
    job = make(labelled(tmp_path, Classify(), parities(), best="accuracy", evaluate_every=2, steps=8), tmp_path / "run")
    seen = iter([(3.0, 0.5), (1.0, 0.6), (2.0, 0.9), (4.0, 0.9)])
    before = job.task.evaluate

    def changed(*args: Any) -> Any:
        found = before(*args)
        found.values["loss"], found.values["accuracy"] = next(seen)
        return found

    job.task.evaluate = changed  # type: ignore[method-assign]
    fit(job)
    assert job.state.best_step == 6


# -- scores -----------------------------------------------------------------------------------------------------------


def test_f1() -> None:
    said, asked = torch.tensor([1, 1, 0, 0, 1]).bool(), torch.tensor([1, 0, 1, 0, 1]).bool()
    precision, recall = 2 / 3, 2 / 3
    assert f1(said, asked) == pytest.approx(2 * precision * recall / (precision + recall))
    none = torch.zeros(5).bool()
    assert f1(none, none) is None
    assert f1(none, asked) == f1(said, none) == 0


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=20))
def test_correlations(drawn: list[tuple[int, int]]) -> None:
    a, b = torch.tensor(drawn, dtype=torch.float64).unbind(1)
    if len(a.unique()) > 1 and len(b.unique()) > 1:
        assert pearson(a, b) == pytest.approx(float(torch.corrcoef(torch.stack([a, b]))[0, 1]))
        ranks = [[sorted(x.tolist()).index(v) + (x == v).sum().item() / 2 for v in x.tolist()] for x in (a, b)]
        assert spearman(a, b) == pytest.approx(float(torch.corrcoef(torch.tensor(ranks, dtype=torch.float64))[0, 1]))
        assert spearman(a, b) == pytest.approx(spearman(a.exp(), 3 * b + 1))  # the order alone counts
    else:
        assert pearson(a, b) == spearman(a, b) == 0


# -- bad input: one line each -----------------------------------------------------------------------------------------


def test_no_rows_of_a_label_are_left_out(words: TextTokenizer) -> None:
    """A label that neither was asked nor said has no F1, and counts for none."""
    task = Classifying(Classify(labels=("a", "b", "c")), words)
    values, notes = task.measure(torch.tensor([[2.0, 0, 0], [0, 2.0, 0]]), torch.tensor([[0], [0]]))
    assert notes == {"f1": {"a": pytest.approx(2 / 3), "b": 0}}
    assert values == {"accuracy": 0.5, "macro_f1": pytest.approx(1 / 3)}
    assert json.dumps(notes)


def test_numbers_are_learnt_in_any_unit(words: TextTokenizer) -> None:
    chance = random.Random(0)
    cells = [str(1e6 + 1e3 * chance.random()) for _ in range(50)]
    task = Regressing(Regress().complete(Rows({"label": cells}, "f", range(len(cells)))), words)
    asked = torch.tensor([task.parse_label(cell) for cell in cells])
    assert float(asked.mean()) == pytest.approx(0, abs=1e-4)
    assert float(asked.std(correction=0)) == pytest.approx(1, abs=1e-4)
    for cell, number in zip(cells, asked, strict=True):
        assert float(task.format_prediction(number)) == pytest.approx(float(cell), rel=1e-5)
