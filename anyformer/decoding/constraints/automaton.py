"""Automata over UTF-8 bytes, made from trees of characters; states are created when they are first reached.

    tree  ->  nondeterministic automaton (Thompson 1968)  ->  deterministic one, state by state

From every reachable state a text can still be accepted: parts that match no text are never built. The end of the
answer is one more symbol, END, after which nothing follows.
"""

from collections import deque
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import assert_never

import numpy as np
import numpy.typing as npt

from anyformer.config.spec import ConfigError, Fault
from anyformer.decoding.constraints.regex import Alt, Chars, Node, Ranges, Repeat, Seq

END = 256  # the symbol after the 256 bytes
BROKEN, ENDED = 0, 1  # final states: not in the language, and after END
MAX_STATES = 100_000  # of either automaton: a table of 100 MB
UNREACHABLE = 2**30  # distance from a state that leads to no end
MAX_CLOSURE = 10_000_000  # states in all epsilon closures together

# Ranges of code points with UTF-8 of equal length; without the surrogates, which UTF-8 cannot encode.
WIDTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))

Ints = npt.NDArray[np.int32]


class Automaton:
    """A deterministic automaton over bytes and END; `start` is BROKEN if no text is accepted."""

    def __init__(self, node: Node):
        self._edges: list[
            list[tuple[int, int, int]]
        ] = []  # of each state: symbols from, to, and the state they lead to
        self._free: list[list[int]] = []  # epsilon transitions
        self._built: dict[object, int | None] = {}
        final = self._add()
        accepting = self._add()
        self._edges[accepting] = [(END, END, final)]
        try:
            first = self._build(node, accepting)
        except RecursionError:
            raise ConfigError([Fault("", "the pattern is nested too deeply")]) from None
        self._built.clear()
        self._closures: dict[int, frozenset[int]] = {}
        self._reach = 0
        self._sets = [frozenset[int](), frozenset({final})]  # what BROKEN and ENDED stand for
        self._numbers = {found: number for number, found in enumerate(self._sets)}
        self._rows: Ints = np.zeros((64, END + 1), dtype=np.int32)
        self._known = np.zeros(64, dtype=np.bool_)
        self.start = BROKEN if first is None else self._number(frozenset({first}))

    @property
    def size(self) -> int:
        """The number of states so far."""
        return len(self._sets)

    @property
    def parts(self) -> int:
        """The number of states of the nondeterministic automaton, which bounds the work per new state."""
        return len(self._edges)

    def distances_to_end(self, first: int) -> Ints:
        """Return the bytes to a complete text from each state but the first ones; UNREACHABLE from BROKEN."""
        distances = [
            min((self._distances[part] for part in found), default=UNREACHABLE) for found in self._sets[first:]
        ]
        return np.array(distances, dtype=np.int32)

    @cached_property
    def _distances(self) -> list[int]:
        """The same for states of the nondeterministic automaton; END and epsilon transitions cost nothing."""
        before: list[list[tuple[int, int]]] = [[] for _ in self._edges]
        for state, (edges, free) in enumerate(zip(self._edges, self._free, strict=True)):
            for low, to in {(low, to) for low, _, to in edges}:
                before[to].append((state, int(low != END)))
            for to in free:
                before[to].append((state, 0))
        distances = [UNREACHABLE] * len(self._edges)
        distances[0] = 0  # the final state is made first
        left = deque([0])
        while left:
            to = left.popleft()
            for state, step in before[to]:
                if distances[to] + step < distances[state]:
                    distances[state] = distances[to] + step
                    (left.append if step else left.appendleft)(state)
        return distances

    def symbols(self) -> set[int]:
        """Return the bytes that occur in accepted texts."""
        spans = {(low, high) for edges in self._edges for low, high, _ in edges}
        return {symbol for low, high in spans for symbol in range(low, high + 1)} - {END}

    def step(self, states: Ints, symbols: Ints) -> Ints:
        """Return the state that each symbol leads to from each state."""
        if len(unknown := states[~self._known[states]]):
            for state in np.unique(unknown).tolist():
                self._expand(state)
        return self._rows[states, symbols]

    def accepts(self, text: str) -> bool:
        """Return whether a text is in the language, in time linear in its length."""
        states = np.array([self.start], dtype=np.int32)
        for symbol in (*text.encode(), END):
            states = self.step(states, np.array([symbol], dtype=np.int32))
        return bool(states[0] == ENDED)

    # -- nondeterministic: built from the end, so that equal suffixes are shared -----------------------------

    def _add(self, *free: int) -> int:
        if len(self._edges) >= MAX_STATES:
            raise _too_large()
        self._edges.append([])
        self._free.append(list(free))
        return len(self._edges) - 1

    def _build(self, node: Node, to: int) -> int | None:
        """Return the state from which texts of the node lead to state `to`; None if there are none."""
        if (id(node), to) not in self._built:
            self._built[id(node), to] = self._make(node, to)
        return self._built[id(node), to]

    def _make(self, node: Node, to: int) -> int | None:
        match node:
            case Chars(ranges):
                spelt = _byte_ranges(ranges)
                return self._spell(spelt, to) if spelt else None
            case Seq(parts):
                at: int | None = to
                for part in reversed(parts):
                    at = None if at is None else self._build(part, at)
                return at
            case Alt(parts):
                ways = [way for part in parts if (way := self._build(part, to)) is not None]
                return self._add(*dict.fromkeys(ways)) if ways else None
            case Repeat(part, least, most):
                return self._repeat(part, least, most, to)
            case _:
                assert_never(node)

    def _repeat(self, part: Node, least: int, most: int | None, to: int) -> int | None:
        at: int | None = to
        if most is None:
            loop = at = self._add(to)
            if (way := self._build(part, loop)) is not None:
                self._free[loop].append(way)
        else:
            for _ in range(most - least):
                assert at is not None
                way = self._build(part, at)
                if way is None:
                    break
                at = self._add(way, to)
        for _ in range(least):
            before, at = at, None if at is None else self._build(part, at)
            if at == before:
                break  # no text, or only the empty one
        return at

    def _spell(self, spelt: tuple[Ranges, ...], to: int) -> int:
        """Return a state from which any of some sequences of byte ranges leads to `to`; equal suffixes are shared."""
        if (spelt, to) not in self._built:
            state = self._add()
            for (low, high), *rest in spelt:
                self._edges[state].append((low, high, self._spell((tuple(rest),), to) if rest else to))
            self._built[spelt, to] = state
        found = self._built[spelt, to]
        assert found is not None
        return found

    # -- deterministic: a state is a set of nondeterministic states ------------------------------------------------

    def _closure(self, state: int) -> frozenset[int]:
        """Return the epsilon closure, without states that only have epsilon transitions."""
        if state not in self._closures:
            seen, left = {state}, [state]
            while left:
                new = [way for way in self._free[left.pop()] if way not in seen]
                seen.update(new)
                left += new
            self._reach += len(seen)
            if self._reach > MAX_CLOSURE:
                raise _too_large()
            self._closures[state] = frozenset(s for s in seen if self._edges[s] or not self._free[s])
        return self._closures[state]

    def _number(self, targets: frozenset[int]) -> int:
        if targets not in self._numbers:
            found = frozenset[int]().union(*map(self._closure, targets))
            if found not in self._numbers:
                if self.size >= MAX_STATES:
                    raise _too_large()
                self._numbers[found] = self.size
                self._sets.append(found)
                if self.size > len(self._rows):
                    self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
                    self._known = np.concatenate((self._known, np.zeros_like(self._known)))
            self._numbers[targets] = self._numbers[found]
        return self._numbers[targets]

    def _expand(self, state: int) -> None:
        edges = [edge for part in self._sets[state] for edge in self._edges[part]]
        cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        place = {cut: n for n, cut in enumerate(cuts)}
        targets: list[set[int]] = [set() for _ in cuts]  # between this cut and the next
        for low, high, to in edges:
            for n in range(place[low], place[high + 1]):
                targets[n].add(to)
        for n, found in enumerate(targets):
            if found:
                number = self._number(frozenset(found))  # first: it may reallocate the table
                self._rows[state, cuts[n] : cuts[n + 1]] = number
        self._known[state] = True


@lru_cache(1024)
def _byte_ranges(ranges: Ranges) -> tuple[Ranges, ...]:
    return tuple(spans for low, high in ranges for spans in utf8(low, high))


def utf8(low: int, high: int) -> Iterator[Ranges]:
    """Yield a range of code points as sequences of byte ranges; each choice of bytes is one character."""
    for least, most in WIDTHS:
        if max(low, least) <= min(high, most):
            yield from _split(max(low, least), min(high, most))


def _split(low: int, high: int) -> Iterator[Ranges]:
    """Split a range so that, where first bytes differ, the last ones range from 0x80 to 0xBF."""
    for bits in (6, 12, 18):
        tail = (1 << bits) - 1
        if low >> bits != high >> bits and high > 0x7F:
            if low & tail:
                yield from _split(low, low | tail)
                yield from _split((low | tail) + 1, high)
                return
            if high & tail != tail:
                yield from _split(low, (high & ~tail) - 1)
                yield from _split(high & ~tail, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


def _too_large() -> ConfigError:
    return ConfigError([Fault("", "the pattern is too large: use fewer or smaller counts {m,n}")])
