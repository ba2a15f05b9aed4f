"""Texts that are read apart: how their rows stand, what is asked of their vectors, and what is said of them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import ConfigError, io
from anyformer.data.batch import Example, collate
from anyformer.data.loader import Cursor, ExampleLoader
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.recipe import Embed, Padded, Recipe, Regress, Words
from anyformer.runs.run import Run, load
from anyformer.tasks.embed import MAX_QUERIES, EmbedTask, compare
from anyformer.tasks.metrics import spearman
from anyformer.tasks.regress import Regressing
from anyformer.training.loop import fit
from anyformer.training.parallel import Ranks
from anyformer.training.plan import plan
from anyformer.training.prepare import prepare
from anyformer.training.train import evaluate
from tests.training.small import distances, labelled, make, quiet, run, spellings


@pytest.fixture(scope="module")
def words() -> TextTokenizer:
    return train_tokenizer(Words(), ["0 1 2 3 4 5 6 7 8 9"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Run]:
    folder = tmp_path_factory.mktemp("embed")
    recipe = labelled(folder, Embed(temperature=0.2), spellings(), steps=4)
    return recipe, run(recipe, folder / "run")


# -- rows -------------------------------------------------------------------------------------------------------------

pieces = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12).map(
    lambda sizes: [Example([1] * a, [i], pair=[2] * b) for i, (a, b) in enumerate(sizes)]
)


@given(pieces)
def test_a_text_stands_above_its_pair(some: list[Example]) -> None:
    batch = collate([(i,) for i in range(len(some))], some, pad=0, source_pad=0)
    assert batch.ids.shape == (2 * len(some), max(piece.length for piece in some))
    assert batch.labels.shape == (len(some), 1)
    for i, piece in enumerate(some):
        for row, ids in zip(batch.ids[2 * i : 2 * i + 2].tolist(), (piece.ids, piece.pair), strict=True):
            assert row == [*ids, *[0] * (batch.ids.shape[1] - len(ids))]
    assert batch.tokens == sum(len(piece.ids) + len(piece.pair or ()) for piece in some)


@given(pieces, st.integers(18, 60), st.integers(0, 5))
def test_batches_hold_both_texts(some: list[Example], tokens: int, seed: int) -> None:
    loader, place, seen = ExampleLoader(some, Padded(tokens=tokens), seed, pad=0, source_pad=0), Cursor(), []
    while place.epoch == 0:
        batch, place = loader.read(place)
        assert batch.slots <= tokens
        seen += batch.examples
    assert sorted(seen) == list(range(len(some)))


@given(pieces, st.integers(1, 4))
def test_processes_share_pairs(some: list[Example], size: int) -> None:
    """Each reads whole pairs with their labels, and together they read all; one that has none is asked nothing."""
    batch = collate([(i,) for i in range(len(some))], some, pad=0, source_pad=0)
    found = []
    for rank in range(size):
        mine = Ranks(rank, size).split(batch)
        assert len(mine.ids) == 2 * len(mine.labels)
        if not mine.target_count:
            assert rank >= len(some)
            continue
        for j, (i,) in enumerate(mine.labels.tolist()):
            assert torch.equal(mine.ids[2 * j : 2 * j + 2], batch.ids[2 * i : 2 * i + 2])
            found.append(i)
    assert sorted(found) == list(range(len(some)))


# -- contrast ---------------------------------------------------------------------------------------------------------


def by_hand(task: EmbedTask, vectors: Tensor, labels: list[list[int]]) -> tuple[float, list[int]]:
    """The loss, and the rank of each text's pair, one after the other."""
    total, ranks = 0.0, []
    cosine = [[float(F.cosine_similarity(a, b, dim=0)) for b in vectors] for a in vectors]
    for side in (0, 1):
        for i in range(len(labels)):
            others = [j for j in range(len(labels)) if j == i or not any(map(int.__eq__, labels[i], labels[j]))]
            scores = {j: cosine[2 * i + side][2 * j + 1 - side] for j in others}
            weights = {j: torch.tensor(score / task.spec.temperature).double().exp() for j, score in scores.items()}
            total -= float((weights[i] / sum(weights.values())).log())
            if side == 0:
                ranks.append(sum(score >= scores[i] for score in scores.values()))
    return total, ranks


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(5, 8)), min_size=1, max_size=7), st.integers(0, 99))
def test_contrast_by_its_definition(labels: list[tuple[int, int]], seed: int) -> None:
    task = EmbedTask(Embed(temperature=0.3), train_tokenizer(Words(), ["a"]))
    vectors = torch.randn(2 * len(labels), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    asked = torch.tensor(labels)
    loss, ranks = by_hand(task, vectors, [list(row) for row in labels])
    assert float(task.loss(vectors, asked)) == pytest.approx(loss, rel=1e-4, abs=1e-4)
    values, _ = task.measure(vectors, asked)
    assert values["accuracy"] == pytest.approx(sum(rank == 1 for rank in ranks) / len(ranks))
    assert values["mrr"] == pytest.approx(sum(1 / rank for rank in ranks) / len(ranks))


def test_all_alike_is_no_answer(words: TextTokenizer) -> None:
    task, labels = EmbedTask(Embed(), words), torch.arange(20).view(10, 2)
    assert task.measure(torch.ones(20, 4), labels)[0] == {"accuracy": 0.0, "mrr": pytest.approx(0.1)}
    assert task.measure(torch.full((20, 4), torch.nan), labels)[0]["accuracy"] == 0.0


def test_many_are_compared_in_parts() -> None:
    n = MAX_QUERIES + 3
    a, b, labels = torch.randn(n, 2), torch.randn(n, 2), torch.arange(2 * n).view(n, 2)
    parts = list(compare(a, b, labels))
    assert [len(own) for _, own in parts] == [MAX_QUERIES, 3]
    torch.testing.assert_close(torch.cat([cosines for cosines, _ in parts]), a @ b.T)


def test_the_same_text_has_the_same_number(tmp_path: Path) -> None:
    rows = [("1 2", "a"), ("1 2", "b"), ("3", "a"), ("a", "4")]
    job = make(labelled(tmp_path, Embed(), rows), tmp_path / "run")
    assert job.valid is not None
    assert isinstance(job.task, EmbedTask)
    one, two, three, four = (piece.labels for piece in job.task.encode(job.valid, job.model.config))
    assert one[0] == two[0]
    assert one[1] == three[1] == four[0]
    assert len({*one, *two, *three, *four}) == 5


def test_it_learns_to_find_pairs(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, Embed(), spellings(), width=16, steps=60)
    recipe = recipe.model_copy(update={"batches": Padded(tokens=256)})
    job = make(recipe, tmp_path / "run")
    assert job.valid is not None
    before = job.task.evaluate(job.model.eval(), job.valid, recipe.batches).values
    fit(job)
    after = job.task.evaluate(job.model.eval(), job.valid, recipe.batches).values
    assert before["accuracy"] < 0.3
    assert after["accuracy"] > 0.8
    assert after["mrr"] >= after["accuracy"]
    assert after["loss"] < before["loss"]


def test_an_evaluation_reads_each_text_as_if_alone(trained: tuple[Recipe, Run]) -> None:
    made = trained[1]
    found = evaluate(made.folder, split="valid")
    texts = [text for row in spellings() for text in row]
    alone = torch.tensor([json.loads(made.predict([text])[0]) for text in texts])
    task = made.task
    assert isinstance(task, EmbedTask)
    distinct = {text: i for i, text in reversed(list(enumerate(texts)))}
    labels = torch.tensor([distinct[text] for text in texts]).view(-1, 2)
    assert found.count == len(spellings())
    assert found.values["loss"] == pytest.approx(float(task.loss(alone, labels)) / len(texts), rel=1e-4)
    assert found.values["accuracy"] == task.measure(alone, labels)[0]["accuracy"]


def test_vectors_are_json(trained: tuple[Recipe, Run]) -> None:
    made = load(trained[1].folder)
    first, blank, again = made.predict(["1 2 3", " ", "1 2 3"])
    assert blank == ""
    assert first == again
    assert len(json.loads(first)) == made.config.width
    with pytest.raises(ConfigError, match="temperature: is for models that generate text"):
        made.predict(["1"], temperature=1.0)


def test_a_plan_shows_both_texts(trained: tuple[Recipe, Run]) -> None:
    shown = plan(trained[0], quiet()).render()
    assert "<bos> " in shown
    assert "<eos> | <bos>" in shown


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_a_number_is_a_cosine(words: TextTokenizer) -> None:
    task = Regressing(Regress(apart=True).complete(Rows({"label": ["2", "5", "10"]}, "f", range(3))), words)
    assert (task.spec.mean, task.spec.deviation) == (2, 8)
    same, across, between = torch.eye(2)[[0, 0]], torch.eye(2), torch.tensor([[1.0, 0], [3, 4]])
    assert [float(task.format_prediction(vectors)) for vectors in (same, across, between)] == [
        10,
        2,
        pytest.approx(2 + 8 * 0.6),
    ]
    asked = torch.tensor([task.parse_label(label) for label in ("10", "2", "5")])
    said = torch.cat((same, across, between))
    assert float(task.loss(said, asked)) == pytest.approx((0.6 - 3 / 8) ** 2)


def test_numbers_of_texts_apart(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, Regress(apart=True), distances(), steps=4)
    made = run(recipe, tmp_path / "run")
    answers = made.predict(["1\t2", "", "4 5\t4 5"])
    assert answers[1] == ""
    assert float(answers[2]) == pytest.approx(max(float(row[2]) for row in distances()))  # the same text twice
    found = evaluate(made.folder, split="valid").values
    said = torch.tensor([float(x) for x in made.predict([f"{a}\t{b}" for a, b, _ in distances()])])
    asked = torch.tensor([float(x) for *_, x in distances()])
    assert found["spearman"] == pytest.approx(spearman(said, asked), abs=0.02)
    with pytest.raises(ConfigError, match="text 1: must be two texts separated by a tab"):
        made.predict(["1 2"])


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("model.head={kind='classifier', labels=1}", "model.head = 'classifier': the task {task} needs 'embedder'"),
        ("batches={kind='packed', tokens=64, length=32}", "has one output per row: use 'padded'"),
        ("train.label_smoothing=0.1", "train.label_smoothing = 0.1: needs one correct label among several"),
    ],
)
@pytest.mark.parametrize(("task", "name"), [(Embed(), "embed"), (Regress(apart=True), "regress with apart = true")])
def test_parts_that_do_not_fit(tmp_path: Path, task: Embed | Regress, name: str, change: str, line: str) -> None:
    recipe = labelled(tmp_path, task, spellings() if isinstance(task, Embed) else distances())
    with pytest.raises(ConfigError) as caught:
        io.override(recipe, [change.replace("'", '"')])
    assert line.format(task=name) in str(caught.value)


def test_texts_apart_are_pairs() -> None:
    with pytest.raises(ConfigError, match="apart = True: needs pairs"):
        Regress(apart=True, pairs=False)


def test_several_processes_are_refused(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, Embed(), spellings())
    with pytest.raises(ConfigError, match=r"task\.kind = 'embed': each pair is compared with all others"):
        prepare(recipe, tmp_path / "run", False, quiet(), Ranks(0, 2))


def test_rows_that_cannot_be_read(tmp_path: Path) -> None:
    rows = [*spellings(6), ("1 " * 40, "2"), ("1", "a " * 40)]
    with pytest.raises(ConfigError) as caught:
        make(labelled(tmp_path, Embed(), rows), tmp_path / "run")
    said = str(caught.value).splitlines()
    assert [line.partition("rows.tsv:")[2] for line in said[1:]] == [
        "8: has 42 tokens, and a padded row holds 32",
        "9: has 42 tokens, and a padded row holds 32",
    ]
