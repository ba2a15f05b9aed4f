"""The task span: windows, answers, SQuAD's metric, and questions that a small model learns to answer."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.config import Attention, Block, ConfigError, Learned, ModelConfig, Plain, SpanBounds, Stack, Tokens
from anyformer.data.loader import Cursor
from anyformer.data.readers import read
from anyformer.data.tokenizer import train_tokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import BPE, AdamW, Characters, Data, Padded, QuestionAnswering, Recipe, SquadFile, Words
from anyformer.tasks.span import (
    QuestionWindow,
    SpanAnswering,
    TextToken,
    best_answers,
    exact_match,
    f1,
    token_bounds,
    windows,
)
from anyformer.training.train import evaluate
from tests.training.small import run as train_run, settings

KINDS = {"animal": ["cat", "dog", "cow"], "tool": ["saw", "axe", "pen"], "fruit": ["fig", "pear", "plum"]}


def facts(count: int, length: int = 3, seed: int = 0) -> list[dict[str, Any]]:
    """Texts such as `ann has a cat , the saw .`, and questions for one of the things."""
    chance, rows = random.Random(seed), []
    for _ in range(count):
        kinds = chance.sample(list(KINDS), length)
        things = [f"{chance.choice(['a', 'the'])} {chance.choice(KINDS[kind])}" for kind in kinds]
        text, asked = f"{chance.choice(['ann', 'bob'])} has {' , '.join(things)} .", chance.randrange(length)
        answers = {"text": [things[asked]], "answer_start": [text.index(things[asked])]}
        rows.append({"question": f"which {kinds[asked]} ?", "context": text, "answers": answers})
    return rows


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(path: Path) -> Any:
    source = SquadFile(path=str(path))
    return read(source, Data(train=source, on_bad_row="skip"), "train", 0)


def model(vocab: int, depth: int = 1, width: int = 16, length: int = 64) -> ModelConfig:
    block = Block(mixer=Attention(heads=2), feedforward=Plain(width=2 * width))
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length))
    return ModelConfig(width=width, source=Tokens(vocab=vocab, types=2), encoder=stack, head=SpanBounds())


# -- the file ---------------------------------------------------------------------------------------------------------


def test_both_formats_have_the_same_rows(tmp_path: Path) -> None:
    rows = facts(6)
    lines = rows_of(written(tmp_path, rows))
    listed = [
        {
            **row,
            "answers": [
                dict(zip(("text", "answer_start"), pair, strict=True))
                for pair in zip(*row["answers"].values(), strict=True)
            ],
        }
        for row in rows
    ]
    assert rows_of(written(tmp_path, listed)).columns == lines.columns
    paragraphs = [
        {"context": row["context"], "qas": [{key: row[key] for key in ("question", "answers")}]} for row in listed
    ]
    nested = {"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}
    (tmp_path / "squad.json").write_text(json.dumps(nested), encoding="utf-8")
    assert rows_of(tmp_path / "squad.json").columns == lines.columns
    searched = [{**row, "answers": {"text": row["answers"]["text"]}} for row in rows]
    assert len(rows_of(written(tmp_path, searched))) == len(rows)


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ({"text": ["hat"], "answer_start": [0]}, "is not at answer_start = 0 of the context"),
        ({"text": ["tree"]}, "is not in the context"),
        ({"text": ["a", "b"], "answer_start": [0]}, "two lists of one length"),
        ([{"text": ""}], "an answer must have a text"),
    ],
)
def test_a_wrong_answer_is_a_bad_row(answers: Any, what: str, tmp_path: Path) -> None:
    good = facts(1)[0]
    found = rows_of(written(tmp_path, [good, {**good, "answers": answers}]))
    assert len(found) == 1
    assert what in found.bad[0].why
    assert found.bad[0].line == 2


# -- the metric -------------------------------------------------------------------------------------------------------

phrases = st.lists(
    st.sampled_from(["The", "a", "an", "cat", "Cat,", "dog", "the-cat", "x.y", "...", "thecat"]), max_size=5
)


def official(predicted: str, answer: str) -> tuple[float, float]:
    """Exact match and F1 of one answer, by the definition of SQuAD's evaluation, in other words than the package's."""

    def plain(text: str) -> list[str]:
        kept = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
        return [word for word in re.split(r"\s+", re.sub(r"\b(?:a|an|the)\b", " ", kept)) if word]

    mine, true = plain(predicted), plain(answer)
    common = sum(min(count, Counter(true)[word]) for word, count in Counter(mine).items())
    if not mine or not true:
        return float(mine == true), float(mine == true)
    precision, recall = common / len(mine), common / len(true)
    return float(mine == true), 0.0 if not common else 2 * precision * recall / (precision + recall)


@given(predicted=phrases, answers=st.lists(phrases, min_size=1, max_size=3))
def test_the_metric_is_that_of_squad(predicted: list[str], answers: list[list[str]]) -> None:
    guess, truths = " ".join(predicted), [" ".join(answer) for answer in answers]
    each = [official(guess, truth) for truth in truths]
    assert exact_match(guess, truths) == max(exact for exact, _ in each)
    assert f1(guess, truths) == pytest.approx(max(score for _, score in each))


def test_no_answer_is_right_for_no_question() -> None:
    assert (exact_match("", []), f1("", [])) == (1, 1)
    assert (exact_match("cat", []), f1("cat", [])) == (0, 0)


# -- windows and spans ------------------------------------------------------------------------------------------------


@given(length=st.integers(1, 60), size=st.integers(1, 20), overlap=st.integers(0, 30))
def test_windows_cover_a_text(length: int, size: int, overlap: int) -> None:
    found = windows(length, 3, 1, size + 4, overlap)
    covered = [i for window in found for i in range(window.first, window.first + window.size)]
    assert sorted(set(covered)) == list(range(length))
    assert all(window.size <= size for window in found)
    for one, other in itertools.pairwise(found):
        assert one.first + one.size - other.first == min(overlap, size // 2)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5))
def test_the_best_span_of_all_windows(seed: int, length: int, longest: int) -> None:
    """In texts of fewer tokens than candidates, no pair of a first and a last token is better."""
    torch.manual_seed(seed)
    text = "".join(chr(ord("a") + i) for i in range(length))
    tokens = [TextToken(i, i, i + 1) for i in range(length)]
    parts = [(window, torch.randn(window.size + 4, 2)) for window in windows(length, 3, 1, 9, 2)]
    best = best_answers(text, tokens, parts, longest, 1)[0]
    scores = {}
    for window, logits in parts:
        for first in range(window.size):
            for last in range(first, min(window.size, first + longest)):
                span = text[window.first + first : window.first + last + 1]
                score = float(logits[3 + first, 0] + logits[3 + last, 1])
                scores[span] = max(score, scores.get(span, -1e9))
    assert best.text == max(scores, key=lambda span: scores[span])
    assert best.score == pytest.approx(scores[best.text], abs=1e-5)


def test_answers_are_restricted_to_the_text() -> None:
    """However high the logits of the question are."""
    logits = torch.zeros(8, 2)
    logits[:4] = 100.0
    tokens = [TextToken(0, i, i + 1) for i in range(3)]
    (best, *_) = best_answers("abc", tokens, [(QuestionWindow(0, 3, 4), logits)], 2, 20)
    assert len(best.text) <= 2
    assert best.score == 0


@pytest.mark.parametrize("spec", [Characters(), Words(), BPE(size=300)])
def test_offsets_name_the_characters_of_tokens(spec: Any) -> None:
    text = "ann has  hat . bob has pen ."
    tokenizer = train_tokenizer(spec, [text] * 3)
    found = tokenizer.encode_with_offsets(text)
    assert [id for id, _, _ in found] == tokenizer.encode(text)
    start = text.index("pen")
    first, last = token_bounds([TextToken(*token) for token in found], start, start + 3) or (0, 0)
    assert text[found[first][1] : found[last][2]].strip() == "pen"


# -- the task ---------------------------------------------------------------------------------------------------------


def task_of(rows: Any, **fields: Any) -> SpanAnswering:
    texts = [*rows.columns["text"], *rows.columns["pair"]]
    return SpanAnswering(QuestionAnswering(**fields), train_tokenizer(Words(), texts))


def test_labels_are_the_tokens_of_the_answer(tmp_path: Path) -> None:
    rows = rows_of(written(tmp_path, facts(8)))
    task = task_of(rows, window=14, overlap=4)
    built = Transformer(model(task.tokenizer.size))
    loader = task.loader(task.filter_rows(rows, built.config, Padded(tokens=64)), Padded(tokens=64), 0, built)
    answers = {json.loads(cell)[0][0] for cell in rows.columns["answers"]}
    seen = []
    cursor = Cursor()
    while not cursor.epoch:
        batch, cursor = loader.read(cursor)
        for ids, (first, last) in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
            assert len(ids) <= 14
            seen.append(task.tokenizer.decode(ids[first : last + 1]) if first else "")
    assert {text for text in seen if text} == answers
    assert "" in seen  # windows without the answer


@torch.no_grad()
def test_padding_and_batches_do_not_change_the_loss(tmp_path: Path) -> None:
    rows = rows_of(written(tmp_path, [*facts(2, length=1), *facts(2, length=3)]))
    task = task_of(rows)
    built = Transformer(model(task.tokenizer.size)).eval()
    together = task.evaluate(built, rows, Padded(tokens=512)).values["loss"]
    apart = [task.evaluate(built, rows.take([i]), Padded(tokens=512)).values["loss"] for i in range(4)]
    assert together == pytest.approx(sum(apart) / 4, rel=1e-5)
    logits = torch.randn(2, 5, 2)
    logits[1, 3:] = torch.finfo(torch.float32).min
    labels = torch.tensor([[1, 2], [0, 2]])
    smoothed = task.loss(logits, labels, 0.1)
    alone = task.loss(logits[:1], labels[:1], 0.1) + task.loss(logits[1:, :3], labels[1:], 0.1)
    assert smoothed == pytest.approx(float(alone), rel=1e-5)


def test_lines_of_predictions(tmp_path: Path) -> None:
    rows = rows_of(written(tmp_path, facts(4)))
    task = task_of(rows, window=16, overlap=4, longest=2)
    built = Transformer(model(task.tokenizer.size)).eval()
    lines = [f"{a}\t{b}" for a, b in zip(rows.columns["text"], rows.columns["pair"], strict=True)]
    plain = task.predict(built, [*lines, " "])
    assert plain[-1] == ""
    assert all(answer in line for answer, line in zip(plain, lines, strict=False))
    scored = task.predict(built, lines, scores=True)
    assert [line.split("\t")[0] for line in scored] == plain[:-1]
    for line, text, answer in zip(lines, rows.columns["pair"], plain, strict=False):
        listed = json.loads(task.predict(built, [line], n_best=3)[0])
        assert listed[0]["text"] == answer
        assert [one["text"] for one in listed] == [text[one["start"] : one["end"]] for one in listed]
        assert [one["score"] for one in listed] == sorted((one["score"] for one in listed), reverse=True)
    assert task.predict(built, [" "], n_best=3) == ["[]"]
    with pytest.raises(ConfigError, match="text 1: must be a question and a text, separated by a tab"):
        task.predict(built, ["what ?"])
    with pytest.raises(ConfigError, match="leaves no space for its text"):
        task.predict(built, ["what has " * 12 + "\t" + "a b"])


def test_questions_without_an_answer(tmp_path: Path) -> None:
    without = {**facts(1)[0], "answers": []}
    rows = rows_of(written(tmp_path, [facts(1)[0], without]))
    strict = task_of(rows).filter_rows(rows, model(40))
    assert "set task.unanswerable = true" in strict.bad[0].why
    lines = [f"{a}\t{b}" for a, b in zip(rows.columns["text"], rows.columns["pair"], strict=True)]
    for threshold, empty in ((-1e5, True), (1e5, False)):
        task = task_of(rows, unanswerable=True, threshold=threshold)
        built = Transformer(model(task.tokenizer.size)).eval()
        assert not task.filter_rows(rows, built.config).bad
        assert [answer == "" for answer in task.predict(built, lines)] == [empty] * 2
        assert (
            task.evaluate(built, rows, Padded(tokens=512)).values["exact_match"] == (0.5 if empty else 0) or not empty
        )
    with pytest.raises(ConfigError, match="threshold"):
        QuestionAnswering(threshold=1.0)


def recipe(folder: Path) -> Recipe:
    paths = {"train": written(folder, facts(600)), "valid": written(folder, facts(40, seed=1), "valid.jsonl")}
    tokens = Tokens(types=2)
    return Recipe(
        task=QuestionAnswering(window=16, overlap=4, longest=3),
        data=Data(**{name: SquadFile(path=str(path)) for name, path in paths.items()}),
        tokenizer=Words(),
        model=model(1, depth=2, width=32).model_copy(update={"source": tokens}),
        batches=Padded(tokens=1024),
        train=settings(steps=120, optimizer=AdamW(lr=3e-3), log_every=50),
    )


def test_a_small_model_learns_to_answer(tmp_path: Path) -> None:
    """Its exact match and F1 are SQuAD's of its predictions."""
    run = train_run(recipe(tmp_path), tmp_path / "run")
    rows = rows_of(tmp_path / "valid.jsonl")
    lines = [f"{a}\t{b}" for a, b in zip(rows.columns["text"], rows.columns["pair"], strict=True)]
    truths = [[text for text, _ in json.loads(cell)] for cell in rows.columns["answers"]]
    pairs = [max(official(guess, one) for one in each) for guess, each in zip(run.predict(lines), truths, strict=True)]
    found = evaluate(tmp_path / "run", split="valid").values
    assert found["exact_match"] == pytest.approx(sum(exact for exact, _ in pairs) / len(pairs))
    assert found["f1"] == pytest.approx(sum(score for _, score in pairs) / len(pairs))
    assert found["exact_match"] > 0.9
    question, text = lines[0].split("\t")
    assert run.task.answers(run.model, question, text)[0].text == run.predict(lines[:1])[0]


@pytest.mark.parametrize("one", [
    {"data": [{"paragraphs": None}]},
    {"data": [{"paragraphs": [{"context": "c", "qas": None}]}]},
    [{"question": "q", "context": "c d", "answers": 5}],
    [{"question": "q", "context": "c d", "answers": {"text": ["c"], "answer_start": 0}}],
    [{"question": "q", "context": "c d", "answers": [{"text": "c", "answer_start": -1}]}],
])  # fmt: skip
def test_malformed_questions_are_bad_rows(tmp_path: Path, one: Any) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(one), encoding="utf-8")
    with pytest.raises(ConfigError):
        rows_of(tmp_path / "squad.json")
