"""Overrides of a spec by dotted paths, and differences between two specs. Imports no torch."""

import copy
import tomllib
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, TypeVar, get_origin

from anyformer.config.parse import build, to_data
from anyformer.config.spec import ConfigError, Fault, Spec, alternatives, fields, kinds, member_for, members, visible

S = TypeVar("S", bound=Spec)

DEEPEST = 50  # dots in a path: no spec is half as deep, and Python's own limit is a crash


def override(spec: S, assignments: Iterable[str]) -> S:
    """Return the spec with some values changed, from left to right.

    decoder.depth=4                    a value, as in TOML; other text is a string
    decoder.blocks.0.mixer.heads=8     one element of a list; `*`, or no number, is every element
    decoder.position=rotary            a part by its kind, with that kind's defaults
    decoder.position={kind="rotary", theta=5e5}
    decoder.position.theta=5e5         one field of a part
    decoder.blocks.*.mixer.kv_heads=none    back to the derived value
    """
    data, found = to_data(spec), list[Fault]()
    for text in assignments:
        try:
            path, value = assignment(text)
            found += _assign(type(spec), data, path.split("."), value, "")
        except ConfigError as error:
            found += error.faults
    try:
        changed = build(type(spec), data)
    except ConfigError as error:
        found += error.faults
    if found:
        raise ConfigError(found)
    return changed


def assignment(text: str) -> tuple[str, Any]:
    """Return the path and the value of `key=value`."""
    path, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(path.split(".")):
        what = f"'{visible(text)}' is no assignment: write key=value, such as decoder.depth=4"
        raise ConfigError([Fault("", what)])
    if path.count(".") > DEEPEST:
        raise ConfigError([Fault("", f"'{path[:40]}...' is nested too deeply")])
    if text != visible(text):
        raise ConfigError([Fault("", f"'{visible(text)}' holds bytes that are not UTF-8")])
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError) as error:
        if value[:1] in ("{", "[", '"', "'"):  # meant as TOML
            raise ConfigError([Fault(path, f"= {value}: {error}")]) from None
        return path, value
    return path, parsed["value"] if len(parsed) == 1 else value


def merge(cls: type[Spec], data: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a spec, as `to_data` returns them, with the values in some tables, as in a file.

    Tables are merged key by key; a value or a list replaces the old one. A table of another kind, or a kind as a word,
    replaces the old table. A table in the place of a list of tables changes each of them. "none" is the derived value.
    """
    merged: dict[str, Any] = _merged(cls, data, tables)
    return merged


def _merge(annotation: Any, node: dict[str, Any], tables: dict[str, Any]) -> None:
    """Change a table in place."""
    known = fields(member_for(annotation, node))
    for key, value in tables.items():
        inner, before = known[key].annotation if key in known else None, node.get(key)
        if not isinstance(value, dict):
            _put(annotation, node, key, value)
        elif isinstance(before, list) and all(isinstance(one, dict) for one in before):
            node[key] = [_merged(inner, one, value) for one in before]
        else:
            node[key] = _merged(inner, before, value)


def _merged(annotation: Any, before: Any, value: dict[str, Any]) -> Any:
    """Return one table with the values of another."""
    if not isinstance(before, dict) or value.get("kind", before.get("kind")) != before.get("kind"):
        return copy.deepcopy(value)
    after = copy.deepcopy(before)
    _merge(annotation, after, value)
    return after


def _assign(annotation: Any, node: Any, steps: list[str], value: Any, path: str) -> Iterator[Fault]:
    """Change a table or list in place. Unknown keys are set too: `build` reports them."""
    if isinstance(node, list):
        yield from _assign_in_list(annotation, node, steps, value, path)
        return
    step, rest = steps[0], steps[1:]
    path = f"{path}.{step}" if path else step
    field = fields(member_for(annotation, node)).get(step)
    inner = field.annotation if field else None
    if rest:
        node[step] = _opened(inner, node.get(step))
        yield from _assign_inside(inner, node[step], rest, value, path)
    else:
        _put(annotation, node, step, value)


def _put(annotation: Any, node: dict[str, Any], key: str, value: Any) -> None:
    """Set a value of a table; "none" removes it where None means that it follows from the others."""
    field = fields(member_for(annotation, node)).get(key)
    if key == "kind" and node.get("kind") != value and len(kinds(members(annotation))) > 1:
        node.clear()  # the fields of the old kind have no meaning in the new one
        node["kind"] = value
    elif (
        value == "none"
        and field
        and not field.is_required()
        and field.default is None
        and not _takes_none(field.annotation)
    ):
        node.pop(key, None)
    else:
        node[key] = copy.deepcopy(value)  # `*` puts it in several places


def _assign_in_list(annotation: Any, node: list[Any], steps: list[str], value: Any, path: str) -> Iterator[Fault]:
    if node and all(isinstance(one, dict) and steps[0] in fields(member_for(annotation, one)) for one in node):
        steps = ["*", *steps]  # a field of every element, as in a file
    step, rest = steps[0], steps[1:]
    is_index = step.isascii() and step.isdecimal() and len(step) <= len(str(len(node)))
    chosen = list(range(len(node))) if step == "*" else [int(step)] if is_index else []
    if not chosen or chosen[-1] >= len(node):
        known = f"0 to {len(node) - 1}, or * for all" if len(node) > 1 else "0 or *" if node else "nothing, it is empty"
        yield Fault(path, f"is a list, and has no '{step}'; known here: {known}")
        return
    for i in chosen:
        if rest:
            node[i] = _opened(annotation, node[i])
            yield from _assign_inside(annotation, node[i], rest, value, f"{path}.{i}")
        else:
            node[i] = copy.deepcopy(value)


def _assign_inside(annotation: Any, node: Any, steps: list[str], value: Any, path: str) -> Iterator[Fault]:
    if isinstance(node, (dict, list)):
        yield from _assign(annotation, node, steps, value, path)
    else:
        yield Fault(path, f"= {node!r}: is a value, and has no '{steps[0]}'")


def _opened(annotation: Any, value: Any) -> Any:
    """Return the value at a step of the path: a word becomes a table of that kind, nothing an empty table."""
    if isinstance(value, str) and kinds(members(annotation)):
        return {"kind": value}
    return {} if value is None else value


def _takes_none(annotation: Any) -> bool:
    """Return whether "none" is an ordinary value here: a kind, or one of some words."""
    words = [word for a in alternatives(annotation) if get_origin(a) is Literal for word in a.__args__]
    return "none" in (*kinds(alternatives(annotation)), *words)


# -- differences ----------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """One difference between two specs, with both values as text."""

    path: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"{self.path}: {self.left} -> {self.right}"


ABSENT = "(unset)"  # a field that follows from the others, a part or an element that is not there
WIDEST = 100  # of a value in words


def diff(a: Spec, b: Spec) -> list[Difference]:
    """Return the differences between two specs; parts of different kinds, or a missing part, are one difference."""
    return list(_differences(a, b, ""))


def _differences(a: Any, b: Any, path: str) -> Iterator[Difference]:
    if isinstance(a, Spec) and type(a) is type(b):
        pairs = [(name, getattr(a, name), getattr(b, name)) for name in type(a).model_fields]
    elif isinstance(a, tuple) and isinstance(b, tuple):
        pairs = [(str(i), left, right) for i, (left, right) in enumerate(zip_longest(a, b))]
    else:
        if a != b:
            yield Difference(path, in_words(a), in_words(b))
        return
    for name, left, right in pairs:
        yield from _differences(left, right, f"{path}.{name}" if path else name)


def in_words(value: Any) -> str:
    """Return a value on one line: a part by its kind, with the settings that differ from its defaults."""
    text = _in_words(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _in_words(value: Any) -> str:
    match value:
        case None:
            return ABSENT
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.17g}" if value != float(f"{value:g}") else f"{value:g}"
        case tuple():
            return f"[{', '.join(map(_in_words, value))}]"
        case Spec():
            own = {name: field.get_default(call_default_factory=True) for name, field in fields(type(value)).items()}
            kind = own.pop("kind", "")
            given = [f"{n}={_in_words(getattr(value, n))}" for n, usual in own.items() if getattr(value, n) != usual]
            return f"{kind}({', '.join(given)})" if given or not kind else kind
        case _:
            return str(value)
