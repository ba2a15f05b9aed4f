"""Rows, prompts and answers that are too long: for the task, for a batch, or for a model with so many positions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anyformer.config import ConfigError, io
from anyformer.data.loader import Cursor
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import Packed, Padded, Recipe
from anyformer.runs.run import Run, load
from anyformer.tasks.lm import LanguageModelling
from anyformer.training.train import evaluate
from tests.training.small import CROPS, PACKED, PADDED, Shape, make, pairs, quiet, run, said, text

SHAPES: list[Shape] = ["decoder", "encoder-decoder"]
LENGTHS = [2, 3, 9, 4, 8, 12, 5, 2, 10, 3, 11, 7]  # of the sources and targets in the file


def digits(count: int) -> str:
    return " ".join(str(n % 10) for n in range(count))


def from_file(folder: Path, shape: Shape, *changes: str) -> Recipe:
    """Pairs of those lengths, to be copied, for a model that has changed."""
    lines = [f"{digits(n)}\t{digits(n)}" for n in LENGTHS]
    (folder / "rows.tsv").write_text("\n".join(lines), encoding="utf-8")
    table = "{kind='table', path='rows.tsv', source='0', target='1', header=false}"
    parts = [f"data.{name}={table}" for name in ("train", "valid", "test")]
    start = ["task.max_target=none", f"data.root='{folder}'", *parts, "train.steps=2"]
    return io.override(pairs(shape, PADDED), [*start, *changes])


def learned(shape: Shape, length: int) -> list[str]:
    sides = ("encoder", "decoder") if shape == "encoder-decoder" else ("decoder",)
    return [f"model.{side}.position={{kind='learned', length={length}}}" for side in sides]


def lines_where(keep: Any) -> list[int]:
    return [line for line, n in enumerate(LENGTHS, 1) if keep(n)]


CASES: list[Any] = [
    ("encoder-decoder", ["task.max_source=8"], lambda n: n > 8, "the source has 9 tokens, more than task.max_source"),
    ("decoder", ["task.max_target=8"], lambda n: n > 8, "the target has 9 tokens, more than task.max_target"),
    ("encoder-decoder", learned("encoder-decoder", 9), lambda n: n + 1 > 9, "and the encoder has 9 learned positions"),
    ("encoder-decoder", learned("decoder", 9), lambda n: n + 1 > 9, "and the decoder has 9 learned positions"),
    ("decoder", learned("decoder", 17), lambda n: 2 * n + 1 > 17, "and the decoder has 17 learned positions"),
]
BATCHES: list[Any] = [
    ("decoder", ["batches.tokens=17"], lambda n: 2 * n + 1 > 17, "has 19 tokens, and a padded row holds 17"),
    (
        "encoder-decoder",
        ["batches={kind='packed',tokens=32,length=9}"],
        lambda n: n + 1 > 9,
        "and a packed row holds 9",
    ),
]


BATCH_FAULTS = [why for *_, why in BATCHES]  # batches of training alone have a length


@pytest.mark.parametrize(("shape", "changes", "long", "why"), [*CASES, *BATCHES])
def test_rows_that_are_too_long_are_bad_rows(
    tmp_path: Path, shape: Shape, changes: list[str], long: Any, why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(from_file(tmp_path, shape, *changes), tmp_path / "error")
    head, *told = str(caught.value).splitlines()
    expected, file = lines_where(long), tmp_path / "rows.tsv"
    assert head.startswith(f"data.train: {len(expected)} bad rows and {len(LENGTHS) - len(expected)} good: ")
    in_rows = [f"{file}:{line}" for line in expected[:5]]
    elsewhere = [] if why in BATCH_FAULTS else ["data.valid", "data.test"]  # the same rows, which are not listed again
    assert [line.split(": ")[0] for line in told] == in_rows + elsewhere
    assert why in told[0]
    assert not (tmp_path / "error").exists()

    console = quiet()
    job = make(from_file(tmp_path, shape, *changes, "data.on_bad_row=skip"), tmp_path / "skip", console=console)
    assert f"train: {len(expected)} bad rows skipped: {told[0]}" in said(console)
    numbers, place = list[int](), Cursor()
    while place.epoch == 0:
        batch, place = job.loader.read(place)
        numbers += batch.examples
    assert len(numbers) == len(LENGTHS) - len(expected)


@pytest.mark.parametrize(("shape", "changes", "long", "why"), CASES)
def test_an_evaluation_says_what_it_left_out(
    tmp_path: Path, shape: Shape, changes: list[str], long: Any, why: str
) -> None:
    run(from_file(tmp_path, shape, *changes, "data.on_bad_row=skip"), tmp_path / "run")
    expected = lines_where(long)
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("valid_loss" in row for row in logged)
    found = evaluate(tmp_path / "run")
    assert found.count == len(LENGTHS) - len(expected)
    assert found.notes["left_out"]["rows"] == len(expected)
    assert why in found.notes["left_out"]["first"][0]
    with pytest.raises(ConfigError, match=f"data.test: {len(expected)} bad rows"):
        evaluate(tmp_path / "run", ["data.on_bad_row=error"])


def test_an_evaluation_that_left_out_nothing_has_no_note(tmp_path: Path) -> None:
    run(from_file(tmp_path, "decoder"), tmp_path / "run")
    found = evaluate(tmp_path / "run")
    assert found.count == len(LENGTHS)
    assert "left_out" not in found.notes


def test_a_batch_is_a_matter_of_training_only(tmp_path: Path) -> None:
    """What no batch of training can hold is evaluated all the same."""
    spec = from_file(tmp_path, "decoder", "batches.tokens=17", "data.on_bad_row=skip")
    run(spec, tmp_path / "run")
    assert evaluate(tmp_path / "run").count == len(LENGTHS)


def test_where_nothing_is_short_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train: no rows in .*; all 12 are bad, the first: .*rows\.tsv:1: "):
        make(from_file(tmp_path, "decoder", "task.max_source=1", "data.on_bad_row=skip"), tmp_path / "run")


# -- answers ----------------------------------------------------------------------------------------------------------


def endless(made: Run) -> Run:
    """A run whose model never ends an answer."""
    eos = made.tokenizer.eos
    assert eos is not None
    head, generator = made.model.apply_head, torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def never(*given: Any) -> torch.Tensor:
        logits = head(*given)
        logits[..., : eos + 4] = -torch.inf  # nor any special id
        return logits

    object.__setattr__(made.model, "apply_head", never)
    return made


def length_of(text: str, tokenizer: TextTokenizer) -> int:
    return len(tokenizer.encode(text))


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_end_where_the_positions_do(tmp_path: Path, shape: Shape) -> None:
    """And an answer is the same whatever stands beside it."""
    spec = from_file(tmp_path, shape, *learned(shape, 25), "data.valid=none")
    made = endless(run(spec, tmp_path / "run"))
    asked = [digits(n) for n in (1, 2, 5, 5, 9, 24, 24, 12)]
    alone = [made.predict([line])[0] for line in asked]
    for line, answer in zip(asked, alone, strict=True):
        read = length_of(line, made.tokenizer) + 1
        room = 25 if shape == "encoder-decoder" else 25 - read + 1
        assert length_of(answer, made.tokenizer) == min(2 * read + 10, room)
    assert made.predict(asked) == alone


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_model_cannot_read_is_named(tmp_path: Path, shape: Shape) -> None:
    made = run(from_file(tmp_path, shape, *learned(shape, 25), "data.valid=none"), tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        made.predict([digits(3), digits(25), "", digits(30)])
    side = "encoder" if shape == "encoder-decoder" else "decoder"
    assert str(caught.value).splitlines() == [
        f"text 2: has 26 tokens, and the {side} has 25 learned positions",
        f"text 4: has 31 tokens, and the {side} has 25 learned positions",
    ]


@pytest.mark.parametrize("tokenizer", ["words", "bytes"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_blank_line_is_answered_by_one(tmp_path: Path, shape: Shape, tokenizer: str) -> None:
    changes = [f"tokenizer={tokenizer}", "task.max_target=12"]
    made = endless(run(io.override(pairs(shape, steps=2, valid=None), changes), tmp_path / "run"))
    answers = made.predict(["", "1 2", "  ", "3"])
    assert [bool(answer) for answer in answers] == [False, True, False, True]
    assert answers[1::2] == made.predict(["1 2", "3"])
    assert made.predict([""]) == [""]


# -- language models --------------------------------------------------------------------------------------------------


def spoken(folder: Path, *changes: str, batches: Padded | Packed = PADDED) -> Run:
    spec = io.override(text(folder, batches, steps=2), ["model.decoder.position={kind='learned', length=20}", *changes])
    return run(spec, folder / "run")


@pytest.mark.parametrize("batches", [PADDED, PACKED])
def test_a_language_model_stays_within_its_positions(tmp_path: Path, batches: Padded | Packed) -> None:
    made = spoken(tmp_path, batches=batches)
    rows = Rows({"text": ["the quick brown fox jumps over the lazy dog"]}, "text.txt", [1])
    found = made.task.evaluate(made.model, rows, batches)
    assert found.notes["window"] == 20
    assert found.count == len(rows.columns["text"][0]) - 1
    for prompt in ("t", "the quick brown fox ", "the quick brown fo"):
        answer = endless(made).predict([prompt])[0]
        assert answer.startswith(prompt)
        assert len(answer) == 21  # what is read fills all positions, and one more token is said
    with pytest.raises(ConfigError, match=r"^text 2: has 21 tokens, and the decoder has 20 learned positions$"):
        made.predict(["t", "the quick brown fox j"])


def test_crops_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batches\.length = 16: the decoder has 12 positions"):
        io.override(text(tmp_path), ["model.decoder.position={kind='learned', length=12}"])


def test_an_empty_prompt_begins_at_the_beginning(tmp_path: Path) -> None:
    made = endless(run(text(tmp_path, steps=2), tmp_path / "run"))
    first, second = made.predict(["", ""])
    assert first == second
    assert len(first) == CROPS.length
    assert len(made.predict([""], context=200)[0]) == 100
    bos, task = made.tokenizer.bos, made.task
    assert isinstance(task, LanguageModelling)
    with torch.no_grad():
        logits = made.model(torch.tensor([[bos]]))[0, -1]
    logits[: made.tokenizer.size - len(set(text_of(tmp_path)))] = -torch.inf
    assert first[0] == made.tokenizer.decode([int(logits.argmax())])
    task.tokenizer.bos = None
    with pytest.raises(ConfigError, match=r"text 1: is empty, and the tokenizer has no <bos> to start from"):
        task.predict(made.model, [""])


def text_of(folder: Path) -> str:
    return (folder / "text.txt").read_text(encoding="utf-8")


def test_loaded_runs_have_the_same_limits(tmp_path: Path) -> None:
    spoken(tmp_path)
    with pytest.raises(ConfigError, match="text 1: has 30 tokens"):
        load(tmp_path / "run").predict(["e" * 30])
