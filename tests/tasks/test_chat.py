"""Conversations: only the assistant's messages are learnt, packed rows equal single ones, prompts equal training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.data.batch import collate
from anyformer.data.chat_template import ChatTemplate
from anyformer.data.conversations import parse_messages, with_template
from anyformer.data.loader import Cursor
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import AdamW, Bytes, Chat, Crops, Data, LanguageModel, Packed, Recipe, RunTokenizer, TableFile
from anyformer.runs.run import Run, load
from anyformer.tasks.base import call, token_loss
from anyformer.tasks.chat import Conversing
from tests.data.chat_cases import CONVERSATIONS, STYLES, tokenizer, turns
from tests.tasks.refused import told
from tests.training.small import PADDED, model, run, settings

ROWS = [
    turns("Hello", "Hi!", "안녕", "안녕하세요!"),
    turns("你好", "你好！", system="请用中文回答。"),
    turns("one\ntwo", "three\n\nfour", "five"),
]
PACKED = Packed(tokens=512, length=256)
GENERATING = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write(folder: Path, rows: list[Any], name: str = "chat.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return path


def recipe(folder: Path, **changes: Any) -> Recipe:
    path = write(folder, ROWS * 4)
    fields: dict[str, Any] = {
        "task": Chat(template="chatml"),
        "data": Data(train=TableFile(path=str(path), messages="messages")),
        "tokenizer": Bytes(),
        "model": model(dropout=0.0),
        "batches": PACKED,
        "train": settings(steps=3),
    }
    return Recipe(**(fields | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("chat")
    return run(recipe(folder), folder / "run")


def task_of(run: Run) -> Conversing:
    assert isinstance(run.task, Conversing)
    return run.task


def rows_of(*conversations: Any) -> Rows:
    cells = [json.dumps(one, ensure_ascii=False) for one in conversations]
    return Rows({"messages": cells}, "chat.jsonl", range(1, len(cells) + 1))


def answers(task: Conversing, conversation: Any) -> list[str]:
    """Return the labels of an example as texts, one for each message."""
    example = task.encode([json.dumps(conversation)])[0]
    assert not isinstance(example, str)
    found, last = list[list[int]](), IGNORE
    for label in example.labels:
        if label != IGNORE:
            found += [[]] if last == IGNORE else []
            found[-1].append(label)
        last = label
    assert all(ids[-1] == task.template.end_of_turn for ids in found)
    return [task.tokenizer.decode(ids) for ids in found]


MESSAGE = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@given(st.lists(MESSAGE, min_size=2, max_size=6), st.booleans())
def test_labels_are_the_messages_of_the_assistant(trained: Run, texts: list[str], system: bool) -> None:
    conversation = turns(*texts, system="Be brief." if system else None)
    assert answers(task_of(trained), conversation) == texts[1::2]


@pytest.mark.parametrize("name", [name for name in STYLES if name not in ("qwen", "llama-2")])
def test_labels_begin_where_the_prompt_ends(name: str) -> None:
    text = TextTokenizer(tokenizer(STYLES[name])).with_chat({"default": STYLES[name].template})
    template = ChatTemplate.of(text, name)
    assert template is not None
    conversation = turns("Hello", "Hi there", "cheese", "[1] done")
    ids, spans = template.encode_answers(conversation)
    assert ids == template.encode(conversation, add_generation_prompt=False)
    assert [template.encode(conversation[:i]) for i in (1, 3)] == [ids[: span.start] for span in spans]
    assert [text.decode(ids[i] for i in span).strip() for span in spans] == ["Hi there", "[1] done"]


def test_labels_equal_the_generation_blocks_of_transformers() -> None:
    style = STYLES["chatml"]
    text = TextTokenizer(tokenizer(style)).with_chat({"default": GENERATING})
    inner = tokenizer(style)
    theirs = hf.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=GENERATING, eos_token=style.eos)
    template = ChatTemplate.of(text, "chatml")
    assert template is not None
    for conversation in (one for one in CONVERSATIONS if len(one) > 1):
        expected = theirs.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
        ids, spans = template.encode_answers(conversation)
        assert ids == expected["input_ids"]
        mask = [0] * len(ids)
        for i in (i for span in spans for i in span):
            mask[i] = 1
        assert mask == expected["assistant_masks"]


def test_packed_conversations_have_the_loss_of_single_ones(trained: Run) -> None:
    task = task_of(trained)
    examples = task.examples(task.filter_rows(rows_of(*ROWS), trained.config))
    apart = [collate([[0]], [example], 0, 0) for example in examples]
    batch = task.loader(rows_of(*ROWS), PACKED, 0, trained.model).read(Cursor(0, 0))[0]
    with torch.no_grad():
        one_by_one = sum(float(token_loss(call(trained.model, one, packed=False), one.labels)) for one in apart)
        together = float(token_loss(call(trained.model, batch, packed=True), batch.labels))
    assert batch.target_count == sum(one.target_count for one in apart)
    assert together == pytest.approx(one_by_one, rel=1e-4)


def test_a_trained_run_keeps_its_template_and_answers(trained: Run) -> None:
    again = load(trained.folder)
    template = again.chat_template
    assert template is not None
    assert template.end_of_turn in again.config.special.stops
    prompt = template.encode(turns("Hello"))
    assert task_of(again).prompts(["Hello"], again.config) == [prompt]
    scored = again.score(["Hello"], ["Hi!"])[0]
    assert again.tokenizer.decode(scored.ids) == "Hi!"
    values = task_of(again).evaluate(again.model, rows_of(*ROWS), PACKED).values
    assert {"loss", "perplexity", "accuracy"} == values.keys()


def test_a_conversation_equals_one_prompt_of_all_messages(trained: Run) -> None:
    chat = trained.chat("Be brief.")
    first = "".join(chat.reply("Hello", max_new_tokens=12))
    assert chat.messages == turns("Hello", first, system="Be brief.")
    second = "".join(chat.reply("안녕", max_new_tokens=12))
    fresh = trained.chat()
    fresh.messages = turns("Hello", first, system="Be brief.")
    assert "".join(fresh.reply("안녕", max_new_tokens=12)) == second
    assert "".join(fresh.reply("x", max_new_tokens=9, lookup=2)) == "".join(chat.reply("x", max_new_tokens=9))
    assert chat.undo()
    assert chat.undo()
    assert chat.undo()
    assert not chat.undo()
    assert chat.messages == turns(system="Be brief.")
    chat.messages.append({"role": "user", "content": "a"})
    chat.clear()
    assert chat.messages == turns(system="Be brief.")


def test_a_stopped_answer_stays_in_the_conversation(trained: Run) -> None:
    chat = trained.chat()
    pieces = chat.reply("Hello", max_new_tokens=50, min_new_tokens=50)
    begun = next(pieces)
    pieces.close()
    assert chat.messages == turns("Hello", begun)


def test_columns_become_turns(tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("Q,A\n안녕,반가워요\nHello,Hi\n", encoding="utf-8")
    data = Data(train=TableFile(path=str(tmp_path / "qa.csv"), messages=("Q", "A")))
    found = run(recipe(tmp_path, data=data), tmp_path / "run")
    assert answers(task_of(found), turns("안녕", "반가워요")) == ["반가워요"]


def test_a_language_model_becomes_a_chat_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Hello there. 안녕하세요! " * 40, encoding="utf-8")
    base = recipe(tmp_path, task=LanguageModel(), data=Data(train={"kind": "text", "path": str(text)}),
                  batches=Crops(rows=2, length=16))  # fmt: skip
    run(base, tmp_path / "base")
    first = {"train": settings(steps=2, init_from=str(tmp_path / "base")), "tokenizer": RunTokenizer()}
    tuned = run(recipe(tmp_path, task=Chat(template="plain"), **first), tmp_path / "tuned")
    assert tuned.tokenizer.size == load(tmp_path / "base").tokenizer.size
    assert "".join(tuned.chat().reply("Hello", max_new_tokens=3)) is not None
    assert tuned.config.special.stops == ()
    (refused,) = told(recipe(tmp_path, **first), tmp_path)
    assert "its tokenizer differs" in refused
    (refused,) = told(recipe(tmp_path, task=Chat(), **first), tmp_path)
    assert refused.startswith("tokenizer: has no chat template, which the task chat needs: set task.template")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([], "the messages must be a list of at least one"),
        (turns("Hello"), "has no message of the assistant"),
        ([{"role": "assistant", "content": "a"}], "messages.0.role = 'assistant': a conversation begins with another"),
        ([{"role": "bot", "content": "a"}], "messages.0.role = 'bot': must be one of system, developer, user"),
        ([{"role": "user"}], "messages.0.content = None: must be a string"),
        (["a"], "messages.0.role = None"),
        ("no list", "the messages are no JSON: no list"),
        (7, "the messages must be a list of at least one"),
        ({"role": "user"}, 'the field \'messages\' is {"role": "user"}: must be a list of messages'),
    ],
)
def test_bad_rows_have_reasons(tmp_path: Path, row: Any, why: str) -> None:
    path = write(tmp_path, [ROWS[0], row], "bad.jsonl")
    data = Data(train=TableFile(path=str(path), messages="messages"))
    lines = told(recipe(tmp_path, data=data), tmp_path)
    assert any(line.startswith(f"{path}:2: {why}") for line in lines), lines


def test_long_conversations_are_bad_rows(tmp_path: Path) -> None:
    lines = told(recipe(tmp_path, batches=Packed(tokens=32, length=32)), tmp_path)
    assert any("tokens, and a packed row holds 32" in line for line in lines)


def test_other_sources_and_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the task chat needs conversations: a table with the column `messages`"):
        recipe(tmp_path, data=Data(train={"kind": "text", "path": "a.txt"}))
    with pytest.raises(ConfigError, match="messages: is required: the column that the task chat reads"):
        recipe(tmp_path, data=Data(train=TableFile(path="a.jsonl", text="text")))
    with pytest.raises(ConfigError, match="the task chat reads conversations: use 'padded' or 'packed'"):
        recipe(tmp_path, batches=Crops(rows=1, length=8))
    with pytest.raises(ValueError, match="no JSON"):
        parse_messages("{")


def test_named_templates_write_what_they_say() -> None:
    bytes_ = train_tokenizer(Bytes(), [])
    for name, start in (("chatml", "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n"), ("plain", "")):
        found = ChatTemplate.of(with_template(bytes_, name), name)
        assert found is not None
        text = found.render(turns("a", "b", "c", system="s"))
        assert text.startswith(start)
        assert found.end_of_turn == (bytes_.eos if name == "plain" else found.tokenizer.special_id("<|im_end|>"))
    assert text == "<bos>s\n\na<sep>b<eos>c<sep>"


def test_padded_batches_and_learning(tmp_path: Path) -> None:
    """A model learns to answer one question, from padded rows."""
    path = write(tmp_path, [turns("a", "해")], "one.jsonl")
    train = settings(steps=60, optimizer=AdamW(lr=0.03))
    found = run(
        recipe(tmp_path, data=Data(train=TableFile(path=str(path), messages="messages")), batches=PADDED, train=train),
        tmp_path / "run",
    )
    assert found.predict(["a", " "]) == ["해", ""]
