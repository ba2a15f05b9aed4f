r"""JSON strings, numbers and constants as trees of characters.

One space may follow a comma or a colon; there are no others.
"""

import json
from collections.abc import Mapping, Sequence
from typing import assert_never

from anyformer.config.spec import ConfigError, Fault
from anyformer.decoding.constraints.regex import (
    EMPTY,
    LAST,
    Alt,
    Chars,
    Node,
    Repeat,
    Seq,
    literal,
    parse,
    parse_anchored,
    without,
)

HEX = "[0-9A-Fa-f]"
PAIR = rf"[Dd][89ABab]{HEX}{{2}}\\u[Dd][C-Fc-f]{HEX}{{2}}"  # a surrogate pair
ESCAPE = parse(rf'\\(["\\/bfnrt]|u([0-9A-CE-Fa-ce-f]{HEX}{{3}}|[Dd][0-7]{HEX}{{2}}|{PAIR}))')
MUST_ESCAPE = ((0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\")))
CHARACTER = Alt((Chars(without(MUST_ESCAPE)), ESCAPE))
ANYTHING = Repeat(Chars(((0, LAST),)))

COMMA, COLON = parse(", ?"), parse(": ?")
INTEGER = parse("0|-?[1-9][0-9]{0,14}")
DIGIT = parse("[0-9]")
NUMBER = parse(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?")


def string(least: int, most: int | None) -> Node:
    """Return the tree of strings with a length in characters; an escape counts as one."""
    return Seq((literal('"'), Repeat(CHARACTER, least, most), literal('"')))


def matching(pattern: str) -> Node:
    """Return the tree of strings that contain a match; ^ and $ at the ends of an alternative anchor it."""
    ways = [
        Seq((EMPTY if begun else ANYTHING, node, EMPTY if ended else ANYTHING))
        for begun, node, ended in parse_anchored(pattern)
    ]
    return Seq((literal('"'), _escaped(Alt(tuple(ways))), literal('"')))


def _escaped(node: Node) -> Node:
    """Return the same texts, escaped as in a JSON string."""
    match node:
        case Chars(ranges):
            plain = Chars(without((*without(ranges), *MUST_ESCAPE)))
            needy = [c for low, high in MUST_ESCAPE for c in range(low, high + 1)]
            inside = [c for c in needy if any(low <= c <= high for low, high in ranges)]
            return Alt((plain, *(literal(json.dumps(chr(c))[1:-1]) for c in inside)))
        case Seq(parts):
            return Seq(tuple(map(_escaped, parts)))
        case Alt(parts):
            return Alt(tuple(map(_escaped, parts)))
        case Repeat(part, least, most):
            return Repeat(_escaped(part), least, most)
        case _:
            assert_never(node)


def integers(low: int, high: int) -> Node:
    """Return the tree of the integers from low to high."""
    negative = [Seq((literal("-"), way)) for way in _between(max(1, -high), -low)]
    return Alt((*negative, *_between(max(0, low), high)))


def _between(low: int, high: int) -> list[Node]:
    """Return the trees of the integers from low ≥ 0 to high, by number of digits."""
    found = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        found.append(_digits(str(low), str(last)))
        low = last + 1
    return found


def _digits(low: str, high: str) -> Node:
    """Return the tree of integers of equal length: after a first digit between the bounds', any digits follow."""
    if not low:
        return EMPTY
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return Seq((literal(low[0]), _digits(low[1:], high[1:])))
    ways: list[Node] = []
    if low[1:] != "0" * rest:
        ways.append(Seq((literal(low[0]), _digits(low[1:], "9" * rest))))
        first += 1
    if high[1:] != "9" * rest:
        ways.append(Seq((literal(high[0]), _digits("0" * rest, high[1:]))))
        last -= 1
    if first <= last:
        ways.append(Seq((Chars(((ord("0") + first, ord("0") + last),)), Repeat(DIGIT, rest, rest))))
    return Alt(tuple(ways))


def constant(value: object) -> Node:
    """Return the tree of one value, with keys in their order."""
    match value:
        case Mapping():
            entries = [Seq((constant(name), COLON, constant(held))) for name, held in value.items()]
            return Seq((literal("{"), *_joined(entries), literal("}")))
        case list() | tuple():
            return Seq((literal("["), *_joined([constant(held) for held in value]), literal("]")))
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError):
        raise ConfigError([Fault("", f"holds {value!r}, which JSON cannot write")]) from None
    return literal(text)


def _joined(parts: Sequence[Node]) -> list[Node]:
    return [node for part in parts for node in (COMMA, part)][1:]
