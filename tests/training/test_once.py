"""At the start of a training every text is tokenised once: who looks whether rows fit keeps the ids for the loader."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from anyformer.config import io
from anyformer.data.loader import Cursor, Loader
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import (
    Classify,
    Crops,
    Embed,
    MaskedLanguageModel,
    Packed,
    PrefixLM,
    Recipe,
    Regress,
    SpanCorruption,
    Words,
)
from anyformer.tasks.base import BuiltTask
from anyformer.training.make_task import make_task
from anyformer.training.prepare import build, fit_rows, read_rows
from tests.training.small import (
    corrupted,
    distances,
    labelled,
    make,
    mixed,
    pairs,
    parities,
    quiet,
    shards,
    spellings,
    tagging,
    text,
)

KINDS: dict[str, Callable[[Path], Recipe]] = {
    "seq2seq": lambda folder: pairs("encoder-decoder"),
    "seq2seq of two tokenizers": lambda folder: pairs("encoder-decoder").model_copy(
        update={"source_tokenizer": Words(size=11)}
    ),
    "seq2seq in one stack": lambda folder: pairs(),
    "mixture": mixed,
    "lm": text,
    "lm, packed": lambda folder: text(folder, Packed(tokens=64, length=32)),
    "lm of shards": shards,
    "mlm": lambda folder: corrupted(folder, MaskedLanguageModel()),
    "mlm of crops": lambda folder: corrupted(folder, MaskedLanguageModel(), Crops(rows=2, length=12)),
    "spans": lambda folder: corrupted(folder, SpanCorruption()),
    "prefix_lm": lambda folder: corrupted(folder, PrefixLM()),
    "classify": lambda folder: labelled(folder, Classify(), parities()),
    "regress": lambda folder: labelled(folder, Regress(), distances(), labels=1),
    "regress apart": lambda folder: labelled(folder, Regress(apart=True), distances()),
    "embed": lambda folder: labelled(folder, Embed(), spellings()),
    "tag": tagging,
}


@pytest.fixture(params=KINDS)
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
    made = KINDS[request.param](tmp_path)
    return made.model_copy(update={"data": made.data.model_copy(update={"valid": None})})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each text is given to a tokenizer."""
    found, plain = Counter[str](), TextTokenizer.encode_batch

    def counted(self: TextTokenizer, texts: list[str]) -> list[list[int]]:
        found.update(texts)
        return plain(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode_batch", counted)
    return found


def fitted(recipe: Recipe) -> tuple[BuiltTask, Rows]:
    rows = read_rows(recipe)["train"]
    task = make_task(recipe, rows, quiet())
    return task, fit_rows(recipe, task, {"train": rows}, quiet())[0]


def batches(loader: Loader, count: int = 4) -> list[list[object]]:
    place, found = Cursor(), list[list[object]]()
    for _ in range(count):
        batch, place = loader.read(place)
        found.append([x.tolist() if isinstance(x, Tensor) else x for x in batch])
    return found


def test_every_text_is_tokenised_once(recipe: Recipe, seen: Counter[str], tmp_path: Path) -> None:
    job = make(recipe, tmp_path / "run")
    job.loader.read(job.state.cursor)
    rows = read_rows(recipe)["train"]
    if recipe.task.kind == "tag":  # a word once, wherever it stands
        assert {word.strip() for word in seen} == {w for cell in rows.columns["words"] for w in cell.split("\n")}
        assert set(seen.values()) == {1}
    else:
        read = [name for name in recipe.task.columns if name in rows.columns and name not in ("label", "task")]
        assert seen == Counter(text for name in read for text in rows.columns[name])


def test_stored_ids_equal_new_ones(recipe: Recipe) -> None:
    """Also after rows are removed."""
    task, rows = fitted(recipe)
    assert bool(rows.ids) == (recipe.task.kind != "lm")
    if rows.ids:
        rows = rows.without({0: "is bad", 2: "is bad"})
    encoded_again = build(recipe, Path(), task, replace(rows, ids={}), None, quiet()).loader
    loader = build(recipe, Path(), task, rows, None, quiet()).loader
    assert batches(loader) == batches(encoded_again)


def test_another_task_replaces_the_ids(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, Classify(), parities())
    task, rows = fitted(recipe)
    other = make_task(io.override(recipe, ["tokenizer=chars"]), rows, quiet())
    one, two = (each.filter_rows(rows, recipe.model, recipe.batches).ids["text"] for each in (other, task))
    assert one == other.tokenizer.encode_batch(rows.columns["text"]) != two


def test_rows_that_are_not_trained_on_hold_no_ids(recipe: Recipe) -> None:
    """As those for validation: they are encoded again at each evaluation."""
    task, rows = fitted(recipe)
    assert not task.filter_rows(replace(rows, ids={}), recipe.model).ids
