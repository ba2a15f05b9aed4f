r"""JSON strings, numbers and constants as trees of characters.

One space may follow a comma or a colon; there are no others.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import assert_never

from anyformer.config.spec import ConfigError, Fault
from anyformer.generation.constraints.regex import (
    EMPTY,
    LAST,
    Alt,
    Chars,
    Node,
    Ref,
    Repeat,
    Seq,
    literal,
    optional,
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
        case Ref():
            raise AssertionError("a pattern has no named parts")
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
    return literal(_written(value))


def _written(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError):
        raise ConfigError([Fault("", f"holds {value!r}, which JSON cannot write")]) from None
    return text


def one_of(values: Sequence[object]) -> Node:
    """Return the tree of some values; those that begin alike share the beginning."""
    tables = [value for value in values if isinstance(value, Mapping | list | tuple)]
    texts = sorted({_written(value) for value in values if not isinstance(value, Mapping | list | tuple)})
    return Alt((*map(constant, tables), *([_prefix_tree(texts)] if texts else [])))


def _prefix_tree(texts: Sequence[str]) -> Node:
    """Return the tree of sorted texts."""
    pairs = zip(texts[0], texts[-1], strict=False)
    shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    groups = groupby(texts, key=lambda text: text[len(shared) : len(shared) + 1])
    parts = [_prefix_tree([text[len(shared) :] for text in group]) if first else EMPTY for first, group in groups]
    return Seq((literal(shared), Alt(tuple(parts)))) if len(texts) > 1 else literal(texts[0])


def array(item: Node, least: int = 0, most: int | None = None) -> Node:
    """Return the tree of arrays of some items."""
    if most == 0:
        return literal("[]")
    more = Repeat(Seq((COMMA, item)), max(least - 1, 0), None if most is None else most - 1)
    held: Node = Seq((item, more))
    return Seq((literal("["), held if least else optional(held), literal("]")))


def free_object(value: Node) -> Node:
    """Return the tree of objects with any names and such values."""
    entry = Seq((string(0, None), COLON, value))
    return Seq((literal("{"), optional(Seq((entry, Repeat(Seq((COMMA, entry)))))), literal("}")))


def any_value() -> Node:
    """Return the tree of all JSON."""
    parts: dict[str, Node] = {}
    value = Ref("value", parts)
    constants = tuple(map(literal, ("true", "false", "null")))
    parts["value"] = Alt((string(0, None), NUMBER, *constants, free_object(value), array(value)))
    return value


def _joined(parts: Sequence[Node]) -> list[Node]:
    return [node for part in parts for node in (COMMA, part)][1:]
