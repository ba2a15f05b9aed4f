"""Constraints on answers in terms of text, and their translation to ids.

Several sequences of ids can decode to one text. Patterns, schemas and banned strings hold for all of them. Choices,
phrases and prefixes use the sequences that the tokenizer produces, at the beginning of a text and within one.
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
from anyformer.generation.constraints.automaton import BROKEN
from anyformer.generation.constraints.banned import WithoutStrings
from anyformer.generation.constraints.constraint import Constraint, Trie
from anyformer.generation.constraints.phrases import Spellings
from anyformer.generation.constraints.text_constraint import JsonSchema, Regex, Vocabulary

ANCHORS = ("x", ".", "\n", "1", " ")  # put before a text; the tokenizer splits at least one of them off


@dataclass(frozen=True)
class OutputConstraints:
    """Constraints on every answer. At most one of the first three is given; `phrases` are for beam search."""

    regex: str | None = None  # matches the whole answer
    json_schema: Mapping[str, object] | None = None  # the answer is JSON and valid
    choices: Sequence[str] | None = None  # the answer is one of them
    banned: Sequence[str] = ()  # strings that do not occur in it
    phrases: Sequence[str] = ()  # strings that occur in it
    prefix: str = ""  # the answer begins with it

    def __post_init__(self) -> None:
        for name in ("choices", "banned", "phrases"):
            if isinstance(getattr(self, name), str):
                raise ConfigError([Fault(name, "must be a list of strings, not one")])
        if self.choices is not None and not self.choices:
            raise ConfigError([Fault("choices", "is empty: give at least one")])
        for name in ("banned", "phrases"):
            if "" in getattr(self, name):
                raise ConfigError([Fault(name, "an empty string occurs everywhere: leave it out")])
        formats = self.formats
        if len(formats) > 1:
            what = f"defines the whole answer, and so does {formats[0]}: give one of them"
            raise ConfigError([Fault(formats[1], what)])
        for name in ("banned", "phrases"):
            if formats and getattr(self, name):
                what = f"cannot be combined with {formats[0]}, which defines the whole answer: put it there"
                raise ConfigError([Fault(name, what)])
        if clash := [(b, p) for b in self.banned for p in self.phrases if b in p]:
            raise ConfigError([Fault("banned", f"{clash[0][0]!r} occurs in the phrase {clash[0][1]!r}")])

    @property
    def formats(self) -> list[str]:
        """The names of the given options that define the whole answer."""
        return [name for name in ("regex", "json_schema", "choices") if getattr(self, name) is not None]

    @classmethod
    def split(cls, options: dict[str, Any]) -> tuple["OutputConstraints", dict[str, Any]]:
        """Return the constraints among some options, and the other options; None counts as not given."""
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in options.items() if name in names and value is not None}
        return cls(**own), {name: value for name, value in options.items() if name not in names}


@dataclass(frozen=True)
class TokenConstraints:
    """`OutputConstraints` in ids."""

    constraint: Constraint | None
    phrases: tuple[Spellings, ...]
    prefix: tuple[int, ...]


def tokenise(
    constraints: OutputConstraints, tokenizer: TextTokenizer, vocab: int, stop: Sequence[int], alone: bool
) -> TokenConstraints:
    """Translate constraints to ids, for answers that are `alone` or continue a text."""
    if not stop and (constraints.formats or constraints.banned or constraints.phrases):
        raise ConfigError([Fault("stop_ids", "is empty: a constrained answer ends by a stop id")])
    constraint = _constraint(constraints, tokenizer, vocab, tuple(stop), alone)
    prefix: tuple[int, ...] = ()
    if constraints.prefix:
        prefix = _spell("prefix", constraints.prefix, tokenizer, alone)[0]
        if constraint is not None and _after(constraint, prefix) == BROKEN:
            name = (constraints.formats or ["banned"])[0]
            what = f"= {constraints.prefix!r}: {name} allows no answer that begins with it"
            raise ConfigError([Fault("prefix", what)])
    phrases = tuple(_phrase_spellings(phrase, tokenizer) for phrase in constraints.phrases)
    return TokenConstraints(constraint, phrases, prefix)


def _constraint(
    constraints: OutputConstraints, tokenizer: TextTokenizer, vocab: int, stop: tuple[int, ...], alone: bool
) -> Constraint | None:
    lead = tokenizer.lead if alone else ""
    if constraints.choices is not None:
        sequences = [ids for text in constraints.choices for ids in _spell("choices", text, tokenizer, alone)]
        return Trie(sequences, vocab=vocab, stop=stop)
    if constraints.regex is not None:
        vocabulary = _vocabulary(tokenizer, vocab, stop, lead)
        with _named("regex"), _hinting(constraints.regex, vocabulary, alone):
            return Regex(constraints.regex, vocabulary)
    if constraints.json_schema is not None:
        with _named("json_schema"):
            return JsonSchema(_plain(constraints.json_schema), _vocabulary(tokenizer, vocab, stop, lead))
    if constraints.banned:
        return WithoutStrings(constraints.banned, _vocabulary(tokenizer, vocab, stop, lead))
    return None


# Tables over the vocabulary are cached: the next call often has the same tokenizer.


@lru_cache(16)
def _table(tokenizer: TextTokenizer) -> tuple[bytes, ...]:
    return tuple(tokenizer.vocabulary_bytes())


@lru_cache(16)
def _vocabulary(tokenizer: TextTokenizer, size: int, stop: tuple[int, ...], lead: str) -> Vocabulary:
    table = _table(tokenizer)
    return Vocabulary([*table, *[b""] * (size - len(table))], stop=stop, lead=lead)  # a model may have more ids


def _plain(schema: Mapping[str, object]) -> Any:
    """Return a schema as JSON has it."""
    try:
        return json.loads(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError([Fault("", f"is not JSON: {error}")]) from None


@contextmanager
def _hinting(pattern: str, vocabulary: Vocabulary, alone: bool) -> Iterator[None]:
    """Add to an error the pattern that would work, if answers continue a text and so begin with a space."""
    try:
        yield
    except ConfigError as error:
        spaced = f" (?:{pattern})"
        if alone or not _is_possible(spaced, vocabulary):
            raise
        hint = f"an answer that continues a text begins with a space: write {spaced!r}"
        raise ConfigError(Fault(fault.path, f"{fault.message}; {hint}") for fault in error.faults) from None


def _is_possible(pattern: str, vocabulary: Vocabulary) -> bool:
    try:
        Regex(pattern, vocabulary)
    except ConfigError:
        return False
    return True


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix faults with the name of the option."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            fault.under(name) if not fault.path.startswith("schema") else Fault(f"json_{fault.path}", fault.message)
            for fault in error.faults
        ) from None


# -- texts as ids -----------------------------------------------------------------------------------------------------


def _spell(name: str, text: str, tokenizer: TextTokenizer, alone: bool) -> list[tuple[int, ...]]:
    """Return the sequences of ids that decode to a text; at least one."""
    lead = tokenizer.lead if alone else ""
    if sequences := spellings(text, tokenizer, lead):
        return sequences
    if not text:
        return [()]
    if not alone and spellings(f" {text}", tokenizer, lead):
        what = f"{text!r} continues a text and so begins with a space: write {' ' + text!r}"
    else:
        what = _not_spelled(text, tokenizer)
    raise ConfigError([Fault(name, what)])


def _not_spelled(text: str, tokenizer: TextTokenizer) -> str:
    made = tokenizer.decode(tokenizer.encode(text))
    return f"{text!r} cannot be written by the tokenizer, which turns it into {made!r}"


def _phrase_spellings(phrase: str, tokenizer: TextTokenizer) -> Spellings:
    """Return all sequences of ids of a phrase within a text, without and with a space before it."""
    every = {*spellings(phrase, tokenizer), *spellings(f" {phrase}", tokenizer)}
    if not every:
        raise ConfigError([Fault("phrases", _not_spelled(phrase, tokenizer))])
    return Spellings(sorted(one for one in every if not any(_contains(one, other) for other in every - {one})))


def spellings(text: str, tokenizer: TextTokenizer, lead: str = "") -> list[tuple[int, ...]]:
    """Return the sequences of ids that a tokenizer may produce for this exact text after a lead, most common first."""
    table, target = _table(tokenizer), (lead + text).encode()
    candidates = [tokenizer.encode(text)]
    if text.startswith(" "):
        candidates.append(tokenizer.encode(text[1:]))
    for anchor in ANCHORS:
        ids, before = tokenizer.encode(anchor + text), (tokenizer.lead + anchor).encode()
        end = next((n for n in range(len(ids) + 1) if _bytes(ids[:n], table) == before), None)
        candidates += [] if end is None else [ids[end:]]
    return list(dict.fromkeys(tuple(ids) for ids in candidates if ids and _bytes(ids, table) == target))


def _bytes(ids: Iterable[int], table: Sequence[bytes]) -> bytes:
    return b"".join(table[i] for i in ids)


def _contains(long: tuple[int, ...], short: tuple[int, ...]) -> bool:
    return any(long[at : at + len(short)] == short for at in range(len(long) - len(short) + 1))


def _after(constraint: Constraint, ids: Sequence[int]) -> int:
    states = torch.tensor([constraint.start()])
    for i in ids:
        states = constraint.advance(states, torch.tensor([i]))
    return int(states)
