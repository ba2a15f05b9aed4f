"""What an answer must be, said in text: turned into constraints, phrases and a prefix in ids.

A text can be written by several sequences of ids. Patterns, schemas and banned strings hold whatever the sequence is;
choices, phrases and prefixes are written as the tokenizer would write them, at the beginning of a text and within one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from anyformer.config import ConfigError, Fault
from anyformer.data.tokenizer import TextTokenizer
from anyformer.decoding.constraints.automaton import BROKEN
from anyformer.decoding.constraints.banned import Without
from anyformer.decoding.constraints.constraint import Constraint, JsonSchema, Regex, Trie, Vocabulary
from anyformer.decoding.constraints.phrases import Ways

ANCHORS = ("x", ".", "\n", "1", " ")  # texts before a text, one of which the tokenizer keeps apart from it


@dataclass(frozen=True)
class Limits:
    """At most one of the first three; `phrases` are for beam search."""

    regex: str | None = None  # matches the answer from its first character to its last
    json_schema: Mapping[str, object] | None = None  # that the answer, which is JSON, is valid by
    choices: Sequence[str] | None = None  # of which the answer is one
    banned: Sequence[str] = ()  # strings that do not stand in it
    phrases: Sequence[str] = ()  # strings that do
    prefix: str = ""  # how it begins

    def __post_init__(self) -> None:
        for name in ("choices", "banned", "phrases"):
            if isinstance(getattr(self, name), str):
                raise ConfigError([Fault(name, "must be a list of strings, not one")])
        if self.choices is not None and not self.choices:
            raise ConfigError([Fault("choices", "is empty: no answer can be given")])
        for name in ("banned", "phrases"):
            if "" in getattr(self, name):
                raise ConfigError([Fault(name, "an empty string stands everywhere: leave it out")])
        whole = self.whole
        if len(whole) > 1:
            raise ConfigError([Fault(whole[1], f"says what the whole answer is, and so does {whole[0]}: give one")])
        for name in ("banned", "phrases"):
            if whole and getattr(self, name):
                what = f"cannot be held beside {whole[0]}, which says what the whole answer is: say it there"
                raise ConfigError([Fault(name, what)])
        if clash := [(b, p) for b in self.banned for p in self.phrases if b in p]:
            raise ConfigError([Fault("banned", f"{clash[0][0]!r} stands in the phrase {clash[0][1]!r}")])

    @property
    def whole(self) -> list[str]:
        """The names of those that say what the whole answer is."""
        return [name for name in ("regex", "json_schema", "choices") if getattr(self, name) is not None]

    @classmethod
    def split(cls, options: dict[str, Any]) -> tuple["Limits", dict[str, Any]]:
        """Those among some options, and the rest; None is as if not given."""
        own = {field.name for field in fields(cls)}
        limits = {name: value for name, value in options.items() if name in own and value is not None}
        return cls(**limits), {name: value for name, value in options.items() if name not in own}


@dataclass(frozen=True)
class Held:
    """The same in ids."""

    constraint: Constraint | None
    phrases: tuple[Ways, ...]
    prefix: tuple[int, ...]


def hold(limits: Limits, tokenizer: TextTokenizer, vocab: int, stop: Sequence[int], fresh: bool) -> Held:
    """Limits on answers that stand alone (`fresh`), or go on from a text."""
    if not stop and (limits.whole or limits.banned or limits.phrases):
        raise ConfigError([Fault("stop_ids", "is empty: an answer within limits ends by an id, and there is none")])
    constraint = _constraint(limits, tokenizer, vocab, tuple(stop), fresh)
    prefix: tuple[int, ...] = ()
    if limits.prefix:
        prefix = _written("prefix", limits.prefix, tokenizer, fresh)[0]
        if constraint is not None and _after(constraint, prefix) == BROKEN:
            name = (limits.whole or ["banned"])[0]
            raise ConfigError([Fault("prefix", f"= {limits.prefix!r}: no answer that begins so is allowed by {name}")])
    return Held(constraint, tuple(_ways(phrase, tokenizer) for phrase in limits.phrases), prefix)


def _constraint(
    limits: Limits, tokenizer: TextTokenizer, vocab: int, stop: tuple[int, ...], fresh: bool
) -> Constraint | None:
    lead = tokenizer.lead if fresh else ""
    if limits.choices is not None:
        sequences = [way for text in limits.choices for way in _written("choices", text, tokenizer, fresh)]
        return Trie(sequences, vocab=vocab, stop=stop)
    if limits.regex is not None:
        vocabulary = _vocabulary(tokenizer, vocab, stop, lead)
        with _named("regex"), _hinting(limits.regex, vocabulary, fresh):
            return _regex(limits.regex, vocabulary)
    if limits.json_schema is not None:
        with _named("json_schema"):
            return _schema(_dumped(limits.json_schema), _vocabulary(tokenizer, vocab, stop, lead))
    if limits.banned:
        return _without(tuple(limits.banned), _vocabulary(tokenizer, vocab, stop, lead))
    return None


# What is made for one call serves the next, which often asks for the same.


@lru_cache(4)
def _table(tokenizer: TextTokenizer) -> tuple[bytes, ...]:
    return tuple(tokenizer.vocabulary_bytes())


@lru_cache(4)
def _vocabulary(tokenizer: TextTokenizer, size: int, stop: tuple[int, ...], lead: str) -> Vocabulary:
    table = _table(tokenizer)
    return Vocabulary([*table, *[b""] * (size - len(table))], stop=stop, lead=lead)  # a model may have more ids


@lru_cache(4)
def _regex(pattern: str, vocabulary: Vocabulary) -> Constraint:
    return Regex(pattern, vocabulary)


@lru_cache(4)
def _schema(schema: str, vocabulary: Vocabulary) -> Constraint:
    return JsonSchema(json.loads(schema), vocabulary)


@lru_cache(4)
def _without(strings: tuple[str, ...], vocabulary: Vocabulary) -> Constraint:
    return Without(strings, vocabulary)


def _dumped(schema: Mapping[str, object]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError([Fault("", f"is no JSON: {error}")]) from None


@contextmanager
def _hinting(pattern: str, vocabulary: Vocabulary, fresh: bool) -> Iterator[None]:
    """Add to an error the pattern that would work, where an answer continues a text and so begins with a space."""
    try:
        yield
    except ConfigError as error:
        spaced = f" (?:{pattern})"
        if fresh or not _possible(spaced, vocabulary):
            raise
        hint = f"an answer continues a text, where it has a space before it: write {spaced!r}"
        raise ConfigError(Fault(fault.path, f"{fault.message}; {hint}") for fault in error.faults) from None


def _possible(pattern: str, vocabulary: Vocabulary) -> bool:
    try:
        _regex(pattern, vocabulary)
    except ConfigError:
        return False
    return True


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Faults by the name of the option."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            fault.under(name) if not fault.path.startswith("schema") else Fault(f"json_{fault.path}", fault.message)
            for fault in error.faults
        ) from None


# -- texts as ids -----------------------------------------------------------------------------------------------------


def _written(name: str, text: str, tokenizer: TextTokenizer, fresh: bool) -> list[tuple[int, ...]]:
    """The sequences of ids that are a text; at least one."""
    lead = tokenizer.lead if fresh else ""
    if found := spellings(text, tokenizer, lead):
        return found
    if not text:
        return [()]
    if not fresh and spellings(f" {text}", tokenizer, lead):
        what = f"{text!r} goes on from a text, where it has a space before it: write {' ' + text!r}"
    else:
        what = _unwritten(text, tokenizer)
    raise ConfigError([Fault(name, what)])


def _unwritten(text: str, tokenizer: TextTokenizer) -> str:
    made = tokenizer.decode(tokenizer.encode(text))
    return f"{text!r} cannot be written by the tokenizer, which makes {made!r} of it"


def _ways(phrase: str, tokenizer: TextTokenizer) -> Ways:
    """All sequences of ids that bring a phrase into a text, without and with a space before it."""
    found = {*spellings(phrase, tokenizer), *spellings(f" {phrase}", tokenizer)}
    if not found:
        raise ConfigError([Fault("phrases", _unwritten(phrase, tokenizer))])
    return Ways(sorted(way for way in found if not any(_within(other, way) for other in found - {way})))


def spellings(text: str, tokenizer: TextTokenizer, lead: str = "") -> list[tuple[int, ...]]:
    """The sequences of ids that a tokenizer might write for exactly this text after a lead, the likeliest first."""
    table, target = _table(tokenizer), (lead + text).encode()
    tries = [tokenizer.encode(text)]
    if text.startswith(" "):
        tries.append(tokenizer.encode(text[1:]))
    for anchor in ANCHORS:
        ids, before = tokenizer.encode(anchor + text), (tokenizer.lead + anchor).encode()
        end = next((n for n in range(len(ids) + 1) if _bytes(ids[:n], table) == before), None)
        tries += [] if end is None else [ids[end:]]
    return list(dict.fromkeys(tuple(ids) for ids in tries if ids and _bytes(ids, table) == target))


def _bytes(ids: Iterable[int], table: Sequence[bytes]) -> bytes:
    return b"".join(table[i] for i in ids)


def _within(short: tuple[int, ...], long: tuple[int, ...]) -> bool:
    return any(long[at : at + len(short)] == short for at in range(len(long) - len(short) + 1))


def _after(constraint: Constraint, ids: Sequence[int]) -> int:
    states = torch.tensor([constraint.start()])
    for i in ids:
        states = constraint.advance(states, torch.tensor([i]))
    return int(states)
