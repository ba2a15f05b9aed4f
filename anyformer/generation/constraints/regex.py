r"""Regular expressions, parsed into a tree of nodes. The whole answer is matched: there are no anchors.

    literals, . (any character but \n), [a-z가-힣], [^...], (...), (?:...), (?P<name>...), |, * + ? {m} {m,} {,n} {m,n}
    \d \w \s and \D \W \S (of ASCII; letters elsewhere are ranges such as [가-힣]), \n \t \r \f \v \0 \xHH \uHHHH

Lazy quantifiers such as `*?` are equal to greedy ones here. Anchors, lookaround, backreferences and flags are refused.
Otherwise patterns have the meaning of Python's `re` with `re.ASCII`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, TypeVar

from anyformer.config.spec import ConfigError, Fault, visible

LAST = 0x10FFFF  # the last code point
MAX_DEPTH = 100  # of groups within groups
T = TypeVar("T")
Ranges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Chars:
    """One character from inclusive ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Seq:
    parts: tuple["Node", ...]


@dataclass(frozen=True, eq=False)
class Alt:
    parts: tuple["Node", ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    part: "Node"
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, eq=False)
class Ref:
    """A named part of a tree, which may contain itself: `parts` gets it when it is complete."""

    name: str
    parts: "dict[str, Node]"

    @property
    def target(self) -> "Node":
        return self.parts[self.name]


Node: TypeAlias = Chars | Seq | Alt | Repeat | Ref

EMPTY = Seq(())  # only the empty text


def literal(text: str) -> Node:
    """Return the tree of one text."""
    return Seq(tuple(Chars(((ord(c), ord(c)),)) for c in text))


def optional(part: Node) -> Node:
    return Repeat(part, 0, 1)


def without(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the complement of ranges."""
    kept, following = [], 0
    for low, high in sorted(ranges):
        if low > following:
            kept.append((following, low - 1))
        following = max(following, high + 1)
    return (*kept, (following, LAST)) if following <= LAST else tuple(kept)


def _of(text: str) -> Ranges:
    return tuple((ord(c), ord(c)) for c in text)


DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE = _of(" \t\n\r\f\v")
SETS = {"d": DIGIT, "w": WORD, "s": SPACE, "D": without(DIGIT), "W": without(WORD), "S": without(SPACE)}
SIGNS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
HEX = {"x": 2, "u": 4, "U": 8}


def parse(pattern: str) -> Node:
    """Return the tree of a pattern that matches the whole text; a `ConfigError` says where it is wrong."""
    return _parsed(pattern, lambda reader: reader.whole())


def parse_anchored(pattern: str) -> list[tuple[bool, Node, bool]]:
    """Return the alternatives of a pattern that is searched for: whether each begins with ^, its tree, and whether it
    ends with $."""
    return _parsed(pattern, lambda reader: reader.anchored())


def _parsed(pattern: str, read: "Callable[[_PatternReader], T]") -> T:
    try:
        pattern.encode()
        return read(_PatternReader(pattern))
    except UnicodeEncodeError:
        what = "holds half a character (a lone surrogate)"
    raise ConfigError([Fault("", f"the pattern {_short(pattern)}: {what}")])


class _PatternReader:
    """Recursive descent: alternatives of sequences of repeated atoms."""

    def __init__(self, pattern: str):
        self._pattern, self._at, self._depth = pattern, 0, 0

    def whole(self) -> Node:
        node = self._alternatives()
        self._end()
        return node

    def anchored(self) -> list[tuple[bool, Node, bool]]:
        found = [(self._skip("^"), self._sequence(anchored=True), self._skip("$"))]
        while self._skip("|"):
            found.append((self._skip("^"), self._sequence(anchored=True), self._skip("$")))
        self._end()
        return found

    def _end(self) -> None:
        if self._at < len(self._pattern):
            self._wrong("a ) without its (")

    def _alternatives(self) -> Node:
        parts = [self._sequence()]
        while self._skip("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))

    def _sequence(self, anchored: bool = False) -> Node:
        """A sequence of atoms; if `anchored`, up to a $ that is its last character."""
        parts = []
        while self._peek() not in ("", "|", ")"):
            if anchored and self._pattern[self._at : self._at + 2] in ("$", "$|"):
                break
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        match self._peek():
            case "*":
                least, most = 0, None
            case "+":
                least, most = 1, None
            case "?":
                least, most = 0, 1
            case "{":
                least, most = self._counts()
            case _:
                return part
        self._at += 1
        self._skip("?")
        if self._peek() in ("*", "+", "?", "{"):
            self._wrong(f"{self._peek()} repeats a repetition: put that in a group")
        return Repeat(part, least, most)

    def _counts(self) -> tuple[int, int | None]:
        """Parse {m}, {m,}, {,n} or {m,n}, up to the }."""
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : max(end, 0)].partition(",")
        if not set(low + high) <= set("0123456789") or not low + high:
            self._wrong(r"{ must begin {m}, {m,}, {,n} or {m,n}; the character is \{")
        if len(low) > 6 or len(high) > 6:
            self._wrong("a count has at most six digits")
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            self._wrong(f"{{{low},{high}}}: the minimum exceeds the maximum")
        self._at = end
        return least, most

    def _atom(self) -> Node:
        c = self._next()
        match c:
            case "(":
                return self._group()
            case "[":
                return Chars(self._class())
            case ".":
                return Chars(without(_of("\n")))
            case "\\":
                found = self._escape()
                return Chars(found if isinstance(found, tuple) else ((found, found),))
            case "^" | "$":
                self._back(f"{c} is an anchor: the whole answer is matched, so leave it out; the character is \\{c}")
            case "*" | "+" | "?":
                self._back(f"{c} has nothing to repeat; the character is \\{c}")
            case "{":
                self._back(r"{ has nothing to repeat; the character is \{")
        return Chars(((ord(c), ord(c)),))

    def _group(self) -> Node:
        opened = self._at - 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._wrong(f"its groups are nested too deeply: at most {MAX_DEPTH}")
        if self._skip("?"):
            if self._skip("P<"):
                end = self._pattern.find(">", self._at)
                if end < 0 or not self._pattern[self._at : end].isidentifier():
                    self._wrong("(?P<name> needs an identifier")
                self._at = end + 1
            elif not self._skip(":"):
                kind = "lookaround" if self._peek() in ("=", "!", "<") else "backreferences, flags and the like"
                self._wrong(f"(?{self._peek()}: {kind} are not supported; groups are (...), (?:...) and (?P<name>...)")
        node = self._alternatives()
        if not self._skip(")"):
            self._at = opened
            self._wrong("a ( without its )")
        self._depth -= 1
        return node

    def _class(self) -> Ranges:
        opened, negated = self._at - 1, self._skip("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            if not self._peek():
                self._at = opened
                self._wrong("a [ without its ]")
            first = False
            low = self._member()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                high = self._member()
                if isinstance(low, tuple) or isinstance(high, tuple):
                    self._wrong("a range goes from one character to another")
                if high < low:
                    self._wrong("a range must not descend")
                ranges.append((low, high))
            else:
                ranges.extend(low if isinstance(low, tuple) else [(low, low)])
        self._at += 1
        outside = without(ranges)
        return outside if negated else without(outside)

    def _member(self) -> int | Ranges:
        c = self._next()
        return self._escape() if c == "\\" else ord(c)

    def _escape(self) -> int | Ranges:
        """Parse an escape after its backslash: a code point, or a set of them."""
        c = self._next()
        if c in SETS:
            return SETS[c]
        if c in HEX:
            digits = self._pattern[self._at : self._at + HEX[c]]
            if len(digits) < HEX[c] or not set(digits) <= set("0123456789abcdefABCDEF") or int(digits, 16) > LAST:
                self._wrong(f"\\{c} needs {HEX[c]} hexadecimal digits of a character")
            self._at += HEX[c]
            return int(digits, 16)
        if c in SIGNS and not (c == "0" and self._peek().isdigit()):
            return ord(SIGNS[c])
        if not c:
            self._wrong("ends in a backslash; the character is \\\\")
        if c.isascii() and c.isdigit():
            self._back(f"\\{c}: backreferences are not supported")
        if c in "bBAZz":
            self._back(f"\\{c} is an anchor: the whole answer is matched, so leave it out")
        if c.isascii() and c.isalpha():
            self._back(f"\\{c} is not supported; sets are \\d \\w \\s \\D \\W \\S and [...]")
        return ord(c)

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        self._at += 1
        return self._pattern[self._at - 1 : self._at]

    def _skip(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _back(self, what: str) -> NoReturn:
        self._at -= 1
        self._wrong(what)

    def _wrong(self, what: str) -> NoReturn:
        raise ConfigError([Fault("", f"the pattern {_short(self._pattern)}, character {self._at + 1}: {what}")])


def _short(pattern: str) -> str:
    text = visible(pattern)
    return text if len(text) <= 60 else text[:57] + "..."
