"""Constraints on answers: automata over token ids, whose states are integers, so that a batch of them is a tensor.

    states = torch.full((b,), constraint.start())
    mask = constraint.allowed(states)               # [b, v]: logits elsewhere become -inf
    states = constraint.advance(states, tokens)     # [b]; rows may be reordered like any tensor, as beams are

A stop id is allowed exactly where the answer may end, and some id is always allowed: there are no dead ends. After a
stop id a row has ended, and after a token that was not allowed it is broken; both states are final and allow the stop
ids alone. An answer that is cut off at its budget may be incomplete (see `accepting`). `allowed_within` allows only
what can still be completed in the tokens that are left; for texts one token per missing byte is assumed.

`Trie` and `Phrases` (`phrases.py`) work on the device, without the host. `Regex` and `JsonSchema` compute the row of a
state, 4 bytes per id, when the state is first reached: a walk over the vocabulary, some milliseconds for 50,000 tokens.
To find new states, each call synchronises with the device once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from anyformer.config.spec import ConfigError, Fault
from anyformer.decoding.constraints.automaton import BROKEN, END, ENDED, UNREACHABLE, Automaton, Ints
from anyformer.decoding.constraints.json_schema import compile_schema
from anyformer.decoding.constraints.regex import Node, Seq, literal, parse


class Constraint(ABC):
    """An automaton over `vocab` token ids, in which the ids of `stop` end an answer."""

    def __init__(self, vocab: int, stop: Sequence[int]):
        check_stop(stop, vocab)
        self.vocab, self.stop = vocab, tuple(stop)

    @abstractmethod
    def start(self) -> int:
        """Return the state before the first token."""

    @abstractmethod
    def allowed(self, states: Tensor) -> Tensor:
        """Return the ids that may come next, bool [b, v], in states [b]."""

    @abstractmethod
    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the states [b] after tokens [b]."""

    def allowed_within(self, states: Tensor, left: Tensor) -> Tensor:
        """Return the allowed ids after which the answer can be complete within `left` [b] tokens, these included and a
        stop id not; where there are none, the ids that bring its end nearest."""
        return self.allowed(states)

    def accepting(self, states: Tensor) -> Tensor:
        """Return where the answer is complete, bool [b]: it has ended, or may end here."""
        return (states != BROKEN) & self.allowed(states)[:, self.stop[0]]

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens, with or without their stop id, are a complete answer."""
        states = torch.tensor([self.start()])
        for token in tokens:
            states = self.advance(states, torch.tensor([token]))
        return bool(self.accepting(states))


def check_stop(stop: Sequence[int], vocab: int) -> None:
    """Raise a `ConfigError` unless there is a stop id and all are within the vocabulary."""
    if not stop:
        raise ConfigError([Fault("stop", "must name at least one id, by which a constrained answer ends")])
    check_ids("stop", stop, vocab)


def check_ids(path: str, ids: Sequence[int], vocab: int, taken: Sequence[int] = ()) -> None:
    """Check that ids are in the vocabulary and that none of them ends an answer."""
    for i in ids:
        if not 0 <= i < vocab:
            raise ConfigError([Fault(path, f"holds id {i}; the vocabulary has ids 0 to {vocab - 1}")])
        if i in taken:
            raise ConfigError([Fault(path, f"holds the stop id {i}: an answer ends there")])


def check_fit(constraint: Constraint, vocab: int, stop: Sequence[int]) -> None:
    """Raise a `ConfigError` unless vocabularies are equal and the constraint's stop ids are among the request's."""
    if constraint.vocab != vocab:
        raise ConfigError([Fault("constraint", f"is over {constraint.vocab} ids, and the model has {vocab}")])
    if not set(constraint.stop) <= set(stop):
        what = f"must hold the ids by which the constraint ends an answer, {list(constraint.stop)}"
        raise ConfigError([Fault("stop", f"= {list(stop)}: {what}")])


def within_budget(allowed: Tensor, needed: Tensor, left: Tensor) -> Tensor:
    """Return which allowed continuations, bool [b, n], end within `left` [b] tokens, where each needs `needed` [b, n]
    more; where none does, those that need the fewest."""
    needed = needed.masked_fill(~allowed, UNREACHABLE)
    return needed < torch.maximum(left, needed.amin(dim=1) + 1)[:, None]


# -- sequences of ids -------------------------------------------------------------------------------------------------


class Trie(Constraint):
    """The answer is one of the given sequences of ids."""

    def __init__(self, sequences: Sequence[Sequence[int]], *, vocab: int, stop: Sequence[int]):
        super().__init__(vocab, stop)
        if not sequences:
            raise ConfigError([Fault("sequences", "is empty: give at least one")])
        edges_of: list[dict[int, int]] = [{}, {}, {}]  # BROKEN, ENDED, and the start
        for n, sequence in enumerate(sequences):
            check_ids(f"sequences.{n}", sequence, vocab, taken=stop)
            at = ENDED + 1
            for token in sequence:
                if token not in edges_of[at]:
                    edges_of[at][token] = len(edges_of)
                    edges_of.append({})
                at = edges_of[at][token]
            edges_of[at].update(dict.fromkeys(stop, ENDED))
        for final in (BROKEN, ENDED):
            edges_of[final] = dict.fromkeys(stop, ENDED)
        edges = sorted((state * vocab + token, to) for state, out in enumerate(edges_of) for token, to in out.items())
        self._keys, self._targets = (torch.tensor(column) for column in zip(*edges, strict=True))
        self._bounds = torch.tensor([0, *np.cumsum([len(out) for out in edges_of]).tolist()])
        self._max_edges = max(map(len, edges_of))
        needed = [0] * len(edges_of)  # tokens from each state to a complete answer
        for state in reversed(range(ENDED + 1, len(edges_of))):  # edges lead to later states
            if ENDED not in edges_of[state].values():
                needed[state] = 1 + min(needed[to] for to in edges_of[state].values())
        self._needed = torch.tensor(needed)

    def start(self) -> int:
        return ENDED + 1

    def allowed(self, states: Tensor) -> Tensor:
        return self._mask(states, None)

    def allowed_within(self, states: Tensor, left: Tensor) -> Tensor:
        return self._mask(states, left)

    def _mask(self, states: Tensor, left: Tensor | None) -> Tensor:
        self._follow(states.device)
        keys, bounds = self._keys, self._bounds
        index = bounds[states][:, None] + torch.arange(self._max_edges, device=states.device)  # [b, edges]
        exists = index < bounds[states + 1][:, None]
        index = index.clamp(max=len(keys) - 1)
        if left is not None:
            exists = within_budget(exists, self._needed[self._targets[index]], left)
        tokens = (keys[index] % self.vocab).where(exists, self.vocab)  # the last column is dropped
        mask = torch.zeros(len(states), self.vocab + 1, dtype=torch.bool, device=states.device)
        return mask.scatter_(1, tokens, True)[:, : self.vocab]

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        self._follow(states.device)
        key = states * self.vocab + tokens
        index = torch.searchsorted(self._keys, key).clamp(max=len(self._keys) - 1)
        following = self._targets[index].where(self._keys[index] == key, BROKEN)
        return following.where(states > ENDED, states)

    def _follow(self, device: torch.device) -> None:
        if self._keys.device != device:
            tables = (self._keys, self._targets, self._bounds, self._needed)
            self._keys, self._targets, self._bounds, self._needed = (table.to(device) for table in tables)


# -- languages of texts -----------------------------------------------------------------------------------------------


class Vocabulary:
    """The bytes of every token as a trie, shared by all constraints on texts.

    Ids without text, such as `<pad>`, have b"" and are never allowed; those of `stop` end an answer, whatever their
    bytes. A `lead` precedes the text of an answer in its tokens: the space that some tokenizers add.
    """

    def __init__(self, tokens: Sequence[bytes], *, stop: Sequence[int], lead: str = ""):
        self.size, self.stop, self.lead = len(tokens), tuple(stop), lead
        check_stop(stop, self.size)
        ends = set(stop)
        spelt = [b"\0" if i in ends else token for i, token in enumerate(tokens)]
        self.singles = {token[0] for i, token in enumerate(spelt) if len(token) == 1 and i not in ends}
        lengths = np.array([len(token) for token in spelt])
        offsets = np.cumsum(lengths) - lengths
        symbols = np.frombuffer(b"".join(spelt), dtype=np.uint8).astype(np.int32)
        symbols[offsets[list(ends)]] = END
        self._node = np.zeros(self.size, dtype=np.int64)  # of each token; 0 is the root
        self._levels: list[tuple[Ints, Ints]] = []  # of each depth, in order of nodes: the parent, and the symbol
        nodes = 1
        for depth in range(int(lengths.max(initial=0))):
            longer = np.flatnonzero(lengths > depth)
            keys = self._node[longer] * (END + 1) + symbols[offsets[longer] + depth]
            unique, which = np.unique(keys, return_inverse=True)
            self._levels.append(((unique // (END + 1)).astype(np.int32), (unique % (END + 1)).astype(np.int32)))
            self._node[longer] = nodes + which
            nodes += len(unique)
        self._nodes, self._silent = nodes, lengths == 0

    def walk(self, automaton: "ByteAutomaton", state: int) -> Ints:
        """Return the state after each token, [v], from one state."""
        reached = np.zeros(self._nodes, dtype=np.int32)  # BROKEN
        reached[0], first = state, 1
        for parents, symbols in self._levels:
            states = reached[parents]
            if not states.any():
                break
            reached[first : first + len(parents)] = automaton.step(states, symbols)
            first += len(parents)
        following = reached[self._node]
        following[self._silent] = BROKEN
        return following


class ByteAutomaton(Protocol):
    """An automaton over bytes, such as `Automaton`."""

    start: int

    @property
    def size(self) -> int: ...
    @property
    def parts(self) -> int: ...
    def symbols(self) -> set[int]: ...
    def step(self, states: Ints, symbols: Ints) -> Ints: ...
    def distances_to_end(self, first: int) -> Ints: ...


class TextConstraint(Constraint):
    """The whole text of the answer is accepted by an automaton over bytes."""

    def __init__(self, automaton: ByteAutomaton, vocabulary: Vocabulary, name: str):
        super().__init__(vocabulary.size, vocabulary.stop)
        self._vocabulary, self._automaton = vocabulary, automaton
        self._tokens_to_end: Ints | None = (
            None  # tokens from each state to a whole answer; None: at most as many as bytes
        )
        if self._automaton.start != BROKEN and not self._automaton.symbols() <= vocabulary.singles:
            self._tokens_to_end = self._count_tokens_to_end()
        if self._automaton.start == BROKEN or (
            self._tokens_to_end is not None and self._tokens_to_end[self._automaton.start] == UNREACHABLE
        ):
            why = "no text matches it" if self._automaton.start == BROKEN else "the vocabulary can write no text of it"
            raise ConfigError([Fault("", f"{name} is impossible: {why}")])
        self._table = torch.zeros(2, self.vocab, dtype=torch.int32)  # [row, token]: the state that it leads to
        self._table[:, list(self.stop)] = ENDED
        self._row = torch.tensor([BROKEN, ENDED])  # of each state; -1 if not computed yet
        self._needed = torch.zeros(0, dtype=torch.int32)  # tokens to the end, for the states up to here
        self._made = 2

    @property
    def parts(self) -> int:
        """The size of the automaton, which bounds the work per token."""
        return self._automaton.parts

    def start(self) -> int:
        return self._automaton.start

    def allowed(self, states: Tensor) -> Tensor:
        rows = self._rows(states)  # first: the table may grow
        return self._table[rows] != BROKEN

    def allowed_within(self, states: Tensor, left: Tensor) -> Tensor:
        rows = self._rows(states)
        known = len(self._needed)
        if self._automaton.size > known:
            far = (
                self._automaton.distances_to_end(known) if self._tokens_to_end is None else self._tokens_to_end[known:]
            )
            self._needed = torch.cat((self._needed, torch.from_numpy(far).to(states.device)))
        following = self._table[rows]
        return within_budget(following != BROKEN, self._needed[following], left)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        rows = self._rows(states)
        following = self._table[rows, tokens].long()
        return following.where(states > ENDED, states)

    def _rows(self, states: Tensor) -> Tensor:
        """Return the row of each state in the table; rows of new states are added."""
        if self._table.device != states.device:
            tables = (self._table, self._row, self._needed)
            self._table, self._row, self._needed = (table.to(states.device) for table in tables)
        self._number_up_to(self._automaton.size)
        rows = self._row[states]
        if bool((rows < 0).any()):
            for state in states[rows < 0].unique().tolist():
                self._make(state)
            rows = self._row[states]
        return rows

    def _make(self, state: int) -> None:
        following = self._vocabulary.walk(self._automaton, state)
        if self._tokens_to_end is not None:
            following[self._tokens_to_end[following] == UNREACHABLE] = BROKEN
        if self._made == len(self._table):
            self._table = torch.cat((self._table, torch.zeros_like(self._table)))
        self._table[self._made] = torch.from_numpy(following).to(self._table.device)
        self._number_up_to(self._automaton.size)
        self._row[state] = self._made
        self._made += 1

    def _number_up_to(self, size: int) -> None:
        if size > len(self._row):
            self._row = torch.cat((self._row, self._row.new_full((size - len(self._row),), -1)))

    def _count_tokens_to_end(self) -> Ints:
        """Return the tokens from each state to the end. Without single-byte tokens a state may be a dead end."""
        before: dict[int, list[int]] = {}
        seen, left = {self._automaton.start}, [self._automaton.start]
        while left:
            state = left.pop()
            following = self._vocabulary.walk(self._automaton, state)
            for to in np.flatnonzero(np.bincount(following)).tolist():
                if to != BROKEN:
                    before.setdefault(to, []).append(state)
                    if to != ENDED and to not in seen:
                        seen.add(to)
                        left.append(to)
        distances: Ints = np.full(self._automaton.size, UNREACHABLE, dtype=np.int32)
        distances[ENDED], last, steps = 0, {ENDED}, 0
        while last:
            last = {state for to in last for state in before.get(to, ()) if distances[state] == UNREACHABLE}
            distances[list(last)] = steps
            steps += 1
        return distances


class Regex(TextConstraint):
    """The answer matches a regular expression (see `regex`), from its first character to its last."""

    def __init__(self, pattern: str, vocabulary: Vocabulary):
        super().__init__(_after(vocabulary.lead, parse(pattern)), vocabulary, f"the pattern {pattern!r}")


class JsonSchema(TextConstraint):
    """The answer is JSON that a schema allows (see `json_schema`); definitions nest in themselves `depth` times."""

    def __init__(self, schema: Mapping[str, object], vocabulary: Vocabulary, *, depth: int = 3):
        super().__init__(_after(vocabulary.lead, compile_schema(schema, depth=depth)), vocabulary, "the schema")


def _after(lead: str, node: Node) -> Automaton:
    return Automaton(Seq((literal(lead), node)))
