"""Span corruption: nothing of a text is lost, lengths follow from its length, and gaps are filled."""

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.data.batch import Ragged
from anyformer.data.counter_rng import CounterRNG
from anyformer.data.loader import Cursor
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import train_tokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import BPE, Bytes, Crops, Packed, Padded, PrefixLM, SpanCorruption, Unigram, Words
from anyformer.runs.run import Run
from anyformer.tasks.span_corruption import SpanCorrupting, corrupt, counts, segments
from tests.training.small import TEXT, corrupted, run, sentences

SENTINELS = [-1, -2, -3, -4, -5, -6]  # no ids of any text

rates, means, seeds = st.floats(0.01, 1), st.floats(1, 10), st.integers(0, 99)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("spans")
    return run(corrupted(folder, SpanCorruption(sentinels=4), steps=20), folder / "run")


def restored(source: list[int], target: list[int], sentinels: list[int]) -> list[int]:
    """The source with the spans of the target in their places."""
    spans: dict[int, list[int]] = {}
    for id in target:
        if id in sentinels:
            span = spans.setdefault(id, [])
        else:
            span.append(id)
    return [i for id in source for i in (spans[id] if id in sentinels else [id])]


def counted(length: int, rate: float, mean: float, sentinels: int) -> tuple[int, int]:
    (out,), (spans,) = counts(np.array([length]), rate, mean, sentinels)
    return int(out), int(spans)


def corrupted_one(
    ids: list[int], rate: float, mean: float, sentinels: list[int], seed: int
) -> tuple[list[int], list[int]]:
    """One text; its source without the end."""
    end, chance = 1000, CounterRNG(np.array([seed]))
    source, target = corrupt(Ragged.of([ids]), rate, mean, np.array(sentinels), end, chance)
    assert (source.values[-1], source.sizes.tolist()) == (end, [len(source.values)])
    return source.values[:-1].tolist(), target.values.tolist()


@given(st.integers(2, 80), rates, means, st.integers(2, 6), seeds)
def test_spans_put_back_are_the_text(length: int, rate: float, mean: float, most: int, seed: int) -> None:
    ids, sentinels = list(range(length)), SENTINELS[:most]
    out, spans = counted(length, rate, mean, most)
    source, target = corrupted_one(ids, rate, mean, sentinels, seed)
    assert restored(source, target, sentinels) == ids
    assert [id for id in source if id < 0] == sentinels[:spans]
    assert [id for id in target if id < 0] == sentinels[: spans + 1]
    assert target[-1] == sentinels[spans]
    assert 1 <= spans < most
    assert 1 <= out < length
    assert (len(source), len(target)) == (length - out + spans, out + spans + 1)  # whatever was drawn
    runs = [is_gap for is_gap, _ in groupby(source, key=lambda id: id < 0)]
    assert sum(runs) == spans  # no two spans touch


def test_the_counts_are_those_of_the_paper() -> None:
    """15% of 512 tokens in spans of three on average: sources of 462 tokens and targets of 104, <eos> in each."""
    assert counted(512, 0.15, 3.0, 100) == (77, 26)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=9), seeds)
def test_segments_are_whole(some: list[tuple[int, int]], seed: int) -> None:
    parts, more = np.array(some).T
    found = segments(CounterRNG(np.arange(len(some)), seed), 0, parts + more, parts)
    assert found.min() >= 1
    assert [part.sum() for part in np.split(found, parts.cumsum()[:-1])] == (parts + more).tolist()


def test_segments_are_equally_likely() -> None:
    found = segments(CounterRNG(np.arange(6000)), 0, np.full(6000, 5), np.full(6000, 3))
    drawn = [tuple(lengths) for lengths in found.reshape(-1, 3).tolist()]
    ways = {(a, b, 5 - a - b) for a in range(1, 4) for b in range(1, 5 - a)}
    assert set(drawn) == ways
    assert all(abs(drawn.count(way) - 1000) < 150 for way in ways)


def rows_of(*texts: str) -> Rows:
    return Rows({"text": list(texts)}, "text.txt", range(1, len(texts) + 1))


@pytest.mark.parametrize("batches", [Padded(tokens=24), Packed(tokens=48, length=24), Crops(rows=3, length=24)])
def test_batches_hold_whole_texts(trained: Run, batches: Padded | Packed | Crops) -> None:
    task, texts = trained.task, [*sentences(), " ".join(sentences())]  # the last goes on in other rows
    made, again = (task.loader(rows_of(*texts), batches, 1, trained.model) for _ in range(2))
    special, sentinels = {*range(6)}, [*task.tokenizer.sentinels]
    place, found, parts = Cursor(), list[int](), 0
    while place.epoch == 0 and place.batch < 100:
        batch, after = made.read(place)
        same, _ = again.read(place)
        assert batch.source is not None
        assert same.source is not None
        assert torch.equal(batch.source, same.source)
        assert torch.equal(batch.labels, same.labels)
        assert max(batch.source.shape[1], batch.ids.shape[1]) <= 24
        for row in range(len(batch.ids)):
            segment = batch.segments[row] if batch.segments is not None else torch.zeros_like(batch.ids[row])
            theirs = (
                batch.source_segments[row] if batch.source_segments is not None else torch.zeros_like(batch.source[row])
            )
            for n in range(int(segment.max()) + 1):
                source, target = batch.source[row][theirs == n].tolist(), batch.labels[row][segment == n].tolist()
                assert source[-1] == target[-1] == task.tokenizer.eos
                assert IGNORE not in target
                found += [id for id in restored(source, target[:-1], sentinels) if id not in special]
                parts += 1
        place = after
    every = [id for ids in task.tokenizer.encode_batch(texts) for id in ids]
    assert sorted(found) == sorted(every) if not isinstance(batches, Crops) else {*found} <= {*every}
    assert parts


def test_predictions_fill_gaps_in(trained: Run) -> None:
    texts = ["n1 <extra_id_0> n4 n5", " ", "n1 n2 <extra_id_0> n7 <extra_id_1>"]
    filled = trained.predict(texts)
    assert filled[1] == " "
    for text, said in zip(texts, filled, strict=True):
        kept = [word for word in text.split() if not word.startswith("<")]
        assert "<extra_id" not in said
        assert [word for word in said.split() if word in kept][:1] == kept[:1]
        assert trained.predict([text]) == [said]
    answer = trained.generate(texts[:1])[0]
    spoken = trained.score(texts[:1], [answer])[0]
    assert spoken.ids[-1] == trained.tokenizer.eos


@pytest.mark.parametrize("spec", [Words(), BPE(size=300), Unigram(size=320), Bytes()])
def test_what_is_said_goes_into_its_place(spec: Words | BPE | Unigram | Bytes) -> None:
    """An answer as a model says it, in ids, makes the text whole again."""
    tokenizer = train_tokenizer(spec, [TEXT]).with_sentinels(4)
    task = SpanCorrupting(SpanCorruption(), tokenizer)
    text, ids = "the quick brown fox jumps", tokenizer.encode("the quick brown fox jumps")
    for seed in range(20):
        source, target = corrupted_one(ids, 0.4, 2.0, list(tokenizer.sentinels), seed)
        if spec.kind in ("words", "bytes"):
            assert task._whole(tokenizer.decode(source), tokenizer.decode(target)) == text
    x, y, z, _ = (tokenizer.token(id) for id in tokenizer.sentinels)
    gap = " " if tokenizer.spaced else ""
    assert task._whole(f"the {x} fox {y}", f"{x}{gap}quick brown{y}{gap}jumps{z}{x}{gap}not") == text
    assert task._whole(f"a {x}, {y}!", f"{y} b {z}").replace(" b ", "b") == "a , b!"


# -- what is wrong ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_without_sentinels_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer: has no sentinels <extra_id_0>"):
        SpanCorrupting(SpanCorruption(), train_tokenizer(Words(), ["a b"]))


def test_a_text_without_a_gap_is_refused(trained: Run) -> None:
    with pytest.raises(ConfigError, match="text 2: has no sentinel: write <extra_id_0> where words are missing"):
        trained.predict(["<extra_id_0> n1", "n1 n2"])


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    recipe = corrupted(tmp_path, SpanCorruption())
    with pytest.raises(ConfigError, match="shape 'encoder-decoder': the task prefix_lm needs 'decoder'"):
        type(recipe)(**dict(recipe) | {"task": PrefixLM()})


def test_texts_of_one_token_are_bad_rows(trained: Run) -> None:
    rows = trained.task.filter_rows(rows_of("n1 n2", "n1", "n3 n4 n5"), trained.config)
    assert [str(bad) for bad in rows.bad] == ["text.txt:2: the text has 1 token, and the task spans needs at least 2"]
    assert list(rows.lines) == [1, 3]
