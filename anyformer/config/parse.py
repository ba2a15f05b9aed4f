"""Convert plain data to a spec and back, reporting all faults of the data at once. Imports no torch.

Pydantic checks the rules between parts only on data whose single values are all valid. So that one misspelt word does
not hide other faults, wrong values are replaced by valid ones in many ways. The fault of a rule is reported only if it
remains whatever the replacement: otherwise it is a consequence of the wrong value.
"""

import copy
import itertools
import math
import random
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from anyformer.config.spec import (
    ConfigError,
    ErrorLocation,
    Fault,
    Spec,
    alternatives,
    close_matches,
    elements,
    explain,
    fields,
    finds_more,
    kinds,
    locate,
    rule_of,
)

S = TypeVar("S", bound=Spec)
Mend = Callable[[Any, Any], None]  # changes a container at a key

TRIES = 256  # mended copies looked at: about 0.1 s
MAX_NODES = 100_000  # values in all of these copies together: of a large file, fewer copies are looked at
MAX_WRONG = 20  # wrong values, past which the rules between parts are not looked at
MAX_SIZES = 64  # sizes in the data that are tried in the place of a wrong one


def to_data(spec: Spec) -> dict[str, Any]:
    """Return plain tables, lists and values, as in JSON. None means "derived from other fields" and is omitted."""
    return spec.model_dump(mode="json", exclude_none=True)


def build(cls: type[S], data: Any) -> S:
    """Return the spec of some data, of a family the part that they name. Raise a `ConfigError` with all its faults."""
    try:
        if cls.choices() != [cls]:
            family: Any = Annotated[cls, "a family"]
            part: S = TypeAdapter(family).validate_python(data)
            return part
        return cls.model_validate(data)
    except ValidationError as error:
        if finds_more(error):
            return build(cls, data)
        try:
            found = [*explain(error, cls), *_standing(cls, data, error)]
        except RecursionError:
            found = [Fault("", "nested too deeply")]
        raise ConfigError(dict.fromkeys(found)) from None


def _standing(cls: type[Spec], data: Any, error: ValidationError) -> list[Fault]:
    """Return the faults between parts that remain however the wrong values are replaced."""
    standing: list[Fault] | None = None
    if error.error_count() > MAX_WRONG:
        return []
    for mended in _mended(cls, data, error):
        try:
            cls.model_validate(mended)
            return []
        except ValidationError as rest:
            if not all(map(rule_of, rest.errors())):
                continue  # not mended: the rules did not run
            found = explain(rest, cls)
        standing = found if standing is None else [fault for fault in standing if fault in found]
        if not standing:
            return []
    return standing or []


def _mended(cls: type[Spec], data: Any, error: ValidationError) -> Iterator[Any]:
    """Yield copies of the data with every wrong value dropped or replaced: all combinations, or a sample of them."""
    sizes = sorted({1, *_sizes(data)})[:MAX_SIZES]
    sizes = [*sizes, math.lcm(*sizes)]  # a multiple of every size
    tries = min(TRIES, MAX_NODES // _nodes(data))
    wrong: list[tuple[ErrorLocation, list[Mend]]] = []
    for item in error.errors():
        if not rule_of(item):
            place = locate(cls, item["loc"])
            wrong.append((place, list(_mends(place, item, sizes))))
    ways = [mends for _, mends in wrong]
    rng = random.Random(0)  # the same report every time
    choices = (
        itertools.product(*ways)
        if math.prod(map(len, ways)) <= tries
        else ([rng.choice(mends) for mends in ways] for _ in range(tries))
    )
    for choice in choices:
        mended = copy.deepcopy(data)
        for (place, _), mend in zip(wrong, choice, strict=True):
            _apply(mended, place.steps, mend)
        yield mended


def _apply(data: Any, steps: tuple[str | int, ...], mend: Mend) -> None:
    for step, following in itertools.zip_longest(steps, steps[1:]):
        if not isinstance(data, (dict, list)):
            return  # pydantic's path leads where the data does not: left as it is, it fails again
        if following is None:
            mend(data, step)
        elif isinstance(data, dict):
            if isinstance(following, int) and not isinstance(data.get(step), list):
                data[step] = [data.get(step)]  # one block in place of a list of blocks
            data = data.get(step)
        else:
            data = data[step] if isinstance(step, int) else None


def _mends(place: ErrorLocation, item: Any, sizes: list[int]) -> Iterator[Mend]:
    key, value = (place.steps or ("",))[-1], item.get("input")
    if not isinstance(key, int):
        yield _drop
    if item["type"] == "extra_forbidden":
        for meant in close_matches(str(key), fields(place.parent), 3):
            for stand_in in (value, *_stand_ins(fields(place.parent)[meant].annotation, sizes)):
                yield _rename(meant, stand_in)
    elif place.field:
        inside = elements(place.field.annotation) if isinstance(key, int) else [place.field.annotation]
        if item["type"] == "union_tag_invalid" and isinstance(value, dict):
            tags = kinds(member for annotation in inside for member in alternatives(annotation))
            for meant in close_matches(str(item["ctx"]["tag"]), tags, 3):
                yield _put({**value, "kind": meant})
        for annotation in inside:
            yield from map(_put, _stand_ins(annotation, sizes))


def _drop(container: Any, key: Any) -> None:
    if isinstance(container, dict):
        container.pop(key, None)


def _put(value: Any) -> Mend:
    def mend(container: Any, key: Any) -> None:
        if not isinstance(container, list) or key < len(container):
            container[key] = copy.deepcopy(value)

    return mend


def _rename(meant: str, value: Any) -> Mend:
    def mend(container: Any, key: Any) -> None:
        if not isinstance(container, dict):
            return
        container.pop(key, None)
        container.setdefault(meant, copy.deepcopy(value))  # an existing value takes precedence

    return mend


def _nodes(data: Any) -> int:
    """Return the number of values in the data, including those of tables and lists."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return 1 + sum(map(_nodes, inner))


def _sizes(data: Any) -> Iterator[int]:
    """Yield every positive integer in the data: candidates for a size that must agree with another."""
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list):
        yield from itertools.chain.from_iterable(map(_sizes, data))
    elif type(data) is int and data > 0:
        yield data


def _stand_ins(annotation: Any, sizes: list[int]) -> list[Any]:
    """Return values that the annotation allows: each of `sizes` for a size, every kind for a union."""
    found: list[Any] = []
    for member in alternatives(annotation):
        if typing.get_origin(member) is tuple:
            found += [[value] for element in elements(member) for value in _stand_ins(element, sizes)]
        elif typing.get_origin(member) is Literal:
            found += typing.get_args(member)
        elif fields(member):
            found += _tables(member, sizes)
        elif member in _SIMPLE:
            found += _SIMPLE[member]
        elif member is int:
            found += sizes
    return found


_SIMPLE: dict[Any, tuple[Any, ...]] = {bool: (False, True), float: (0.5, 1.0), str: ("x",)}


def _tables(spec: Any, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Yield minimal tables of a spec, and those with one optional field more."""
    required = {name: field.annotation for name, field in fields(spec).items() if field.is_required()}
    optional = {name: field.annotation for name, field in fields(spec).items() if field.default is None}
    tag = {"kind": fields(spec)["kind"].default} if "kind" in fields(spec) else {}
    for size in sizes if required else sizes[:1]:
        table = {**tag, **{name: _first(annotation, size) for name, annotation in required.items()}}
        yield table
        for name, annotation in optional.items():
            yield {**table, name: _first(annotation, size)}


def _first(annotation: Any, size: int) -> Any:
    return next(iter(_stand_ins(annotation, [size])), None)
