"""The task dpo: its loss is the published formula, and only the order of two answers is learned."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from anyformer.config import ConfigError, io
from anyformer.data.loader import Cursor, ExampleLoader
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import Data, Padded, Preferences, PreferSorted, Recipe, TableFile
from anyformer.runs.run import load
from anyformer.tasks.base import call
from anyformer.tasks.preferences import Preferring, log_probabilities
from anyformer.training.first_rows import first_rows
from anyformer.training.job import Job
from anyformer.training.loop import evaluate
from tests.training.small import assert_same_run, make, metrics, pairs, run, stop_at

DIGITS = PreferSorted(count=40, shortest=2, longest=5)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to start from, which reverses digits."""
    out = tmp_path_factory.mktemp("first") / "run"
    run(pairs(steps=6, dropout=0.0), out)
    return out


def preferring(first: Path, beta: float = 0.1, dropout: float = 0.0, **train: Any) -> Recipe:
    recipe = pairs(dropout=dropout, init_from=str(first), **train)
    valid = DIGITS.model_copy(update={"count": 8})
    change = {"task": Preferences(max_target=6, beta=beta), "data": Data(train=DIGITS, valid=valid)}
    return recipe.model_copy(update=change)


def answer_probability(job: Job, model: torch.nn.Module, source: str, answer: str) -> float:
    """Return log p(answer | source), token by token from the model's logits."""
    tokenizer = job.task.tokenizer
    prompt = [*tokenizer.encode(source), tokenizer.sep]
    said = [*tokenizer.encode(answer), tokenizer.eos]
    with torch.no_grad():
        p = model(torch.tensor([[*prompt, *said]]))[0].log_softmax(-1)
    return sum(float(p[len(prompt) - 1 + i, id]) for i, id in enumerate(said))


def test_the_loss_is_the_published_formula(first: Path, tmp_path: Path) -> None:
    """By log-probabilities of single answers, one row at a time; the model is not its own reference."""
    job = make(preferring(first, beta=0.3), tmp_path / "run")
    model, start = job.model.eval(), load(first).model
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))))
    batch, _ = job.loader.read(Cursor())
    assert isinstance(job.task, Preferring)
    assert job.frozen is not None
    with torch.no_grad():
        logits, reference = call(model, batch, False), call(job.frozen, batch, False)
    found = float(job.task.preference_loss(logits, batch.labels, reference))
    expected, decode = 0.0, job.task.tokenizer.decode
    for i in range(len(batch.labels)):
        ids = batch.ids[2 * i].tolist()
        source = decode(ids[: ids.index(job.task.tokenizer.sep)])
        answers = [decode([id for id in row.tolist() if id not in (IGNORE, job.task.eos)]) for row in batch.labels[i]]
        assert answers[0] == " ".join(sorted(source.split()))
        assert answers[1] == source[::-1]
        good, bad = (
            answer_probability(job, model, source, one) - answer_probability(job, start, source, one) for one in answers
        )
        expected += math.log1p(math.exp(-0.3 * (good - bad)))
    assert found == pytest.approx(expected, rel=1e-4)
    assert batch.target_count == len(batch.labels) == len(batch.ids) // 2


@given(st.integers(1, 3), st.integers(1, 4), st.floats(0.01, 2), st.integers(0, 2**16))
@settings(max_examples=20)
def test_gradients_are_those_of_differences(b: int, t: int, beta: float, seed: int) -> None:
    """And a pair without labels has neither a loss nor a gradient."""
    torch.manual_seed(seed)
    task = Preferring.__new__(Preferring)
    task.spec = Preferences(beta=beta)
    labels = torch.randint(3, (b + 1, 2, t))
    labels[-1] = IGNORE
    logits = torch.randn(2 * b + 2, t, 3, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(2 * b + 2, t, 3)
    scores = log_probabilities(logits, labels) - log_probabilities(reference, labels)
    margin = (scores[:, 0] - scores[:, 1]).detach()
    task.preference_loss(logits, labels, reference).backward()
    gradient = logits.grad
    assert gradient is not None
    assert not gradient[-2:].any()
    log_p = torch.autograd.grad(log_probabilities(logits, labels).sum(), logits)[0].view(b + 1, 2, t, 3)
    weight = (-beta * torch.sigmoid(-beta * margin))[:, None, None]
    expected = torch.stack((weight * log_p[:, 0], -weight * log_p[:, 1]), dim=1).view_as(gradient)
    torch.testing.assert_close(gradient[:-2], expected[:-2], rtol=1e-4, atol=1e-5, check_dtype=False)


def test_a_model_at_its_start_has_the_loss_log_2(first: Path, tmp_path: Path) -> None:
    job = make(preferring(first, steps=1), tmp_path / "other")
    assert job.frozen is not None
    assert not any(p.requires_grad for p in job.frozen.parameters())
    run(preferring(first, steps=1), tmp_path / "run")
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_it_prefers_what_it_should(first: Path, tmp_path: Path) -> None:
    before = make(preferring(first), tmp_path / "other")
    assert before.valid is not None
    was = evaluate(before, before.valid).values
    recipe = preferring(first, steps=30, evaluate_every=30)
    run(recipe, tmp_path / "run")
    now = next(row for row in reversed(metrics(tmp_path / "run")) if "valid_margin" in row)
    assert now["valid_margin"] > was["margin"]
    assert now["valid_accuracy"] >= was["accuracy"]
    done = load(tmp_path / "run")
    assert done.spec.kind == "dpo"
    assert len(done.predict(["3 1 2", "5 4"], max_new_tokens=4)) == 2


def test_a_resumed_run_is_the_same(first: Path, tmp_path: Path) -> None:
    recipe = preferring(first, dropout=0.1, steps=8, accumulate=2, ema=0.9, save_every=3)
    run(recipe, tmp_path / "whole")
    assert stop_at(recipe, tmp_path / "parts", 9)
    run(recipe, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_rows_may_come_from_a_table(first: Path, tmp_path: Path) -> None:
    lines = ["prompt\tgood\tbad", *(f"{n} 1\t1 {n}\t{n} 1" for n in range(2, 9)), "3 4\t3 4\t3 4"]
    (tmp_path / "rows.tsv").write_text("\n".join(lines), encoding="utf-8")
    table = TableFile(path=str(tmp_path / "rows.tsv"), source="prompt", target="good", rejected="bad")
    recipe = preferring(first).model_copy(update={"data": Data(train=table, on_bad_row="skip")})
    job = make(recipe, tmp_path / "run")
    batch, _ = job.loader.read(Cursor())
    assert isinstance(job.loader, ExampleLoader)
    assert len(job.loader.table) == 7  # of the last row, both answers are equal
    shown = next(iter(first_rows(job, batch)))
    assert " | " in shown.inputs
    assert " | " in shown.labels
    with pytest.raises(ConfigError, match="the rejected answer is the target"):
        make(recipe.model_copy(update={"data": Data(train=table)}), tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("train.init_from=none", "train.init_from: is required"),
        ("batches={kind='packed', tokens=64, length=32}", "use 'padded'"),
        ("train.label_smoothing=0.1", "train.label_smoothing"),
        ("task.prefix=true", "task.prefix"),
        ("train.own_tokens={share=0.5}", "train.own_tokens"),
        ("train.teacher.run=runs/x", "the task dpo has none"),
        ("model.head.multi_token={tokens=2}", "model.head.multi_token"),
        ("parallel.context=2", "compares whole rows"),
        ("data.train={kind='sort', count=5}", "needs pairs of answers: table, lines or prefer_sorted"),
        ("data.train.shortest=1", "must be at least 2"),
    ],
)
def test_what_does_not_fit_is_refused(first: Path, change: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        io.override(preferring(first), [change])


def test_pairs_are_for_dpo() -> None:
    with pytest.raises(ConfigError, match="'prefer_sorted': the task seq2seq needs pairs: parallel"):
        io.override(pairs(), ["data.train={kind='prefer_sorted', count=5}"])


def test_a_padded_batch_holds_both_answers(first: Path, tmp_path: Path) -> None:
    recipe = preferring(first).model_copy(update={"batches": Padded(tokens=40)})
    job, cursor = make(recipe, tmp_path / "run"), Cursor()
    for _ in range(random.Random(0).randint(3, 6)):
        batch, cursor = job.loader.read(cursor)
        assert batch.ids.numel() <= 40
