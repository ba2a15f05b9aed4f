"""Masked language modelling: what is asked, what is hidden, and what predictions fill in."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models

from anyformer.config import Classifier, ConfigError
from anyformer.data.batch import Ragged
from anyformer.data.counter_rng import CounterRNG
from anyformer.data.loader import Cursor, draw_fixed
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import (
    BPE,
    Bytes,
    Classify,
    Crops,
    MaskedLanguageModel,
    Ordered,
    Packed,
    Padded,
    PrefixLM,
    Unigram,
    Words,
)
from anyformer.runs.run import Run
from anyformer.tasks.dynamic_examples import chunks
from anyformer.tasks.mlm import MaskedLanguageModelling
from anyformer.tasks.sequence_level import encode_with
from tests.training.small import CROPS, PACKED, TEXT, corrupted, labelled, parities, run, sentences


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("mlm")
    return run(corrupted(folder, MaskedLanguageModel(), steps=60), folder / "run")


def rows_of(*texts: str) -> Rows:
    return Rows({"text": list(texts)}, "text.txt", range(1, len(texts) + 1))


def task_of(**fields: Any) -> MaskedLanguageModelling:
    return MaskedLanguageModelling(MaskedLanguageModel(**fields), train_tokenizer(Words(), sentences()))


@given(st.lists(st.integers(4, 15), min_size=1, max_size=60), st.integers(0, 9), st.floats(0.01, 1))
def test_a_draw_hides_some_tokens_and_asks_for_these(ids: list[int], seed: int, rate: float) -> None:
    task = task_of(rate=rate)
    tokenizer, frame = task.tokenizer, task.frame
    ids = [i for i in ids if i != tokenizer.mask] or [7]  # 4 is <unk>
    assert tokenizer.unk == 4
    piece = task.draw(Ragged.of([ids]), CounterRNG(np.array([seed])))[0]
    assert len(piece.ids) == len(piece.labels) == len(frame.row(ids))
    assert (piece.ids[0], piece.ids[-1]) == (tokenizer.bos, tokenizer.eos)
    assert piece.labels[0] == piece.labels[-1] == IGNORE
    inside = list(zip(piece.ids[1:-1], piece.labels[1:-1], ids, strict=True))
    asked = [label for _, label, _ in inside if label != IGNORE]
    known = [i for i in ids if i != tokenizer.unk]
    assert len(asked) == min(max(1, round(rate * len(ids))), len(known) or len(ids))
    assert all(label == true for _, label, true in inside if label != IGNORE)
    assert all(read == true for read, label, true in inside if label == IGNORE)  # no label where nothing is hidden
    assert not known or tokenizer.unk not in asked
    assert all(read == tokenizer.mask or read not in tokenizer.special for read, label, true in inside if read != true)


def test_the_shares_are_those_of_the_spec() -> None:
    task = task_of(rate=0.3, masked=0.6, random=0.3)
    ids = [i for i in range(task.tokenizer.size) if i not in task.tokenizer.special] * 10
    masked = changed = same = 0
    for piece in task.draw(Ragged.of([ids] * 200), CounterRNG(np.arange(200))):
        at = [i for i, label in enumerate(piece.labels) if label != IGNORE]
        assert len(at) == round(0.3 * len(ids))
        masked += sum(piece.ids[i] == task.tokenizer.mask for i in at)
        changed += sum(piece.ids[i] not in (task.tokenizer.mask, piece.labels[i]) for i in at)
        same += sum(piece.ids[i] == piece.labels[i] for i in at)
    count, twice = masked + changed + same, 0.3 / len(set(ids))  # a random token may be the one that was there
    for found, share in ((masked, 0.6), (changed, 0.3 - twice), (same, 0.1 + twice)):
        assert abs(found / count - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_every_token_is_asked_and_put_in_as_often() -> None:
    """Whatever stands there, of what is no special token."""
    task, times = task_of(rate=0.5, masked=0, random=1), 4000
    plain = [i for i in range(task.tokenizer.size) if i not in task.tokenizer.special]
    shelf = task.draw(Ragged.of([plain] * times), CounterRNG(np.arange(times)))
    ids, labels = (shelf.columns[name].values.reshape(times, -1)[:, 1:-1] for name in ("ids", "labels"))
    asked, share = labels != IGNORE, 0.5
    assert (abs(asked.mean(axis=0) - share) < 5 * math.sqrt(share * (1 - share) / times)).all()
    together = (asked[:, :, None] & asked[:, None]).mean(axis=0)[~np.eye(len(plain), dtype=bool)]  # all pairs
    share = share * (len(plain) // 2 - 1) / (len(plain) - 1)
    assert (abs(together - share) < 5 * math.sqrt(share * (1 - share) / times)).all()
    found, expected = np.bincount(ids[asked], minlength=task.tokenizer.size)[plain], asked.sum() / len(plain)
    assert (abs(found - expected) < 5 * math.sqrt(expected)).all()
    assert found.sum() == asked.sum()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(3, 20))
def test_chunks_are_equal_parts_of_a_text(lengths: list[int], most: int) -> None:
    texts = [list(range(n)) for n in lengths]
    found = iter(chunks(texts, most))
    for ids in texts:
        parts = [next(found) for _ in range(-(-len(ids) // most))]
        assert [i for part in parts for i in part] == ids
        assert max(map(len, parts)) <= most
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert next(found, None) is None


@pytest.mark.parametrize("batches", [Padded(tokens=20), Packed(tokens=40, length=20), Crops(rows=3, length=20)])
def test_batches_are_functions_of_seed_and_place(trained: Run, batches: Padded | Packed | Crops) -> None:
    """Whoever reads the same place finds the same masks; the next epoch has others, on the same texts."""
    texts = rows_of(*sentences(), " ".join(sentences()))  # of which the last goes on in other rows
    one, other = (trained.task.loader(texts, batches, 3, trained.model) for _ in range(2))
    places = [Cursor(), Cursor(0, 1), Cursor(1, 0), Cursor(1, 1)]
    for place in random.Random(0).sample(places, 4):  # in any order
        mine, _ = one.read(place)
        theirs, _ = other.read(place)
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.labels, theirs.labels)
        assert mine.ids.shape[1] <= 20
        assert mine.target_count >= (1 if mine.segments is None else int((mine.segments.max(dim=1).values + 1).min()))
    place, whole = Cursor(), list[list[int]]()
    if isinstance(batches, Crops):
        return
    epochs: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    while place.epoch < 2:
        batch, after = one.read(place)
        epochs[place.epoch].append(tuple(batch.ids[batch.labels != IGNORE].tolist()))
        true = torch.where(batch.labels == IGNORE, batch.ids, batch.labels)
        if place.epoch == 0:
            whole += [true[true > 5].tolist()]
        place = after
    assert sorted(i for ids in whole for i in ids) == sorted(
        i for ids in trained.task.tokenizer.encode_batch(texts.columns["text"]) for i in ids
    )
    assert epochs[0] != epochs[1]


def test_evaluation_is_a_plain_loop_over_the_same_draws(trained: Run) -> None:
    task, texts = trained.task, sentences(12)
    assert isinstance(task, MaskedLanguageModelling)
    total, right, count = 0.0, 0, 0
    for piece in draw_fixed(task.tokenizer.encode_batch(texts), task.draw):
        with torch.no_grad():
            logits = trained.model(torch.tensor([piece.ids]))[0]
        for at, label in enumerate(piece.labels):
            if label != IGNORE:
                total -= float(logits[at].log_softmax(-1)[label])
                right, count = right + int(logits[at].argmax() == label), count + 1
    for batches in (Padded(tokens=64), PACKED):
        found = task.evaluate(trained.model, rows_of(*texts), batches)
        assert found.count == count
        assert found.values["loss"] == pytest.approx(total / count, rel=1e-4)
        assert found.values["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-3)
        assert found.values["accuracy"] == pytest.approx(right / count)


def test_predictions_fill_masks_in(trained: Run) -> None:
    """And nothing else, whatever stands beside a text."""
    texts = ["n1 n2 <mask> n4", "", "<mask> n5 n6 n7 n8 <mask>"]
    filled = trained.predict(texts)
    assert filled[1] == ""
    for text, said in zip(texts, filled, strict=True):
        words = text.split()
        assert len(said.split()) == len(words)
        assert all(a == b for a, b in zip(words, said.split(), strict=True) if a != "<mask>")
        assert "<mask>" not in said
        assert trained.predict([text]) == [said]
    found = trained.alternatives("n1 n2 <mask> n4", 3)
    assert found[0].token == filled[0].split()[2]
    assert found[0].probability >= found[1].probability >= found[2].probability
    assert trained.alternatives("<mask> n5 n6 n7 n8 <mask>", 1, at=1)[0].token == filled[2].split()[-1]


@pytest.mark.parametrize("spec", [Words(), BPE(size=300), Unigram(size=320), Bytes()])
def test_a_mask_stands_where_a_word_was(spec: Words | BPE | Unigram | Bytes) -> None:
    """What is around it is read as it is in the whole text."""
    tokenizer = train_tokenizer(spec, [TEXT])
    assert tokenizer.mask is not None
    whole = tokenizer.encode("the lazy dog runs")
    parts = tokenizer.encode("the"), tokenizer.encode("lazy" if tokenizer.lead or not tokenizer.spaced else " lazy")
    if not tokenizer.spaced:  # where a space is a token of its own, it stays
        parts = [*parts[0], *tokenizer.encode(" ")], parts[1]
    before, behind = len(parts[0]), len(whole) - len(parts[0]) - len(parts[1])
    assert encode_with(tokenizer, "the <mask> dog runs", [tokenizer.mask]) == [
        *whole[:before],
        tokenizer.mask,
        *whole[len(whole) - behind :],
    ]


# -- from one task to another -----------------------------------------------------------------------------------------


def test_an_encoder_goes_on_to_another_task(tmp_path: Path) -> None:
    """All of it but the head, which is new."""
    rows = parities()
    first = corrupted(tmp_path, MaskedLanguageModel(), steps=2)
    (tmp_path / "sentences.txt").write_text("\n".join(text for text, _ in rows), encoding="utf-8")
    first = first.model_copy(update={"tokenizer": Words()})
    begun = run(first, tmp_path / "mlm")
    second = labelled(
        tmp_path, task=Classify(), rows=rows, steps=1, init_from=str(tmp_path / "mlm"), freeze=("encoder",)
    )
    went_on = run(second, tmp_path / "classify")
    assert isinstance(went_on.config.head, Classifier)
    mine, theirs = begun.model.state_dict(), went_on.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine if name.startswith("encoder."))


# -- what is wrong ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    bare = TextTokenizer(Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")))
    with pytest.raises(ConfigError, match="tokenizer: has no <mask>"):
        MaskedLanguageModelling(MaskedLanguageModel(), bare)


def test_a_text_without_a_mask_is_refused(trained: Run) -> None:
    with pytest.raises(ConfigError, match="text 2: has no <mask>: write it where a token is to be predicted"):
        trained.predict(["n1 <mask>", "n1 [MASK]"])
    with pytest.raises(ConfigError, match="temperature: is for models that generate text"):
        trained.predict(["n1 <mask>"], temperature=1.0)


def test_shapes_and_batches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    recipe = corrupted(tmp_path, MaskedLanguageModel(), CROPS)
    decoder = corrupted(tmp_path, PrefixLM()).model
    with pytest.raises(ConfigError, match="has the shape 'decoder': the task mlm needs 'encoder'"):
        type(recipe)(**dict(recipe) | {"model": decoder})
    with pytest.raises(ConfigError, match="the task mlm reads each chunk of a text separately"):
        type(recipe)(**dict(recipe) | {"batches": Ordered(rows=2, length=8)})
    with pytest.raises(ConfigError, match=r"masked \+ random must be at most 1"):
        MaskedLanguageModel(masked=0.9, random=0.2)


def test_rows_that_are_too_short_are_refused(trained: Run) -> None:
    with pytest.raises(ConfigError, match="a row of 2 tokens is too short: the task needs 3"):
        trained.task.loader(rows_of("n1"), Padded(tokens=2), 0, trained.model)
    with pytest.raises(ConfigError, match=r"batches\.length = 50: the text has 2 tokens"):
        trained.task.loader(rows_of("n1 n2"), Crops(rows=1, length=50), 0, trained.model)
