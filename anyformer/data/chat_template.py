"""Chat templates: conversations to the text and the ids that a chat model was trained on. Imports no torch.

A template writes special tokens such as `<|im_start|>` around the messages. Only those become special ids. A special
token in a message is plain text, so that no message can begin or end a turn:

1. Put a random mark inside every special token in a message, and render the template.
2. In the result, replace special tokens without a mark by random names, and remove the marks.
3. Encode the text by a tokenizer that knows the special tokens by these names alone.
"""

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.sentencepiece import SPACE
from anyformer.data.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from jinja2 import Template

Messages = Sequence[Mapping[str, Any]]

DEFAULT = "default"  # of several templates, the one that is rendered
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
VARIABLES = ("bos", "eos", "unk", "sep", "pad", "mask")  # special tokens that a template reads as bos_token, …
MAX_DEPTH = 20  # of lists and tables in a message
MARK = "\ue000{:024}\ue001"
MISSING = "chat templates need the package Jinja2: pip install 'anyformer[serve]'"


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template and its tokenizer. `name` is the file that errors name."""

    tokenizer: TextTokenizer
    template: "Template"
    name: str

    @classmethod
    def of(cls, tokenizer: TextTokenizer, name: str) -> "ChatTemplate | None":
        """Return the template of a tokenizer, None if it has none; raise a `ConfigError` if it does not compile."""
        if not tokenizer.chat:
            return None
        compiled = {
            key: _compile(text, name if key == DEFAULT else f"{name}: {key}") for key, text in tokenizer.chat.items()
        }
        if len(compiled) > 1 and DEFAULT not in compiled:
            raise ConfigError([Fault(name, f"has no template '{DEFAULT}', only {', '.join(map(visible, compiled))}")])
        return cls(tokenizer, compiled.get(DEFAULT, next(iter(compiled.values()))), name)

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation: messages with a `role` and a `content`.

        With `add_generation_prompt` the text ends where the assistant's next message begins.
        """
        return self._render([*_plain(messages, lambda text: text)], add_generation_prompt)

    def encode(self, messages: Messages, *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation. The template's special tokens become ids, those of messages never."""
        names, mark = self._names, MARK.format(secrets.randbelow(10**24))
        marked = self._render([*_plain(messages, lambda text: names.mark(text, mark))], add_generation_prompt)
        return names.encode(marked.split(mark))

    def encode_answers(self, messages: Messages) -> tuple[list[int], list[range]]:
        """Return the ids of a conversation, and where each message of the assistant is in them, with its end.

        A message begins where the prompt ends that a model would read before it.
        """
        ids = self.encode(messages, add_generation_prompt=False)
        text = self.render(messages, add_generation_prompt=False)
        answers = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if i == 0:
                raise ConfigError([Fault("messages.0.role", "= 'assistant': a conversation begins with another role")])
            if not text.startswith(self.render(messages[:i])):
                what = "the template does not write it after the prompt of the messages before it"
                raise ConfigError([Fault(f"messages.{i}", what)])
            start = _common(ids, self.encode(messages[:i]))
            if self.end_of_turn is not None and self.end_of_turn in ids[start:]:
                stop = ids.index(self.end_of_turn, start) + 1
            else:
                stop = _common(ids, self.encode(messages[: i + 1], add_generation_prompt=False))
            answers.append(range(start, stop))
        return ids, answers

    @cached_property
    def end_of_turn(self) -> int | None:
        """The id of the special token that ends a message of the assistant, where the template writes one."""
        answer = f"{secrets.randbelow(10**24):024}"
        found = self._names.pattern.match(self._probe("a", answer).rpartition(answer)[2].lstrip())
        return self.tokenizer.inner.token_to_id(found[0]) if found else None

    def _render(self, messages: list[Any], add_generation_prompt: bool) -> str:
        from anyformer.data.template_sandbox import TemplateRefusal, render

        inner, ids = self.tokenizer.inner, {role: getattr(self.tokenizer, role) for role in VARIABLES}
        tokens = {f"{role}_token": inner.id_to_token(id) for role, id in ids.items() if id is not None}
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return render(self.template, given | tokens)
        except TemplateRefusal as error:
            raise ConfigError([Fault("messages", _shown(error))]) from None
        except Exception as error:
            raise ConfigError([Fault(self.name, f"fails on this conversation: {_shown(error)}")]) from None

    def _probe(self, *contents: str, system: bool = False) -> str:
        """Return the text of a small conversation, "" where the template refuses it."""
        first = [{"role": "system", "content": "s"}] if system else []
        messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
        try:
            return self._render(first + messages, len(contents) % 2 == 1)
        except ConfigError:
            return ""

    @cached_property
    def _names(self) -> "_Names":
        """Special tokens, and the added tokens around messages: some models have markers that are not special."""
        inner, turns = self.tokenizer.inner, self._probe("a", "b", "c") + self._probe("a", system=True)
        special = {str(inner.id_to_token(i)) for i in self.tokenizer.special}
        added = {token.content for token in inner.get_added_tokens_decoder().values() if token.content in turns}
        return _Names(self.tokenizer, sorted(name for name in special | added if len(name.strip()) > 1))


class _Names:
    """Special tokens under random names, which no message can contain."""

    def __init__(self, tokenizer: TextTokenizer, special: list[str]):
        key = secrets.randbelow(10**24)
        self._name = {token: f"\ue002{key:024}{i:06}\ue003" for i, token in enumerate(special)}
        self._tokenizer = tokenizer.renamed(self._name)
        ids, renamed = tokenizer.inner.get_vocab(), self._tokenizer.inner.get_vocab()
        self._ids = {renamed[name]: ids[token] for token, name in self._name.items()}
        one_of = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        self.pattern = re.compile(one_of)
        self._begin = re.compile(f"(?={one_of}).", re.DOTALL | re.IGNORECASE)  # a template may change the case
        self._heads = {token[:i].lower() for token in special for i in range(1, len(token))}
        self._tails = {token[i:].lower() for token in special for i in range(1, len(token))}
        self._longest = max(map(len, special), default=0)

    def mark(self, text: str, mark: str) -> str:
        """Put a mark inside each special token, and where a text may begin or end inside one."""
        body = text.strip()
        before, after = text[: text.find(body)], text[text.find(body) + len(body) :]
        low, sizes = body.lower(), range(1, min(len(body), self._longest) + 1)
        first = mark if any(low[:n] in self._tails for n in sizes) else ""
        last = mark if any(low[-n:] in self._heads for n in sizes) else ""
        return before + first + self._begin.sub(lambda found: found[0] + mark, body) + last + after

    def encode(self, pieces: list[str]) -> list[int]:
        """Return the ids of a text with a mark between the pieces: special tokens with a mark inside are plain text."""
        text, marks = "".join(pieces), [*accumulate(map(len, pieces[:-1]))]
        ids = self._tokenizer.encode("".join(self._replaced(text, marks)))
        if (
            self._tokenizer.reader
            and ids[1:]
            and ids[1] in self._ids
            and self._tokenizer.inner.id_to_token(ids[0]) == SPACE
        ):
            del ids[0]  # the reader's ▁ before a text, which slow tokenizers do not write before a special token
        return [self._ids.get(id, id) for id in ids]

    def _replaced(self, text: str, marks: list[int]) -> Iterator[str]:
        done = at = 0
        while found := self.pattern.search(text, at):
            start, end = found.span()
            following = bisect_right(marks, start)
            if following < len(marks) and marks[following] < end:
                at = start + 1
            else:
                yield text[done:start] + self._name[found[0]]
                done = at = end
        yield text[done:]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first elements are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shown(error: Exception) -> str:
    return visible(re.sub("\ue000[0-9]{24}\ue001", "", str(error)))


def _compile(text: str, name: str) -> "Template":
    try:
        from anyformer.data.template_sandbox import compile_template
    except ImportError:
        raise ConfigError([Fault(name, MISSING)]) from None
    try:
        return compile_template(text)
    except Exception as error:
        line = getattr(error, "lineno", None)
        what = visible(str(getattr(error, "message", None) or error)).partition("\n")[0]
        raise ConfigError([Fault(name, f"is no chat template: {f'line {line}: ' if line else ''}{what}")]) from None


def _plain(messages: Any, change: Callable[[str], str]) -> Iterator[dict[str, Any]]:
    """Yield messages of JSON types alone, whose methods are safe to call, with their texts changed."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError([Fault("messages", "must be a list of messages, each with a role and a content")])
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            what = f"= {visible(repr(role))}: must be one of {', '.join(ROLES)}"
            raise ConfigError([Fault(f"messages.{i}.role", what)])
        rest = {key: value for key, value in message.items() if key != "role"}
        yield {"role": str(role), **_plain_value(rest, change, f"messages.{i}", MAX_DEPTH)}


def _plain_value(value: Any, change: Callable[[str], str], path: str, depth: int) -> Any:
    if depth == 0:
        raise ConfigError([Fault(path, f"is nested more than {MAX_DEPTH} levels deep")])
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is str:
        # the kind of a part of a message is compared, and never written
        return value if path.endswith(".type") and value.isidentifier() else change(value)
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        keys = {key: key if key.isidentifier() else change(key) for key in value}
        return {keys[key]: _plain_value(inner, change, f"{path}.{key}", depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(inner, change, f"{path}.{i}", depth - 1) for i, inner in enumerate(value)]
    raise ConfigError([Fault(path, "must be text, a number, true, false, null, a list or a table")])
