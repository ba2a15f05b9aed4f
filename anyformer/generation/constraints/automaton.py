"""Automata over UTF-8 bytes, made from trees of characters, state by state as texts reach them.

A state is a set of lists of nodes that may follow: what is left of the tree after the bytes so far (the partial
derivatives of Antimirov 1996). Building one costs nothing but its first state, whatever the counts in the tree, and
parts may contain themselves. The end of the answer is one more symbol, END, after which nothing follows.

From every state a text can be completed. A state of more than MAX_LISTS lists is left out: a tree so ambiguous has no
text through it.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from anyformer.generation.constraints.regex import Alt, Chars, Node, Ranges, Ref, Repeat, Seq

END = 256  # the symbol after the 256 bytes
BROKEN, ENDED = 0, 1  # final states: not in the language, and after END
UNREACHABLE = 2**30  # distance from a state that leads to no end
MAX_LISTS = 1000  # of a state, which bounds the work for one symbol
MAX_ROUNDS = 20  # of shortest texts of parts that contain themselves; fewer give longer texts

# Ranges of code points with UTF-8 of equal length; without the surrogates, which UTF-8 cannot encode.
WIDTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class _Bytes:
    """The rest of a character."""

    spans: Ranges


@dataclass(frozen=True, eq=False)
class _Rest:
    """A sequence from one of its parts on."""

    parts: tuple[Node, ...]
    begin: int


_Part: TypeAlias = Node | _Bytes | _Rest


class _List:
    """A node and the nodes after it; None at the end of the text."""

    __slots__ = ("edges", "head", "need", "tail")

    def __init__(self, head: _Part | None, tail: "_List | None", need: int):
        self.head, self.tail, self.need = head, tail, need  # need: bytes of the shortest text
        self.edges: list[tuple[int, int, _List]] | None = None  # symbols from, to, and the remaining nodes after one


class Automaton:
    """A deterministic automaton over bytes and END; `start` is BROKEN if no text is accepted.

    With `writable`, distances are those of texts of these bytes alone, and states without such a text are left out.
    """

    def __init__(self, node: Node, writable: Set[int] | None = None):
        self._writable = writable
        self._interned: dict[object, _Part] = {}
        self._lists: dict[tuple[int, int], _List] = {}
        self._firsts: dict[int, list[tuple[int, int, tuple[_Part, ...]]]] = {}
        self._alternatives: dict[int, list[Node]] = {}
        self._named_inside: dict[int, bool] = {}
        self._named: dict[str, int] = {}  # bytes of the shortest text of each named part
        self._needs: dict[int, int] = {}
        self._bounds: dict[tuple[int, int], int] = {}
        self._farthest: dict[tuple[int, int], int] = {}
        final, self._end = _List(None, None, 0), _List(None, None, 0)
        final.edges, self._end.edges = [], [(END, END, final)]
        self._sets = [frozenset[_List](), frozenset({final})]  # the states BROKEN and ENDED
        self._distances = [UNREACHABLE, 0]
        self._numbers = {found: number for number, found in enumerate(self._sets)}
        self._rows: Ints = np.zeros((64, END + 1), dtype=np.int32)
        self._known = np.zeros(64, dtype=np.bool_)
        self._known[:2] = True
        self._nodes = _inner_first(node)
        self._find_needs(self._nodes)
        for inner in self._nodes:  # so that no recursion over the tree is deep
            self._has_names(inner)
        first = self._push((node,), self._end)
        self.start = BROKEN if first.need >= UNREACHABLE else self._number(frozenset({first}))

    @property
    def size(self) -> int:
        """The number of states so far."""
        return len(self._sets)

    def distances_to_end(self, first: int) -> Ints:
        """Return the bytes to a complete text from each state but the first ones; UNREACHABLE from BROKEN."""
        return np.array(self._distances[first:], dtype=np.int32)

    def symbols(self) -> set[int]:
        """Return the bytes that occur in accepted texts."""
        spans = {
            span
            for node in self._nodes
            if isinstance(node, Chars)
            for encoded in _byte_ranges(node.ranges)
            for span in encoded
        }
        return {symbol for low, high in spans for symbol in range(low, high + 1)}

    def step(self, states: Ints, symbols: Ints) -> Ints:
        """Return the state that each symbol leads to from each state."""
        if len(unknown := states[~self._known[states]]):
            for state in np.unique(unknown).tolist():
                self._expand(state)
        return self._rows[states, symbols]

    def after(self, state: int, text: bytes) -> int:
        """Return the state after some bytes."""
        for symbol in text:
            if not self._known[state]:
                self._expand(state)
            state = int(self._rows[state, symbol])
        return state

    def accepts(self, text: str) -> bool:
        """Return whether a text is in the language, in time linear in its length."""
        state = np.array([self.after(self.start, text.encode())], dtype=np.int32)
        return bool(self.step(state, np.array([END], dtype=np.int32)) == ENDED)

    # -- shortest texts -----------------------------------------------------------------------------------------------

    def _find_needs(self, nodes: list[Node]) -> None:
        """Compute the lengths of shortest texts; they shrink from round to round where parts contain themselves."""
        for _ in range(MAX_ROUNDS):
            before = dict(self._named)
            self._needs.clear()
            for node in nodes:
                if isinstance(node, Ref):
                    self._named[node.name] = self._need(node.target)
                self._need(node)
            if self._named == before:
                break

    def _need(self, node: _Part) -> int:
        """Return the bytes of the shortest text of a node."""
        found = self._needs.get(id(node))
        if found is None:
            found = self._needs[id(node)] = min(UNREACHABLE, self._shortest(node))
        return found

    def _shortest(self, node: _Part) -> int:
        match node:
            case Chars(ranges):
                return min(map(self._length, _byte_ranges(ranges)), default=UNREACHABLE)
            case _Bytes(spans):
                return self._length(spans)
            case Seq(parts):
                return sum(map(self._need, parts))
            case _Rest(parts, begin):
                return sum(map(self._need, parts[begin:]))
            case Alt(parts):
                return min(map(self._need, parts), default=UNREACHABLE)
            case Repeat(part, least, _):
                return least and least * self._need(part)
            case Ref(name):
                return self._named.get(name, UNREACHABLE)

    def _length(self, spans: Ranges) -> int:
        """Return the number of bytes of a character; UNREACHABLE if it cannot be written."""
        known = self._writable
        if known is not None and not all(any(byte in known for byte in range(a, b + 1)) for a, b in spans):
            return UNREACHABLE
        return len(spans)

    # -- the remaining nodes after a byte ------------------------------------------------------------------------------

    def _push(self, nodes: tuple[_Part, ...], tail: _List) -> _List:
        """Return the list of some nodes before another list; equal ones are one."""
        for node in reversed(nodes):
            key = id(node), id(tail)
            if key not in self._lists:
                self._lists[key] = _List(node, tail, min(UNREACHABLE, self._need(node) + tail.need))
            tail = self._lists[key]
        return tail

    def _edges(self, found: _List) -> list[tuple[int, int, _List]]:
        """Return the remaining nodes of a list after a symbol, by ranges of symbols."""
        if found.edges is None:
            found.edges = []
            at: _List | None = found
            while at is not None and at.head is not None:
                assert at.tail is not None
                after = [(low, high, self._push(rest, at.tail)) for low, high, rest in self._first(at.head)]
                found.edges += [edge for edge in after if edge[2].need < UNREACHABLE]
                at = at.tail if self._need(at.head) == 0 else None
            if at is not None:
                found.edges += self._end.edges or []
        return found.edges

    def _first(self, node: _Part) -> list[tuple[int, int, tuple[_Part, ...]]]:
        """Return the first bytes of a node's texts, each range with the nodes that are left after it."""
        if id(node) not in self._firsts:
            self._firsts[id(node)] = list(self._begin(node))
        return self._firsts[id(node)]

    def _begin(self, node: _Part) -> Iterator[tuple[int, int, tuple[_Part, ...]]]:
        match node:
            case Chars(ranges):
                for (low, high), *more in _byte_ranges(ranges):
                    yield low, high, (self._one(_Bytes(tuple(more)), tuple(more)),) if more else ()
            case _Bytes(((low, high), *more)):
                yield low, high, (self._one(_Bytes(tuple(more)), tuple(more)),) if more else ()
            case Seq(parts):
                yield from self._begin(_Rest(parts, 0))
            case _Rest(parts, begin):
                for i in range(begin, len(parts)):
                    after = self._rest(parts, i + 1)
                    for low, high, rest in self._first(parts[i]):
                        yield low, high, rest + after
                    if self._need(parts[i]):
                        return
            case Repeat(part, least, most) if most != 0:
                fewer = max(least - 1, 0), None if most is None else most - 1
                after = (self._one(Repeat(part, *fewer), (id(part), *fewer)),) if fewer[1] != 0 else ()
                for low, high, rest in self._first(part):
                    yield low, high, rest + after
            case Alt() | Ref():
                for leaf in self._leaves(node):
                    yield from self._first(leaf)

    def _leaves(self, node: Alt | Ref) -> list[Node]:
        """Return the alternatives of a node that are neither alternatives nor names themselves."""
        if id(node) not in self._alternatives:
            found, seen, left = list[Node](), set[int](), list[Node]([node])
            while left:
                at = left.pop()
                if isinstance(at, Alt | Ref) and id(at) not in seen:
                    seen.add(id(at))
                    left += reversed(at.parts) if isinstance(at, Alt) else [at.target]
                elif id(at) not in seen:
                    found.append(at)
            self._alternatives[id(node)] = found
        return self._alternatives[id(node)]

    def _rest(self, parts: tuple[Node, ...], begin: int) -> tuple[_Part, ...]:
        if begin >= len(parts) - 1:
            return parts[begin:]
        return (self._one(_Rest(parts, begin), (id(parts), begin)),)

    def _one(self, node: _Part, key: tuple[object, ...]) -> _Part:
        """Return the one node of a key."""
        return self._interned.setdefault((type(node), key), node)

    # -- the farthest from an end -------------------------------------------------------------------------------------

    def farthest(self, state: int, size: int) -> int:
        """Return a bound on the distance to the end after at most `size` bytes more."""
        if (state, size) not in self._farthest:
            try:
                found = max((self._spread(one, size) for one in self._sets[state]), default=0)
            except RecursionError:
                found = UNREACHABLE
            self._farthest[state, size] = found
        return self._farthest[state, size]

    def _spread(self, found: _List, size: int) -> int:
        most, at, read = found.need, found, 0
        while at.head is not None and read < size:
            assert at.tail is not None
            most = max(most, self._worst(at.head, size - read) + at.tail.need)
            read += self._at_least(at.head)
            at = at.tail
        return most

    def _worst(self, node: _Part, size: int) -> int:
        """Return a bound on the bytes that a node needs after at most `size` of its bytes."""
        if not self._has_names(node):
            size = UNREACHABLE  # one bound for all sizes: only nodes with named parts can grow without end
        key = id(node), size
        if key not in self._bounds:
            self._bounds[key] = min(UNREACHABLE, self._bound(node, size)) if self._need(node) < UNREACHABLE else 0
        return self._bounds[key]

    def _has_names(self, node: _Part) -> bool:
        if id(node) not in self._named_inside:
            match node:
                case Seq(parts) | Alt(parts):
                    found = any(map(self._has_names, parts))
                case _Rest(parts, begin):
                    found = any(map(self._has_names, parts[begin:]))
                case Repeat(part):
                    found = self._has_names(part)
                case _:
                    found = isinstance(node, Ref)
            self._named_inside[id(node)] = found
        return self._named_inside[id(node)]

    def _bound(self, node: _Part, size: int) -> int:
        match node:
            case Chars(ranges):  # the rest of a character may be longer than the shortest one
                return max(self._need(node), *(len(spans) - 1 for spans in _byte_ranges(ranges)))
            case Seq(parts) | _Rest(parts):
                begin, read, most = getattr(node, "begin", 0), 0, self._need(node)
                left = most
                for part in parts[begin:]:
                    if read >= size:
                        break
                    left -= self._need(part)
                    most = max(most, self._worst(part, size - read) + left)
                    read += self._at_least(part)
                return most
            case Repeat(part, least, most) if most != 0:
                return self._worst(part, size) + max(least - 1, 0) * self._need(part)
            case Alt() | Ref():
                return max([self._worst(leaf, size) for leaf in self._leaves(node)], default=0)
        return self._need(node)

    def _at_least(self, node: _Part) -> int:
        """Return the bytes that any text of a node has, or fewer."""
        return self._need(node) if self._writable is None else min(1, self._need(node))

    # -- states -------------------------------------------------------------------------------------------------------

    def _number(self, found: frozenset[_List]) -> int:
        if found not in self._numbers:
            if len(found) > MAX_LISTS:
                self._numbers[found] = BROKEN
                return BROKEN
            self._numbers[found] = self.size
            self._sets.append(found)
            self._distances.append(min(one.need for one in found))
            if self.size > len(self._rows):
                self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
                self._known = np.concatenate((self._known, np.zeros_like(self._known)))
        return self._numbers[found]

    def _expand(self, state: int) -> None:
        edges = [edge for one in self._sets[state] for edge in self._edges(one)]
        cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
        place = {cut: n for n, cut in enumerate(cuts)}
        targets: list[set[_List]] = [set() for _ in cuts]  # between this cut and the next
        for low, high, to in edges:
            for n in range(place[low], place[high + 1]):
                targets[n].add(to)
        for n, found in enumerate(targets):
            if found:
                number = self._number(frozenset(found))  # first: it may reallocate the table
                self._rows[state, cuts[n] : cuts[n + 1]] = number
        self._known[state] = True


def _inner_first(node: Node) -> list[Node]:
    """Return the nodes of a tree, each after those in it, as far as parts do not contain themselves."""
    found, seen, left = list[Node](), set[int](), [(node, False)]
    while left:
        at, done = left.pop()
        if done:
            found.append(at)
        elif id(at) not in seen:
            seen.add(id(at))
            left.append((at, True))
            match at:
                case Seq(parts) | Alt(parts):
                    left += [(part, False) for part in parts]
                case Repeat(part):
                    left.append((part, False))
                case Ref():
                    left.append((at.target, False))
    return found


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
