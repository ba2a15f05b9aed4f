"""Sequence to sequence: what is read, what is asked, and in which order the answers come."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import Characters, Crops, Seq2Seq, Words
from anyformer.runs.run import Run
from anyformer.tasks import generation
from anyformer.tasks.metrics import bleu, chrf, exact_match, word_error_rate
from anyformer.tasks.seq2seq import SequenceToSequence
from tests.training.small import PADDED, Shape, pairs, run

digits = st.lists(st.integers(0, 9), min_size=1, max_size=8).map(lambda ds: " ".join(map(str, ds)))


@pytest.fixture(scope="module")
def words() -> TextTokenizer:
    return train_tokenizer(Words(), ["0 1 2 3 4 5 6 7 8 9"])


@pytest.fixture(scope="module", params=["decoder", "encoder-decoder"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    shape: Shape = request.param
    made = run(pairs(shape, steps=2, valid=None), tmp_path_factory.mktemp("trained") / "run")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # weights large enough for every source to have its own answer
        for parameter in made.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return made


def rows_of(sources: list[str], targets: list[str]) -> Rows:
    return Rows({"source": sources, "target": targets}, "pairs.tsv", range(1, len(sources) + 1))


@given(st.lists(st.tuples(digits, digits), min_size=1, max_size=5))
def test_labels_are_the_target_shifted_and_nothing_else_is_asked(words: TextTokenizer, drawn: list[Any]) -> None:
    task = SequenceToSequence(Seq2Seq(), words)
    rows = rows_of([s for s, _ in drawn], [t for _, t in drawn])
    for both in (True, False):
        for piece, (source, target) in zip(task.encode(rows, both), drawn, strict=True):
            s, t = words.encode(source), words.encode(target)
            assert len(piece.ids) == len(piece.labels)
            asked = [(at, label) for at, label in enumerate(piece.labels) if label != IGNORE]
            assert [label for _, label in asked] == [*t, words.eos]  # only the target, and its end
            # teacher forcing: what is asked at a place is what is read at the next
            assert list(piece.ids[asked[0][0] + 1 :]) == [label for _, label in asked[:-1]]
            if both:
                assert piece.source == [*s, words.eos]
                assert piece.ids[0] == words.bos
                assert len(asked) == len(piece.ids)
            else:
                assert piece.source is None
                assert list(piece.ids[: len(s) + 1]) == [*s, words.sep]
                assert asked[0][0] == len(s)  # the first answer is given where <sep> is read


def test_each_side_has_its_own_tokenizer(words: TextTokenizer) -> None:
    letters = train_tokenizer(Characters(), ["abc"])
    task = SequenceToSequence(Seq2Seq(), words, letters)
    (piece,) = task.encode(rows_of(["cab"], ["1 2"]), both_sides=True)
    assert piece.source == [*letters.encode("cab"), letters.eos]
    assert piece.labels == [*words.encode("1 2"), words.eos]


def test_crops_are_for_texts(words: TextTokenizer, trained: Run) -> None:
    with pytest.raises(AssertionError):
        SequenceToSequence(Seq2Seq(), words).loader(rows_of(["1"], ["1"]), Crops(rows=1, length=1), 0, trained.model)


# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_asked(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    asked = [" ".join(str(chance.randint(0, 9)) for _ in range(chance.randint(1, 6))) for _ in range(20)]
    one_by_one = [trained.predict([text])[0] for text in asked]
    assert trained.predict(asked) == one_by_one
    monkeypatch.setattr(generation, "MAX_INFERENCE_TOKENS", 60)  # many small batches
    assert trained.predict(asked) == one_by_one
    assert len(set(one_by_one)) > 5
    assert trained.predict([]) == []


def test_evaluation_is_a_plain_loop_over_tokens(trained: Run) -> None:
    sources = ["1 2 3", "4 5", "9 9 8 7"]
    rows = rows_of(sources, [" ".join(reversed(text.split())) for text in sources])
    found = trained.task.evaluate(trained.model, rows, PADDED)
    assert isinstance(trained.task, SequenceToSequence)
    total, count = 0.0, 0
    with torch.no_grad():
        for piece in trained.task.encode(rows, both_sides=trained.model.encoder is not None):
            inputs = (piece.ids,) if piece.source is None else (piece.source, piece.ids)
            logits = trained.model(*(torch.tensor([list(ids)]) for ids in inputs))[0]
            for at, label in enumerate(piece.labels):
                if label != IGNORE:
                    total -= float(logits[at].log_softmax(-1)[label])
                    count += 1
    assert found.values["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found.values["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert found.values["exact_match"] == exact_match(trained.predict(sources), rows.columns["target"])
    assert found.count == 3


def test_exact_match() -> None:
    assert exact_match(["a", "b ", "c", "D"], ["a", "b", "c", "d"]) == 0.5


def test_word_error_rate() -> None:
    """Replaced, missing and added words, per word of the targets; a best checkpoint has the lowest."""
    assert word_error_rate(["1 2 3", "4"], ["1 2 3", "4"]) == 0
    assert word_error_rate(["1 5 3", "", "7 8 9"], ["1 2 3", "4 4", "7 9"]) == pytest.approx(4 / 7)
    assert word_error_rate(["a b c d"], ["b c d e"]) == 0.5
    assert word_error_rate(["a b"], ["a"]) == 1.0


def test_bleu_and_chrf_are_sacrebleus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    said = ["the cat sat on a mat .", "it rains today", "two men walk"] * 3
    asked = ["the cat sat on the mat .", "it is raining today", "two men are walking"] * 3
    for tokenize in ("13a", "none", "char"):
        score, notes = bleu(said, asked, tokenize)
        assert score == pytest.approx(sacrebleu.corpus_bleu(said, [asked], tokenize=tokenize).score)
        assert f"tok:{tokenize}" in notes["signature"]
        assert f"version:{sacrebleu.__version__}" in notes["signature"]
        assert notes["interval"] >= 0
    score, notes = chrf(said, asked)
    assert score == pytest.approx(sacrebleu.corpus_chrf(said, [asked]).score)
    assert "chrF2" in notes["signature"] or "nc:6" in notes["signature"]
    json.dumps(notes)  # as `evaluate --json` does


def test_one_right_answer_of_many() -> None:
    """Some of the samples of the interval then hold none, and sacrebleu itself fails."""
    pytest.importorskip("sacrebleu")
    said, asked = ["ein mann steht dort .", *["q"] * 30], ["ein mann steht dort .", *["zwei hunde laufen"] * 30]
    for score, notes in (bleu(said, asked, "none"), chrf(said, asked)):
        assert 0 < score < 100
        assert notes["interval"] > 0


def test_the_metrics_that_were_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    spec = pairs(steps=2).model_copy(update={"task": Seq2Seq(metrics=("bleu", "chrf"), bleu_tokenize="none")})
    made = run(spec, tmp_path / "run")
    found = made.task.evaluate(made.model, rows_of(["1 2"] * 5, ["2 1"] * 5), PADDED)
    assert found.values.keys() == {"loss", "perplexity", "bleu", "chrf"}
    assert found.notes.keys() == {"bleu", "chrf"}


def test_smoothing_is_not_in_the_reported_loss(trained: Run) -> None:
    """`loss` decides which checkpoint is best, and must be the same measure for all of them."""
    rows = rows_of(["1 2"], ["2 1"])
    assert isinstance(trained.task, SequenceToSequence)
    (piece,) = trained.task.encode(rows, both_sides=trained.model.encoder is not None)
    inputs = (piece.ids,) if piece.source is None else (piece.source, piece.ids)
    with torch.no_grad():
        logits = trained.model(*(torch.tensor([list(ids)]) for ids in inputs))[0]
    wanted = F.cross_entropy(logits, torch.tensor(piece.labels), ignore_index=IGNORE)
    assert trained.task.evaluate(trained.model, rows, PADDED).values["loss"] == pytest.approx(float(wanted), rel=1e-5)
