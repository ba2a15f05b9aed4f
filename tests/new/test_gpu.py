"""`new` on a machine with a GPU: batches of one shape or of few, large where the data allow it, and fitting rates."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from anyformer.data.loader import Cursor
from anyformer.recipe import Crops, Lengths, Packed, Padded
from anyformer.training import plan
from anyformer.training.job import Job
from anyformer.training.new_recipe import budget, draft as drafts, models
from anyformer.training.new_recipe.draft import RecipeDraft, RecipeRequest, draft

WORDS = ["고양이", "개가", "cat", "dog", "runs", "猫", "睡", "a"]


def line(chance: random.Random, longest: int) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, longest)))


def files(folder: Path, task: str, longest: int, count: int = 60) -> tuple[list[str], dict[Any, str]]:
    chance = random.Random(0)
    texts = [line(chance, longest) for _ in range(2 * count)]
    one, other = folder / "one.txt", folder / "two.txt"
    if task in ("translate", "mlm", "lm"):
        one.write_text("".join(f"{text}\n" for text in texts[:count]), encoding="utf-8")
        other.write_text("".join(f"{text}\n" for text in texts[count:]), encoding="utf-8")
        return [str(one), str(other)][: 2 if task == "translate" else 1], {}
    if task in ("tag", "ner"):
        made = ("".join(f"{word}\t{'B-x' if task == 'ner' else 'N'}\n{word}\tO\n" for word in t.split()) for t in texts)
        (folder / "words.conll").write_text("\n".join(made), encoding="utf-8")
        return [str(folder / "words.conll")], {}
    pair = task == "embed"
    rows = (f"{text}\t{texts[-i - 1] if pair else ('1.5', '2.5')[i % 2]}\n" for i, text in enumerate(texts[:count]))
    (folder / "rows.tsv").write_text("".join(("text\tpair\n" if pair else "text\tlabel\n", *rows)), encoding="utf-8")
    return [str(folder / "rows.tsv")], {"text": "text", ("pair" if pair else "label"): "pair" if pair else "label"}


def made_for(
    folder: Path, task: str, longest: int, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[RecipeDraft, Job]:
    """Return a draft, and its training, of which no step is timed."""
    monkeypatch.setattr(plan, "_measure", lambda job, train: Mock(job=job))
    paths, columns = files(folder, task, longest)
    made, measured = budget.measure(draft(RecipeRequest(task, paths, columns, None, False, gpu)))
    return made, measured.job


TASKS = ["translate", "mlm", "tag", "ner", "classify", "regress", "embed", "lm"]


@pytest.mark.parametrize("longest", [8, 150])
@pytest.mark.parametrize("task", TASKS)
def test_batches_of_a_gpu_have_few_shapes(
    task: str, longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, or one for each rounded length where a row has one output; every row fits."""
    made, job = made_for(tmp_path, task, longest, True, monkeypatch)
    lengths = made.facts.lengths
    assert lengths is not None
    assert job.recipe.data.on_bad_row != "skip"
    match job.recipe.batches:
        case Packed(tokens=tokens, length=length):
            assert task in ("translate", "mlm", "tag")
            assert lengths.longest <= length or task == "mlm"
            dropout = {block.mixer.dropout for stack in job.recipe.model.stacks.values() for block in stack.blocks}  # type: ignore[union-attr]
            assert dropout == ({0.1} if length < models.LONG_ROW else {0.0})  # long rows are read by documents
        case Padded(tokens=tokens, few_shapes=few):
            assert few == (task in ("classify", "regress", "ner"))
        case Crops(rows=rows, length=length):
            assert task == "lm"
            tokens = rows * length
        case other:
            raise AssertionError(other)
    assert task == "lm" or tokens >= min(lengths.longest, models.GPU_TOKENS)
    if task != "embed":
        cursor, shapes = Cursor(), set()
        for _ in range(50):
            batch, cursor = job.loader.read(cursor)
            shapes.add((batch.ids.shape, None if batch.source is None else batch.source.shape))
        assert len(shapes) <= (1 if isinstance(job.recipe.batches, Packed | Crops) else 15)


def facts(total: int, task: str = "classify", **changes: Any) -> Any:
    spec = Mock(kind=task, pairs=False, spans=False)
    chosen = {"rows": 1000, "labels": 2, "gpu": True, "lengths": Lengths(total, 50), **changes}
    return models.DataFacts(task=spec, inputs=Mock(characters=total, longest=200), outputs=None, **chosen)


@pytest.mark.parametrize("task", ["seq2seq", "classify", "tag", "lm", "mlm"])
def test_batches_of_a_gpu_are_as_large_as_the_data_allow(task: str) -> None:
    """The learning rate follows the square root of their tokens."""
    sizes = [facts(10**power, task).tokens for power in range(3, 9)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == models.GPU_TOKENS
    for power, size in zip(range(3, 9), sizes, strict=True):
        assert size == min(sizes) or 10**power / size >= models.MIN_BATCHES[False]
    rates = [(drafts._rate(facts(10**power, task)), facts(10**power, task).tokens) for power in range(3, 9)]
    for (rate, size), (other, more) in pairwise(rates):
        assert other / rate == pytest.approx((more / size) ** 0.5, rel=0.1)


@pytest.mark.parametrize("task", ["seq2seq", "classify", "tag", "mlm", "regress", "embed"])
def test_batches_of_a_cpu_do_not_depend_on_lengths(task: str) -> None:
    assert {drafts.batches(facts(10**power, task, gpu=False)).value for power in range(3, 9)} == {
        f'{{ kind = "padded", tokens = {4096 if task == "embed" else 2048} }}'
    }


def test_minutes_are_in_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = made_for(tmp_path, "classify", 8, False, monkeypatch)
    given = budget._read(made.text(200, "a reason", 2.5)).train
    counted = budget._read(made.text(200, "a reason")).train
    assert (given.minutes, counted.minutes, counted.steps) == (2.5, None, 200)
    for spec in (given, counted):  # as many evaluations, and the same share of warm-up
        assert spec.evaluate_every is not None
        assert spec.steps / spec.evaluate_every == pytest.approx(8, rel=0.05)
        assert spec.schedule.warmup / spec.steps == pytest.approx(0.1)
    many = budget._read(made.text(200, "a reason", 2.5, cycles=4)).train
    assert many.evaluate_every is None  # the cycles end with evaluations
    assert many.schedule.warmup / many.schedule.cycle_ends(many.steps)[0] == pytest.approx(0.1, rel=0.2)
