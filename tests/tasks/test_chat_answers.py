"""The tasks dpo and grpo of a chat model: their prompts and answers are those of a chat, in ids, and of TRL's rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from hypothesis import given, settings as examples, strategies as st
from pyarrow import parquet

from anyformer.config import ConfigError
from anyformer.data.batch import Example
from anyformer.data.chat_template import ChatTemplate
from anyformer.data.conversations import MESSAGES
from anyformer.data.loader import Cursor
from anyformer.data.readers import Rows, read
from anyformer.data.tokenizer import TextTokenizer
from anyformer.generation.http.service import ServedRun
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import Bytes, Chat, Data, Padded, Preferences, Recipe, Rewards, Seq2Seq, TableFile
from anyformer.recipe.source import source_faults
from anyformer.runs.run import Run, load
from anyformer.tasks.chat import Conversing
from anyformer.tasks.chat_answers import ChatAnswers, ChatPreferring, ChatRewardedAnswers
from tests.data.chat_cases import STYLES, tokenizer, turns
from tests.tasks.refused import told
from tests.training.small import make, metrics, model, run, settings

PROMPT, GOOD, BAD = turns("Hi", "Hi!", "Capital of 대한민국?", system="Be brief."), "서울", "Busan?"
PADDED = Padded(tokens=1024)


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def write(name: str, rows: list[dict[str, Any]]) -> str:
    if name.endswith("parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    else:
        Path(name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return name


def rows_of(source: TableFile, **more: Any) -> Rows:
    return read(source, Data(train=source, **more), "train", 0)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A chat model to start from."""
    folder = tmp_path_factory.mktemp("chat")
    path = write(str(folder / "chat.jsonl"), [{"messages": turns("say 해", "해")}, {"messages": turns("say b", "b")}])
    recipe = Recipe(
        task=Chat(template="chatml"),
        data=Data(train=TableFile(path=path, messages="messages")),
        tokenizer=Bytes(),
        model=model(dropout=0.0),
        batches=PADDED,
        train=settings(steps=3),
    )
    return run(recipe, folder / "run")


def answering(first: Run, task: Any, table: TableFile, **changes: Any) -> Recipe:
    fields = {
        "task": task,
        "data": Data(train=table, valid=table),
        "tokenizer": Bytes(),
        "model": model(dropout=0.0),
        "batches": PADDED,
        "train": settings(steps=2, init_from=str(first.folder), evaluate_every=2),
    }
    return Recipe(**(fields | changes))


# -- prompts ----------------------------------------------------------------------------------------------------------


def both_parts(example: Example) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the answer of an example."""
    answer = [label for label in example.labels if label != IGNORE]
    return [*example.ids][: len(example.ids) - len(answer) + 1], answer


MESSAGE = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12).filter(str.strip)


@pytest.mark.parametrize("style", [name for name in STYLES if name not in ("qwen", "llama-2")])
@examples(max_examples=8)
@given(texts=st.lists(MESSAGE, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2), good=MESSAGE, bad=MESSAGE)
def test_rows_have_the_ids_of_a_chat(style: str, texts: list[str], good: str, bad: str) -> None:
    """Prompts are those that `chat` and `serve` send, and answers have the labels of the task chat."""
    text = TextTokenizer(tokenizer(STYLES[style])).with_chat({"default": STYLES[style].template})
    template = ChatTemplate.of(text, style)
    assert template is not None
    chat = Conversing(Chat(), template)
    cells = {MESSAGES: [json.dumps(turns(*texts))], "target": [good], "rejected": [bad]}
    for spec, roles in ((Preferences(), ["target", "rejected"]), (Rewards(), ["target"])):
        task = spec.build(text)
        assert isinstance(task, ChatAnswers)
        for role, answer in zip(roles, (good, bad), strict=False):
            (example,) = task.encode(Rows(cells, "f", [1]), False, role)
            (in_chat,) = chat.encode([json.dumps([*turns(*texts), said("assistant", answer)])])
            assert isinstance(in_chat, Example)
            prompt, labels = both_parts(example)
            assert prompt == template.encode(turns(*texts))
            assert [*example.ids] == [*in_chat.ids]
            assert labels == [label for label in in_chat.labels if label != IGNORE][-len(labels) :]
            if len(texts) == 1:  # a text is the message of a user
                alone = Rows({"source": texts, **cells}, "f", [1])
                del alone.columns[MESSAGES]
                assert task.encode(alone, False, role) == [example]
                assert task.prompts(texts, model()) == [prompt]


@pytest.mark.parametrize("task", [Preferences(max_target=8), Rewards(samples=2, max_target=8)])
@pytest.mark.parametrize("conversations", [False, True])
def test_a_chat_model_keeps_its_prompts(
    first: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Preferences | Rewards, conversations: bool
) -> None:
    """Training, `predict`, `chat` and `serve` read one prompt, before and after."""
    monkeypatch.chdir(tmp_path)
    prompt: Any = [said("user", "say 해")] if conversations else "say 해"
    rows = [{"prompt": prompt, "chosen": "해", "rejected": str(i)} for i in range(4)]
    rejected = {"rejected": "rejected"} if isinstance(task, Preferences) else {}
    named: dict[str, Any] = {"messages" if conversations else "source": "prompt", "target": "chosen", **rejected}
    table = TableFile(path=write("rows.jsonl", rows), **named)
    recipe = answering(first, task, table)
    batch, _ = make(recipe, tmp_path / "job").loader.read(Cursor())
    assert first.chat_template is not None
    expected = first.chat_template.encode([said("user", "say 해")])
    assert all(ids[: len(expected)] == expected for ids in batch.ids.tolist())
    done = run(recipe, tmp_path / "run")
    assert done.config.special.stops == first.config.special.stops != ()
    again = load(tmp_path / "run")
    assert isinstance(again.task, ChatPreferring if isinstance(task, Preferences) else ChatRewardedAnswers)
    assert again.writer().prompts(["say 해"], again.config) == [expected]
    assert ServedRun.chat_ids(_Served(again), [said("user", "say 해")]) == expected  # type: ignore[arg-type]
    assert again.predict(["say 해"], max_new_tokens=5) == ["".join(again.chat().reply("say 해", max_new_tokens=5))]
    assert "valid_exact_match" in metrics(tmp_path / "run")[-1]


class _Served:
    """The part of a served run that makes prompts."""

    def __init__(self, run: Run):
        self.chat, self.name = run.chat_template, "run"


def test_rewards_see_whole_answers(first: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target as an answer has the reward 1: no special token and no part of the prompt is in it."""
    monkeypatch.chdir(tmp_path)
    table = TableFile(path=write("rows.jsonl", [{"p": PROMPT, "a": GOOD}] * 2), messages="p", target="a")
    job = make(answering(first, Rewards(samples=2, max_target=8), table), tmp_path / "run")
    task = job.task
    assert isinstance(task, ChatRewardedAnswers)
    batch, _ = job.loader.read(Cursor())
    ids = [*task.tokenizer.encode(GOOD), task.template.end_of_turn]
    monkeypatch.setattr(task, "_answers", lambda model, prompts, seeds: [ids for _ in prompts])
    sampled = task.sample(job.model, batch, 0, 1)
    assert sampled.sampled is not None
    assert torch.equal(sampled.sampled.rewards, torch.ones(4))


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_forms_of_preferences_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """With the prompt alone, in both answers, or in either place; answers as messages or as texts."""
    monkeypatch.chdir(tmp_path)
    good, bad = [said("assistant", GOOD)], [said("assistant", BAD)]
    forms: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"prompt": PROMPT, "chosen": good, "rejected": bad}, {"messages": "prompt"}),
        ({"prompt": PROMPT, "chosen": [*PROMPT, *good], "rejected": [*PROMPT, *bad]}, {"messages": "prompt"}),
        ({"prompt": PROMPT, "chosen": GOOD, "rejected": BAD}, {"messages": "prompt"}),
        ({"chosen": [*PROMPT, *good], "rejected": [*PROMPT, *bad]}, {}),
    ]
    for i, (row, prompt) in enumerate(forms):
        path = write(f"{i}.{suffix}", [row])
        source = TableFile(path=path, target="chosen", rejected="rejected", **prompt)  # type: ignore[arg-type]
        assert not [*source_faults(source, "dpo", Preferences().columns)]
        found = rows_of(source).columns
        assert json.loads(found.pop(MESSAGES)[0]) == PROMPT
        assert found == {"target": [GOOD], "rejected": [BAD]}


def test_columns_of_text_are_turns_before_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("a\tb\tc\tgood\tbad\nHi\tHi!\t수도?\t서울\t부산\n", encoding="utf-8")
    found = rows_of(TableFile(path=str(path), messages=("a", "b", "c"), target="good", rejected="bad")).columns
    assert json.loads(found[MESSAGES][0]) == turns("Hi", "Hi!", "수도?")
    assert found["target"] == ["서울"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"chosen": turns("a", "b"), "rejected": turns("c", "d")},
            "the rejected does not continue the messages before",
        ),
        ({"chosen": turns("a", "b", "c"), "rejected": turns("a", "d")}, "the target ends with a message of the user"),
        ({"chosen": turns("a", "b"), "rejected": "d"}, None),
        (
            {"chosen": "b", "rejected": "d"},
            "the target is a text: name the column of the prompt, `source` or `messages`",
        ),
        (
            {"chosen": [said("assistant", "b")], "rejected": [said("assistant", "d")]},
            "the prompt must end with a message",
        ),
        ({"chosen": [{"role": "bot"}], "rejected": turns("a", "d")}, "messages.0.role = 'bot': must be one of"),
        ({"chosen": turns("a", "b"), "rejected": turns("a", "b")}, "the rejected answer is the target"),
    ],
)
def test_bad_rows_have_reasons(first: Run, tmp_path: Path, row: dict[str, Any], why: str | None) -> None:
    path = str(tmp_path / "rows.jsonl")
    write(path, [{"chosen": turns("a", "b"), "rejected": turns("a", "c")}, row])
    table = TableFile(path=path, target="chosen", rejected="rejected")
    if why is None:
        assert rows_of(table).columns["rejected"] == ["c", "d"]
        return
    lines = told(answering(first, Preferences(), table), tmp_path)
    assert any(line.startswith(f"{path}:2: {why}") for line in lines), lines


def test_what_no_chat_sends_is_refused(first: Run, tmp_path: Path) -> None:
    """Rows of the task seq2seq from a chat model, and conversations without one."""
    path = str(tmp_path / "rows.jsonl")
    write(path, [{"p": "a", "m": turns("a"), "a": "b", "r": "c"}] * 3)
    pairs = TableFile(path=path, source="p", target="a")
    (line,) = told(answering(first, Seq2Seq(), pairs), tmp_path)
    assert line.startswith(
        f"task.kind = 'seq2seq': the tokenizer of {first.folder} has a chat template, and rows of this"
    )
    assert "`source <sep> target`" in line
    plain = run(answering(first, Seq2Seq(), pairs, train=settings(steps=1)), tmp_path / "plain")
    table = TableFile(path=path, messages="m", target="a", rejected="r")
    for one in (table, TableFile(path=path, messages="m", target="a")):
        task = Rewards(samples=2) if one.rejected is None else Preferences()
        (line,) = told(answering(plain, task, one), tmp_path)
        assert f"the task {task.kind} reads them with the tokenizer of a chat model alone" in line
    with pytest.raises(ConfigError, match="messages = 'm': is the prompt, as `source` is: leave out one of them"):
        answering(first, Preferences(), table.model_copy(update={"source": "p"}))
    with pytest.raises(ConfigError, match="the task grpo needs the columns `source` and `target`"):
        answering(first, Rewards(), TableFile(path=path, target="a"))
    joined = {"kind": "joined", "parts": [dict(table), {**dict(table), "messages": None, "source": "p"}]}
    with pytest.raises(ConfigError, match="have texts as prompts, and conversations"):
        answering(first, Preferences(), joined)  # type: ignore[arg-type]
