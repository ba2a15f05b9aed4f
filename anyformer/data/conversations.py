"""Conversations in rows, and the chat templates that recipes name. Imports no torch.

A cell of the column `messages` is the JSON of a list of messages, each with a role and a text:

    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anyformer.config.spec import visible
from anyformer.data.chat_template import ROLES
from anyformer.data.tokenizer import TextTokenizer

MESSAGES = "messages"  # the column of conversations; several columns of a table are the messages of one
MAX_SHOWN = 40  # characters of a wrong value in an error message


class NamedTemplate(NamedTuple):
    """A chat template, and the special tokens that it adds to a tokenizer."""

    text: str
    tokens: tuple[str, ...]


TEMPLATES = {
    # every message is <|im_start|>role, a line end, the text, <|im_end|> and a line end
    "chatml": NamedTemplate(
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    # <bos>, the system's text and a blank line, then user <sep> assistant <eos> user <sep> …
    "plain": NamedTemplate(
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'user' %}{{ message.content + sep_token }}"
        "{% elif message.role == 'assistant' %}{{ message.content + eos_token }}"
        "{% elif message.role == 'system' and loop.first %}{{ message.content + '\\n\\n' }}"
        "{% else %}{{ raise_exception('the template \"plain\" has no role ' + message.role + ' here') }}"
        "{% endif %}{% endfor %}",
        (),
    ),
}


def with_template(tokenizer: TextTokenizer, name: str) -> TextTokenizer:
    """Return a tokenizer with a chat template of this file; its tokens that are new have new ids."""
    template = TEMPLATES[name]
    new = [token for token in template.tokens if tokenizer.special_id(token) is None]
    return (tokenizer.with_special(new) if new else tokenizer).with_chat({"default": template.text})


def alternate(texts: Sequence[str]) -> str:
    """Return the cell of a conversation that the user begins, and in which the assistant has every second message."""
    return json.dumps(
        [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)], ensure_ascii=False
    )


def parse_messages(cell: str) -> list[dict[str, Any]]:
    """Return the messages of a cell. Raise `ValueError` with a reason if it is no conversation."""
    try:
        messages = json.loads(cell)
    except (ValueError, RecursionError):
        raise ValueError(f"the messages are no JSON: {visible(cell[:MAX_SHOWN])}") from None
    if not isinstance(messages, list) or not messages:
        raise ValueError("the messages must be a list of at least one, each with a role and a content")
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            shown = visible(repr(role)[:MAX_SHOWN])
            raise ValueError(f"messages.{i}.role = {shown}: must be one of {', '.join(ROLES)}")
        if not isinstance(content := message.get("content"), str):
            raise ValueError(f"messages.{i}.content = {visible(repr(content)[:MAX_SHOWN])}: must be a string")
    return messages


def prompt_and_answers(row: Mapping[str, str]) -> dict[str, str] | str:
    """Return a row of a prompt and answers to it as texts, or why there is none.

    `row` has the JSON of messages: the prompt in `messages`, and an answer in `target.messages` or
    `rejected.messages` unless it is a text. An answer may begin with the prompt, and must if there is no other.
    """
    found = dict(row)
    try:
        prompt = parse_messages(row[MESSAGES]) if MESSAGES in row else None
        for role in ("target", "rejected"):
            if (cell := found.pop(f"{role}.{MESSAGES}", None)) is None:
                if prompt is None:
                    return f"the {role} is a text: name the column of the prompt, `source` or `messages`"
                continue
            *before, last = parse_messages(cell)
            if last["role"] != "assistant":
                return f"the {role} ends with a message of the {last['role']}, not of the assistant"
            if before and prompt is not None and before != prompt:
                what = "prompt" if MESSAGES in row else "messages before the target's last one"
                return f"the {role} does not continue the {what}"
            prompt, found[role] = before if prompt is None else prompt, last["content"]
    except ValueError as error:
        return str(error)
    if not prompt or prompt[-1]["role"] == "assistant":
        return "the prompt must end with a message of the user"
    return {**found, MESSAGES: json.dumps(prompt, ensure_ascii=False)}


def texts_of(role: str, cell: str) -> list[str]:
    """Return the texts in a cell of a column: all messages of a conversation, or one; none if it cannot be read."""
    if role != MESSAGES:
        return [cell.replace("\n", " ") if role == "words" else cell]
    try:
        return [message["content"] for message in parse_messages(cell)]
    except ValueError:
        return []
