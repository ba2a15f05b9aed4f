"""Prefix language modelling: the prefix sees itself, only the rest is asked, and decoding agrees with training."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.data.batch import Ragged, collate
from anyformer.data.counter_rng import CounterRNG
from anyformer.data.loader import draw_fixed
from anyformer.data.readers import Rows
from anyformer.kernels.conventions import IGNORE, PLAIN, SEEN
from anyformer.recipe import LanguageModel, Packed, PrefixLM, Recipe, Seq2Seq
from anyformer.runs.run import Run
from anyformer.tasks.base import call
from anyformer.tasks.lm import PrefixModelling
from anyformer.tasks.seq2seq import SequenceToSequence
from tests.training.small import PADDED, corrupted, pairs, run, sentences


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("prefix")
    return run(corrupted(folder, PrefixLM(), steps=40), folder / "run")


@pytest.fixture(scope="module")
def reversing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Pairs in one row, of which the source sees itself."""
    recipe = pairs(valid=None, steps=10)
    recipe = recipe.model_copy(update={"task": Seq2Seq(max_target=6, prefix=True)})
    return run(recipe, tmp_path_factory.mktemp("reversing") / "run")


def rows_of(*texts: str) -> Rows:
    return Rows({"text": list(texts)}, "text.txt", range(1, len(texts) + 1))


def by_hand(run: Run, ids: list[int], seen: int) -> torch.Tensor:
    """Logits [n, v] of one row whose first tokens are seen by all of it."""
    marks = torch.tensor([[SEEN if i < seen else PLAIN for i in range(len(ids))]])
    with torch.no_grad():
        return run.model(torch.tensor([ids]), marks=marks)[0]


@given(st.lists(st.integers(6, 15), min_size=2, max_size=40), st.integers(0, 99))
def test_only_what_follows_the_prefix_is_asked(trained: Run, ids: list[int], seed: int) -> None:
    assert isinstance(trained.task, PrefixModelling)
    piece = trained.task.draw(Ragged.of([ids]), CounterRNG(np.array([seed])))[0]
    assert piece.ids == ids[:-1]
    assert piece.marks is not None
    seen = sum(piece.marks)
    assert piece.marks == [SEEN] * seen + [PLAIN] * (len(ids) - 1 - seen)
    assert piece.labels == [IGNORE] * (seen - 1) + ids[seen:]
    assert 1 <= seen < len(ids)


def test_every_place_is_drawn(trained: Run) -> None:
    assert isinstance(trained.task, PrefixModelling)
    pieces = trained.task.draw(Ragged.of([[7] * 5] * 400), CounterRNG(np.arange(400)))
    cuts = [sum(piece.marks or ()) for piece in pieces]
    assert all(60 < cuts.count(n) < 140 for n in range(1, 5))


def test_packed_and_padded_rows_are_as_each_alone(trained: Run) -> None:
    """Marks are of a document: nothing of a prefix is seen from another."""
    task = trained.task
    assert isinstance(task, PrefixModelling)
    pieces = draw_fixed([ids for ids in task.encode(rows_of(*sentences(6))) if len(ids) > 2], task.draw)
    alone = [by_hand(trained, list(p.ids), sum(p.marks or ())) for p in pieces]
    trained.model.eval()
    with torch.no_grad():
        packed = call(trained.model, collate([tuple(range(len(pieces)))], pieces, 0, 0, 80), packed=True)[0]
        padded = call(trained.model, collate([(i,) for i in range(len(pieces))], pieces, 0, 0), packed=False)
    at = 0
    for row, each in zip(padded, alone, strict=True):
        torch.testing.assert_close(row[: len(each)], each, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(packed[at : at + len(each)], each, rtol=1e-4, atol=1e-5)
        at += len(each)
    plain = trained.model(torch.tensor([pieces[0].ids]))[0]
    assert sum(pieces[0].marks or ()) > 1
    assert not torch.allclose(plain[0], alone[0][0])  # a prefix that sees itself is read otherwise


def test_evaluation_is_a_plain_loop_over_the_same_draws(trained: Run) -> None:
    task = trained.task
    assert isinstance(task, PrefixModelling)
    rows, total, right, count = rows_of(*sentences(8)), 0.0, 0, 0
    for piece in draw_fixed(task.encode(rows), task.draw):
        logits = by_hand(trained, list(piece.ids), sum(piece.marks or ()))
        for at, label in enumerate(piece.labels):
            if label != IGNORE:
                total -= float(logits[at].log_softmax(-1)[label])
                right, count = right + int(logits[at].argmax() == label), count + 1
    for batches in (PADDED, Packed(tokens=64, length=32)):
        found = task.evaluate(trained.model, rows, batches)
        assert found.count == count
        assert found.values["loss"] == pytest.approx(total / count, rel=1e-4)
        assert found.values["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-3)
        assert found.values["accuracy"] == pytest.approx(right / count)


# -- decoding ---------------------------------------------------------------------------------------------------------


def greedily(run: Run, prompt: list[int], count: int) -> list[int]:
    """Without any cache: the prompt is seen by all, and each new token only by those after it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(by_hand(run, ids, len(prompt))[-1].argmax()))
        if ids[-1] == run.tokenizer.eos:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("which", ["trained", "reversing"])
def test_decoding_with_a_cache_is_as_without(which: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(which)
    task = run.task
    assert isinstance(task, PrefixModelling | SequenceToSequence)
    texts = ["n1 n2 n3", "n5", "n7 n8 n9 n0 n1"] if which == "trained" else ["1 2 3", "4 5", "9"]
    prompts = task.prompts(texts, run.config)
    expected = [greedily(run, ids, 6) for ids in prompts]
    said = run.generate(texts, max_new_tokens=6)
    for text, answer, ids in zip(texts, said, expected, strict=True):
        assert answer.split() == run.tokenizer.decode(ids).split()
        assert run.generate([text], max_new_tokens=6, cache="static")[0] == answer
        assert run.generate([text], max_new_tokens=6, beams=1, n_best=1)[0] == answer
        assert run.generate([text], max_new_tokens=6, lookup=2)[0] == answer


def test_scores_are_those_of_marked_rows(trained: Run) -> None:
    text, answer = "n1 n2 n3", "n4 n5"
    prompt, rest = trained.tokenizer.encode(text), trained.tokenizer.encode(answer)
    logits = by_hand(trained, [*prompt, *rest], len(prompt))
    found = trained.score([text], [answer])[0]
    expected = [float(logits[len(prompt) - 1 + i].log_softmax(-1)[id]) for i, id in enumerate(rest)]
    assert found.logprobs == pytest.approx(expected, rel=1e-4, abs=1e-5)
    best = trained.alternatives(text, 1)[0]
    assert best.id == int(by_hand(trained, prompt, len(prompt))[-1].argmax())


# -- from one task to another, and what is wrong ----------------------------------------------------------------------


def test_a_language_model_goes_on_as_a_prefix_model(tmp_path: Path) -> None:
    recipe = corrupted(tmp_path, PrefixLM(), steps=2)
    first = run(recipe.model_copy(update={"task": LanguageModel()}), tmp_path / "lm")
    settings = recipe.train.model_copy(update={"init_from": str(tmp_path / "lm"), "freeze": ("decoder",)})
    second = run(recipe.model_copy(update={"train": settings}), tmp_path / "prefix")
    assert isinstance(second.task, PrefixModelling)
    assert all(
        torch.equal(x, second.model.state_dict()[name])
        for name, x in first.model.state_dict().items()
        if name.startswith("decoder.")
    )


def test_options_that_cut_a_prompt_are_refused(trained: Run) -> None:
    with pytest.raises(ConfigError, match="chunk: is not for prompts that see all of themselves"):
        trained.generate(["n1 n2 n3"], chunk=2)
    with pytest.raises(ConfigError, match="window = 4: a prefix that sees all of itself is read at once"):
        trained.score(["n1 n2 n3 n4"], window=4)


def test_a_text_of_one_token_is_a_bad_row(trained: Run) -> None:
    rows = trained.task.filter_rows(rows_of("n1"), trained.config)  # one text alone has no <eos> behind it
    assert [str(bad) for bad in rows.bad] == [
        "text.txt:1: the text has 1 token, and the task prefix_lm needs at least 2"
    ]


def test_an_encoder_decoder_has_no_prefix(tmp_path: Path) -> None:
    recipe = pairs("encoder-decoder")
    with pytest.raises(ConfigError, match=r"task\.prefix = true: is for decoder-only models"):
        Recipe(**dict(recipe) | {"task": Seq2Seq(prefix=True)})
