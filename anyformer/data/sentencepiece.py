"""SentencePiece models (Kudo & Richardson 2018): parse a .model file and segment text, without the library.

The pieces are those of the reference implementation, version 0.2.2: normalisation by longest match, Viterbi search in
single precision, merges by score and position. The `tokenizers` library differs in all three on rare texts (combining
marks, repeated characters). Imports only the standard library.

A file is a protocol buffer. Field 1 of a model is a piece (1 text, 2 score, 3 type), 2 the training settings
(3 algorithm, 24 space as suffix, 35 byte fallback), 3 the normaliser (2 character map, 3 dummy prefix, 4 collapse
spaces, 5 escape spaces).
"""

import heapq
import math
import re
import struct
from array import array
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
UNIGRAM, BPE = 1, 2
SPACE = "▁"
BYTE_PIECES = tuple(f"<0x{i:02X}>" for i in range(256))
UNKNOWN_PENALTY = 10.0  # an unknown character scores this much less than the worst piece
USER_BONUS = array("f", [0.1])[0]  # score of a user-defined piece for each byte after the first: it nearly always wins

Value = int | float | bytes


class Piece(NamedTuple):
    text: str
    score: float
    type: int


class CharacterMap:
    """Longest-match replacement table: a double-array trie over UTF-8 (Yata et al. 2007), then the replacements."""

    def __init__(self, blob: bytes):
        size = struct.unpack_from("<I", blob)[0] if len(blob) >= 4 else -1
        if not 4 <= size <= len(blob) - 4 or size % 4:
            raise ValueError("its character map is cut short")
        self._units = struct.unpack_from(f"<{size // 4}I", blob, 4)
        self._values = blob[4 + size :]
        self._inert: dict[str, bool] = {}

    def inert(self, c: str) -> bool:
        """Return whether no key begins with this character."""
        if c not in self._inert:
            self._inert[c] = not list(self._steps(c, 0))
        return self._inert[c]

    def longest(self, text: str, at: int) -> tuple[str, int] | None:
        """Return the replacement of the longest key at a position and the end of that key."""
        found = None
        for i, node in enumerate(self._steps(text, at), at + 1):
            if node is not None:
                found = self._value(node), i
        return found

    def _steps(self, text: str, at: int) -> Iterator[int | None]:
        """Walk the trie; yield after each character the replacement's offset, or None where no key ends."""
        units = self._units
        node = _offset(units[0])
        for i in range(at, len(text)):
            unit = 0
            for byte in text[i].encode():
                node ^= byte
                if node >= len(units) or (unit := units[node]) & 0x800000FF != byte:
                    return
                node ^= _offset(unit)
            if unit >> 8 & 1 and node >= len(units):
                raise ValueError("the character map is damaged")
            yield units[node] & 0x7FFFFFFF if unit >> 8 & 1 else None

    def _value(self, start: int) -> str:
        end = self._values.find(b"\0", start)
        if not 0 <= start <= len(self._values) or end < 0:
            raise ValueError("the character map is damaged")
        return self._values[start:end].decode()


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


class SentencePieces:
    """A parsed model: `pieces(text)` is what the reference implementation returns, unknown runs as their text."""

    def __init__(self, data: bytes):
        """Parse a .model file; raises ValueError where it is damaged or of another kind."""
        try:
            top = list(_fields(data))
            self.table = [_piece(part) for number, part in top if number == 1 and isinstance(part, bytes)]
            training, rules = (
                dict(_fields(b"".join(p for n, p in top if n == i and isinstance(p, bytes)))) for i in (2, 3)
            )
        except (ValueError, IndexError, struct.error):
            raise ValueError("is no SentencePiece model, or damaged") from None
        if not self.table:
            raise ValueError("is no SentencePiece model: it has no pieces")
        algorithm = training.get(3, UNIGRAM)
        if algorithm not in (UNIGRAM, BPE):
            raise ValueError(f"is of the algorithm {algorithm!r}: only unigram (1) and BPE (2) are read")
        if training.get(24, 0) or not rules.get(5, 1):
            raise ValueError("marks spaces in another way than by ▁ before a word")
        self.unigram, self.byte_fallback = algorithm == UNIGRAM, bool(training.get(35, 0))
        self.dummy_prefix, self.collapse = bool(rules.get(3, 1)), bool(rules.get(4, 1))  # absent fields are true
        blob = rules.get(2, b"")
        self.charsmap = blob if isinstance(blob, bytes) else b""
        self._map = CharacterMap(self.charsmap) if self.charsmap else None
        self._check()

    def _check(self) -> None:
        texts = [piece.text for piece in self.table if piece.type in (NORMAL, USER, UNUSED)]
        if len(set(texts)) < len(texts) or "" in texts:
            raise ValueError("is damaged: a piece is empty or there twice")
        if sum(piece.type == UNKNOWN for piece in self.table) != 1:
            raise ValueError("is damaged: it must have one unknown piece")
        if self.byte_fallback and not set(BYTE_PIECES) <= {p.text for p in self.table if p.type == BYTE}:
            raise ValueError("is damaged: it falls back to bytes, and some have no piece")

    @property
    def unknown(self) -> int:
        """The index of the unknown piece."""
        return next(i for i, piece in enumerate(self.table) if piece.type == UNKNOWN)

    def pieces(self, text: str, dummy_prefix: bool | None = None) -> list[str]:
        """Segment a text. `dummy_prefix` overrides whether a space is added before it."""
        text = self.normalise(text, self.dummy_prefix if dummy_prefix is None else dummy_prefix)
        found: list[str] = []
        joined = False  # the last piece is an unknown run
        for piece, known in self._viterbi(text) if self.unigram else self._merge(text):
            if known:
                found.append(piece)
            elif self.byte_fallback:
                found += [BYTE_PIECES[byte] for byte in piece.encode()]
            elif joined:
                found[-1] += piece
            else:
                found.append(piece)
            joined = not known
        return found

    # -- normalisation ------------------------------------------------------------------------------------------------

    @cached_property
    def _user(self) -> re.Pattern[str] | None:
        """Match the longest user-defined piece."""
        texts = sorted((piece.text for piece in self.table if piece.type == USER), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def normalise(self, text: str, dummy_prefix: bool) -> str:
        """Return the text that is segmented: characters mapped, spaces collapsed and written as ▁."""
        parts = self._mapped(text)
        if self.collapse:
            parts = _collapsed(parts)
        prefix = SPACE if dummy_prefix and parts else ""
        found = prefix + "".join(parts).replace(" ", SPACE)
        return found.rstrip(SPACE) if self.collapse else found

    def _mapped(self, text: str) -> list[str]:
        """Replace by longest match; user-defined pieces stay as they are. One element for each match or character."""
        user, table = self._user, self._map
        if user is None and (table is None or all(map(table.inert, set(text)))):
            return list(text)
        found: list[str] = []
        at = 0
        while at < len(text):
            if user is not None and (match := user.match(text, at)):
                found.append(match.group())
                at = match.end()
            elif table is not None and not table.inert(text[at]) and (replaced := table.longest(text, at)):
                value, at = replaced
                found.append(value)
            else:
                found.append(text[at])
                at += 1
        return found

    # -- segmentation -------------------------------------------------------------------------------------------------

    @cached_property
    def _scores(self) -> dict[str, float | None]:
        """The score of each piece that a text can become; None for a string that only begins one."""
        found: dict[str, float | None] = {}
        for piece in self.table:
            if piece.type in (NORMAL, USER):
                found[piece.text] = piece.score
                if piece.type == USER and self.unigram:
                    found[piece.text] = array("f", [(len(piece.text.encode()) - 1) * USER_BONUS])[0]
        if self.unigram:
            for text in list(found):
                for end in range(1, len(text)):
                    found.setdefault(text[:end])
        return found

    @cached_property
    def _unused(self) -> dict[str, float]:
        return {piece.text: piece.score for piece in self.table if piece.type == UNUSED}

    @cached_property
    def _unknown_score(self) -> float:
        lowest = min((piece.score for piece in self.table if piece.type == NORMAL), default=0.0)
        return array("f", [lowest - UNKNOWN_PENALTY])[0]

    def _viterbi(self, text: str) -> list[tuple[str, bool]]:
        """Find the segmentation with the highest total score, in single precision from left to right."""
        scores, unknown, size = self._scores, self._unknown_score, len(text)
        best = array("f", bytes(4 * (size + 2)))  # of the segmentations that end here; rounds on assignment
        starts, known = [-1] * (size + 1), [True] * (size + 1)
        for start in range(size):
            before, single = best[start], False
            for end in range(start + 1, size + 1):
                score = scores.get(text[start:end], math.inf)
                if score == math.inf:
                    break
                if score is None:
                    continue
                best[-1] = score + before
                if starts[end] < 0 or best[-1] > best[end]:
                    best[end], starts[end], known[end] = best[-1], start, True
                single = single or end == start + 1
            end = start + 1
            best[-1] = unknown + before
            if not single and (starts[end] < 0 or best[-1] > best[end]):
                best[end], starts[end], known[end] = best[-1], start, False
        found, end = [], size
        while end > 0:
            found.append((text[starts[end] : end], known[end]))
            end = starts[end]
        return found[::-1]

    def _merge(self, text: str) -> list[tuple[str, bool]]:
        """Merge neighbours by falling score of the merged piece, the leftmost first (Sennrich et al. 2016)."""
        scores, unused = self._scores, self._unused
        symbols, frozen = self._symbols(text)
        before, after = list(range(-1, len(symbols) - 1)), [*range(1, len(symbols)), -1]
        queue: list[tuple[float, int, int, int]] = []
        parts: dict[str, tuple[str, str]] = {}  # of unused pieces

        def add(left: int, right: int) -> None:
            if left < 0 or right < 0 or frozen[left] or frozen[right]:
                return
            merged = symbols[left] + symbols[right]
            score = scores.get(merged, unused.get(merged))
            if score is not None:
                heapq.heappush(queue, (-score, left, right, len(merged)))
                if merged in unused:
                    parts[merged] = symbols[left], symbols[right]

        for left, right in pairwise(range(len(symbols))):
            add(left, right)
        while queue:
            _, left, right, size = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size:
                continue  # merged with another neighbour by now
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            add(before[left], left)
            add(left, after[left])

        def split(piece: str) -> Iterator[tuple[str, bool]]:
            if piece in parts:
                for part in parts[piece]:
                    yield from split(part)
            else:
                yield piece, piece in scores

        return [found for symbol in symbols if symbol for found in split(symbol)]

    def _symbols(self, text: str) -> tuple[list[str], list[bool]]:
        """Split into characters and user-defined pieces; the latter are never merged."""
        if self._user is None:
            return list(text), [False] * len(text)
        symbols, frozen, at = [], [], 0
        while at < len(text):
            match = self._user.match(text, at)
            symbols.append(match.group() if match else text[at])
            frozen.append(match is not None)
            at += len(symbols[-1])
        return symbols, frozen


def _collapsed(parts: list[str]) -> list[str]:
    """Drop leading spaces, and spaces that follow a space."""
    first = next((i for i, part in enumerate(parts) if part != " "), len(parts))
    found, spaced = [], True
    for part in parts[first:]:
        part = part.lstrip(" ") if spaced else part
        if part:
            found.append(part)
            spaced = part.endswith(" ")
    return found


# -- protocol buffers -------------------------------------------------------------------------------------------------


def _piece(data: bytes) -> Piece:
    found = dict(_fields(data))
    text, score, type = found.get(1, b""), found.get(2, 0.0), found.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(score, float) or not isinstance(type, int):
        raise ValueError("a piece of other fields")
    return Piece(text.decode(), score, type)


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value: Value
        match key & 7:
            case 0:
                value, at = _varint(data, at)
            case 1:
                (value,), at = struct.unpack_from("<d", data, at), at + 8
            case 2:
                size, at = _varint(data, at)
                if at + size > len(data):
                    raise ValueError("cut short")
                value, at = data[at : at + size], at + size
            case 5:
                (value,), at = struct.unpack_from("<f", data, at), at + 4
            case _:
                raise ValueError("no protocol buffer")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number without an end")
