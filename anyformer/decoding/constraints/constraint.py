"""Constraints on what is decoded: automata over token ids, whose states are integers, so that a batch is a tensor.

    states = torch.full((b,), constraint.start())
    mask = constraint.allowed(states)               # [b, v]: logits elsewhere become -inf
    states = constraint.advance(states, tokens)     # [b]; rows may be reordered like any tensor, as beams are

A stop id is allowed exactly where the answer may end, and some id is always allowed: no answer runs into a dead end.
Behind a stop id a row has ended for good, whatever is fed to it; a token that was not allowed breaks the row for good.
Both allow the stop ids alone. An answer that is cut off at a length may still be without its end (see `accepting`):
`in_time` allows what can still be made whole in so many tokens: for texts, in as many as there are bytes missing.

`Trie` (and `Phrases`, in a file of its own) works on the device, with no word from the host. `Regex` and `JsonSchema`
make the row of a state, 4 bytes for each id, when a state is first met: a walk over the vocabulary, some milliseconds
for 50,000 tokens. To see whether that is due, each call waits for the device once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from anyformer.config.spec import ConfigError, Fault
from anyformer.decoding.constraints.automaton import BROKEN, END, ENDED, FAR, Automaton, Ints
from anyformer.decoding.constraints.json_schema import compile_schema
from anyformer.decoding.constraints.regex import Node, Seq, literal, parse


class Constraint(ABC):
    """An automaton over `vocab` token ids; `stop` ends an answer."""

    def __init__(self, vocab: int, stop: Sequence[int]):
        check_stop(stop, vocab)
        self.vocab, self.stop = vocab, tuple(stop)

    @abstractmethod
    def start(self) -> int:
        """The state before the first token."""

    @abstractmethod
    def allowed(self, states: Tensor) -> Tensor:
        """The ids that may come next, bool [b, v], in states [b]."""

    @abstractmethod
    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states [b] after tokens [b]."""

    def in_time(self, states: Tensor, left: Tensor) -> Tensor:
        """Those of them after which the answer can be whole when it has `left` [b] tokens more, these counted and a
        stop id not; where none is, those that bring its end nearest."""
        return self.allowed(states)

    def accepting(self, states: Tensor) -> Tensor:
        """Where the answer is whole, bool [b]: it has ended, or may end here."""
        return (states != BROKEN) & self.allowed(states)[:, self.stop[0]]

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether tokens, their stop id left out or not, are a whole answer."""
        states = torch.tensor([self.start()])
        for token in tokens:
            states = self.advance(states, torch.tensor([token]))
        return bool(self.accepting(states))


def check_stop(stop: Sequence[int], vocab: int) -> None:
    if not stop:
        raise ConfigError([Fault("stop", "must name at least one id: it is how a constrained answer ends")])
    check_ids("stop", stop, vocab)


def check_ids(path: str, ids: Sequence[int], vocab: int, taken: Sequence[int] = ()) -> None:
    """The ids are of the vocabulary and none of them ends an answer."""
    for i in ids:
        if not 0 <= i < vocab:
            raise ConfigError([Fault(path, f"holds id {i}; the vocabulary has ids 0 to {vocab - 1}")])
        if i in taken:
            raise ConfigError([Fault(path, f"holds the stop id {i}: an answer ends there and cannot go on")])


def check_fit(constraint: Constraint, vocab: int, stop: Sequence[int]) -> None:
    """A constraint is one on what is decoded."""
    if constraint.vocab != vocab:
        raise ConfigError([Fault("constraint", f"is over {constraint.vocab} ids, and the model has {vocab}")])
    if not set(constraint.stop) <= set(stop):
        what = f"must hold the ids by which the constraint ends an answer, {list(constraint.stop)}"
        raise ConfigError([Fault("stop", f"= {list(stop)}: {what}")])


def nearest(allowed: Tensor, needed: Tensor, left: Tensor) -> Tensor:
    """Which of some ways on, bool [b, n], end within `left` [b] tokens, where each needs so many more [b, n]; where
    none does, those that need the fewest."""
    needed = needed.masked_fill(~allowed, FAR)
    return needed < torch.maximum(left, needed.amin(dim=1) + 1)[:, None]


# -- one of some sequences --------------------------------------------------------------------------------------------


class Trie(Constraint):
    """The answer is one of the given sequences of ids."""

    def __init__(self, sequences: Sequence[Sequence[int]], *, vocab: int, stop: Sequence[int]):
        super().__init__(vocab, stop)
        if not sequences:
            raise ConfigError([Fault("sequences", "is empty: no answer can be given")])
        ways: list[dict[int, int]] = [{}, {}, {}]  # BROKEN, ENDED, and the start
        for n, sequence in enumerate(sequences):
            check_ids(f"sequences.{n}", sequence, vocab, taken=stop)
            at = ENDED + 1
            for token in sequence:
                if token not in ways[at]:
                    ways[at][token] = len(ways)
                    ways.append({})
                at = ways[at][token]
            ways[at].update(dict.fromkeys(stop, ENDED))
        for over in (BROKEN, ENDED):
            ways[over] = dict.fromkeys(stop, ENDED)
        edges = sorted((state * vocab + token, to) for state, way in enumerate(ways) for token, to in way.items())
        self._keys, self._targets = (torch.tensor(column) for column in zip(*edges, strict=True))
        self._bounds = torch.tensor([0, *np.cumsum([len(way) for way in ways]).tolist()])
        self._widest = max(map(len, ways))
        needed = [0] * len(ways)  # tokens from each state to a whole answer
        for state in reversed(range(ENDED + 1, len(ways))):  # ways lead to later states
            if ENDED not in ways[state].values():
                needed[state] = 1 + min(needed[to] for to in ways[state].values())
        self._needed = torch.tensor(needed)

    def start(self) -> int:
        return ENDED + 1

    def allowed(self, states: Tensor) -> Tensor:
        return self._mask(states, None)

    def in_time(self, states: Tensor, left: Tensor) -> Tensor:
        return self._mask(states, left)

    def _mask(self, states: Tensor, left: Tensor | None) -> Tensor:
        self._follow(states.device)
        keys, bounds = self._keys, self._bounds
        places = bounds[states][:, None] + torch.arange(self._widest, device=states.device)  # [b, most ways of a state]
        there = places < bounds[states + 1][:, None]
        places = places.clamp(max=len(keys) - 1)
        if left is not None:
            there = nearest(there, self._needed[self._targets[places]], left)
        tokens = (keys[places] % self.vocab).where(there, self.vocab)  # where there are fewer, one too far
        mask = torch.zeros(len(states), self.vocab + 1, dtype=torch.bool, device=states.device)
        return mask.scatter_(1, tokens, True)[:, : self.vocab]

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        self._follow(states.device)
        wanted = states * self.vocab + tokens
        places = torch.searchsorted(self._keys, wanted).clamp(max=len(self._keys) - 1)
        following = self._targets[places].where(self._keys[places] == wanted, BROKEN)
        return following.where(states > ENDED, states)

    def _follow(self, device: torch.device) -> None:
        if self._keys.device != device:
            tables = (self._keys, self._targets, self._bounds, self._needed)
            self._keys, self._targets, self._bounds, self._needed = (table.to(device) for table in tables)


# -- languages of texts -----------------------------------------------------------------------------------------------


class Vocabulary:
    """The bytes of every token, as a trie; made once and shared by all constraints on texts.

    Ids that are no text, such as `<pad>`, have b"" and are never allowed; those of `stop` end an answer, whatever their
    bytes. A `lead` is text that the tokens of an answer have before it: the space that some tokenizers put there.
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
        self._place = np.zeros(self.size, dtype=np.int64)  # each token's node; 0 is the root
        self._levels: list[tuple[Ints, Ints]] = []  # of each depth, in order of nodes: the parent, and the symbol
        nodes = 1
        for depth in range(int(lengths.max(initial=0))):
            longer = np.flatnonzero(lengths > depth)
            keys = self._place[longer] * (END + 1) + symbols[offsets[longer] + depth]
            found, which = np.unique(keys, return_inverse=True)
            self._levels.append(((found // (END + 1)).astype(np.int32), (found % (END + 1)).astype(np.int32)))
            self._place[longer] = nodes + which
            nodes += len(found)
        self._nodes, self._silent = nodes, lengths == 0

    def walk(self, automaton: "Characters", state: int) -> Ints:
        """The state behind each token, [v], from one state."""
        reached = np.zeros(self._nodes, dtype=np.int32)  # BROKEN
        reached[0], first = state, 1
        for parents, symbols in self._levels:
            states = reached[parents]
            if not states.any():
                break
            reached[first : first + len(parents)] = automaton.step(states, symbols)
            first += len(parents)
        following = reached[self._place]
        following[self._silent] = BROKEN
        return following


class Characters(Protocol):
    """An automaton over bytes, such as `Automaton`."""

    start: int

    @property
    def size(self) -> int: ...
    def symbols(self) -> set[int]: ...
    def step(self, states: Ints, symbols: Ints) -> Ints: ...
    def soonest(self, first: int) -> Ints: ...


class Language(Constraint):
    """The text of the answer, all of it, is of a language."""

    def __init__(self, automaton: Characters, vocabulary: Vocabulary, name: str):
        super().__init__(vocabulary.size, vocabulary.stop)
        self._vocabulary, self._automaton = vocabulary, automaton
        self._far: Ints | None = None  # tokens from each state to a whole answer; None: at most as many as bytes
        if self._automaton.start != BROKEN and not self._automaton.symbols() <= vocabulary.singles:
            self._far = self._explore()
        if self._automaton.start == BROKEN or (self._far is not None and self._far[self._automaton.start] == FAR):
            why = "no text matches it" if self._automaton.start == BROKEN else "the vocabulary can write no text of it"
            raise ConfigError([Fault("", f"{name} is impossible: {why}")])
        self._table = torch.zeros(2, self.vocab, dtype=torch.int32)  # [row, token]: the state that it leads to
        self._table[:, list(self.stop)] = ENDED
        self._row = torch.tensor([BROKEN, ENDED])  # of each state; -1 where there is none yet
        self._needed = torch.zeros(0, dtype=torch.int32)  # the same, for the states asked about
        self._made = 2

    def start(self) -> int:
        return self._automaton.start

    def allowed(self, states: Tensor) -> Tensor:
        rows = self._rows(states)  # first: the table may grow
        return self._table[rows] != BROKEN

    def in_time(self, states: Tensor, left: Tensor) -> Tensor:
        rows = self._rows(states)
        known = len(self._needed)
        if self._automaton.size > known:
            far = self._automaton.soonest(known) if self._far is None else self._far[known:]
            self._needed = torch.cat((self._needed, torch.from_numpy(far).to(states.device)))
        following = self._table[rows]
        return nearest(following != BROKEN, self._needed[following], left)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        rows = self._rows(states)
        following = self._table[rows, tokens].long()
        return following.where(states > ENDED, states)

    def _rows(self, states: Tensor) -> Tensor:
        """Where in the table each state is; those that are new are put in."""
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
        if self._far is not None:
            following[self._far[following] == FAR] = BROKEN
        if self._made == len(self._table):
            self._table = torch.cat((self._table, torch.zeros_like(self._table)))
        self._table[self._made] = torch.from_numpy(following).to(self._table.device)
        self._number_up_to(self._automaton.size)
        self._row[state] = self._made
        self._made += 1

    def _number_up_to(self, size: int) -> None:
        if size > len(self._row):
            self._row = torch.cat((self._row, self._row.new_full((size - len(self._row),), -1)))

    def _explore(self) -> Ints:
        """Where single bytes are missing, a state may have no way on: all are visited, from the last ones back."""
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
        far: Ints = np.full(self._automaton.size, FAR, dtype=np.int32)
        far[ENDED], last, steps = 0, {ENDED}, 0
        while last:
            last = {state for to in last for state in before.get(to, ()) if far[state] == FAR}
            far[list(last)] = steps
            steps += 1
        return far


class Regex(Language):
    """The answer matches a regular expression (see `regex`), from its first character to its last."""

    def __init__(self, pattern: str, vocabulary: Vocabulary):
        super().__init__(_after(vocabulary.lead, parse(pattern)), vocabulary, f"the pattern {pattern!r}")


class JsonSchema(Language):
    """The answer is JSON that a schema allows (see `json_schema`); a definition stands within itself `depth` times."""

    def __init__(self, schema: Mapping[str, object], vocabulary: Vocabulary, *, depth: int = 3):
        super().__init__(_after(vocabulary.lead, compile_schema(schema, depth=depth)), vocabulary, "the schema")


def _after(lead: str, node: Node) -> Automaton:
    return Automaton(Seq((literal(lead), node)))
