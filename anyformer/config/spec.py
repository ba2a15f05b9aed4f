"""Base of all specs: frozen, strict, hashable; a wrong value raises a `ConfigError` that says what would be right.

Imports no torch.
"""

import difflib
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

# Limits of an error message, in characters: input of any length gives a message that can be read.
MAX_PATH = 1000
MAX_MESSAGE = 1000
MAX_TEXT = 4000  # of all faults together, if there is more than one
MAX_FAULTS = 50  # explained one by one
MAX_WORD = 64  # a longer word has no suggestion: comparing takes quadratic time
MAX_COMPARED = 2000  # known words that are compared with a misspelt one
MAX_LISTED = 30  # known words in a message


def shorten(text: str, limit: int) -> str:
    """Return the text, or its beginning and end around an ellipsis."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 5]} ... {text[len(text) - end :]}"


class Fault(NamedTuple):
    """One thing that is wrong: where, and what would be right."""

    path: str
    message: str

    def __str__(self) -> str:
        joint = " " if self.message.startswith("=") else ": "
        return f"{self.path}{joint}{self.message}" if self.path else self.message

    def under(self, prefix: str) -> "Fault":
        """Return the fault with its path extended by one outer level."""
        return Fault(".".join(part for part in (prefix, self.path) if part), self.message)

    def shortened(self) -> "Fault":
        """Return the fault with path and message shortened to a bounded length."""
        return Fault(shorten(self.path, MAX_PATH), shorten(self.message, MAX_MESSAGE))


class ConfigError(ValueError):
    """Wrong input: one line per fault, all faults at once, in a text of at most `MAX_TEXT` characters.

    Args:
        faults: the places, each with a message.

    Attributes:
        faults: the same, each with its `path` and `message`.

    Example:
        >>> try:
        ...     af.presets.gpt2(width=65, heads=4)
        ... except af.ConfigError as error:
        ...     print(error.faults[0].path)
        decoder.blocks.0.mixer.heads
    """

    def __init__(self, faults: Iterable[Fault]):
        self.faults = tuple(fault.shortened() for fault in faults)
        lines, length = list[str](), 0
        for line in map(str, self.faults):
            length += len(line) + 1
            if lines and length > MAX_TEXT:
                lines.append(f"... and at least {len(self.faults) - len(lines)} more faults")
                break
            lines.append(line)
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:  # by default it would come to another process as its text
        return type(self), (self.faults,)


@contextmanager
def faults_under(path: str) -> Iterator[None]:
    """Extend the paths of faults that are raised in a block by one outer level."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(fault.under(path) for fault in error.faults) from None


class _Meta(type(BaseModel)):  # type: ignore[misc]
    """Metaclass that raises a `ConfigError` for specs built in Python (nested validation keeps pydantic's errors)."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except ValidationError as error:
            if finds_more(error):
                return cls(*args, **fields)
            raise ConfigError(explain(error, cls)) from None


class Spec(BaseModel, metaclass=_Meta):
    """A frozen piece of config. Subclasses in a union carry a literal `kind`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self, *, update: Any = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed, validated like any other spec."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **(update or {})})

    @classmethod
    def choices(cls) -> "list[type[Spec]]":
        """Return the specs that a field of this type takes: itself, or of a family all its parts (`part.py`)."""
        return [cls]


# Called where a kind is unknown: each brings in parts from elsewhere, and returns whether there are new ones.
FINDERS: list[Callable[[], bool]] = []


def finds_more(error: ValidationError) -> bool:
    """Return whether an unknown kind was named, and there are now parts that were not known before."""
    unknown = any(item["type"] == "union_tag_invalid" for item in error.errors(include_url=False, include_input=False))
    return unknown and any(find() for find in FINDERS)


def by_kind(default: str | None = None) -> tuple[Any, ...]:
    """Return annotations for a union of specs: the kind selects the member, and a bare string means `{kind = "..."}`.
    A table without a kind has the `default` kind, if there is one."""

    extra: dict[str, Any] | None = {"default_kind": default} if default else None
    return Field(discriminator="kind", json_schema_extra=extra), BeforeValidator(lambda value: as_table(value, default))


def as_table(value: Any, default: str | None) -> Any:
    """Return a bare kind as a table, and a table without a kind with the `default` one, if there is one."""
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": default, **value} if default and isinstance(value, dict) and "kind" not in value else value


BY_KIND = by_kind()

LARGEST = 2**63 - 1  # of sizes and counts: what 64 bits hold

Size = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Number = Annotated[float, Field(strict=True)]
Positive = Annotated[float, Field(strict=True, gt=0)]
Fraction = Annotated[float, Field(strict=True, gt=0, le=1)]
Probability = Annotated[float, Field(strict=True, ge=0, lt=1)]
LengthPenalty = Annotated[float, Field(strict=True, ge=-5, le=5)]  # beyond, scores of long outputs overflow in fp32
Flag = Annotated[bool, Field(strict=True)]


# -- errors in the user's words -------------------------------------------------------------------------------------


MIN_LIKENESS = 0.65  # of a misspelt word and the right one, as difflib measures it
MAX_LENGTH_CHANGE = 2  # characters that it has more or fewer


def close_to(word: str, known: Iterable[str]) -> str | None:
    """Return the known word of which this one looks like a misspelling, if any."""
    return next(iter(close_matches(word, sorted(known), 1)), None)


def close_file(path: str | Path, suffixes: Iterable[str] = ("",)) -> str | None:
    """Return the file beside a missing one whose name is most like it, among those with one of the suffixes."""
    path, endings = Path(path), tuple(suffixes)
    try:
        there = [file.name for file in path.parent.iterdir() if file.name.lower().endswith(endings) and file.is_file()]
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return None
    stems = {Path(name).stem: name for name in there}
    close = close_to(path.name, there) or stems.get(close_to(path.stem, stems) or "")
    return None if close is None else visible(str(path.with_name(close)))


def close_matches(word: str, known: Iterable[str], n: int) -> list[str]:
    """The `n` known words that are most like this one; none for a word longer than `MAX_WORD` characters."""
    if len(word) > MAX_WORD:
        return []
    comparable = itertools.islice(
        (other for other in known if abs(len(other) - len(word)) <= MAX_LENGTH_CHANGE), MAX_COMPARED
    )
    return difflib.get_close_matches(word, comparable, n=n, cutoff=MIN_LIKENESS)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion for a misspelt word, else the list of known words."""
    known = sorted(known)
    if close := close_to(word, known):
        return f"did you mean '{close}'?"
    listed = [shorten(name, MAX_WORD) for name in known[:MAX_LISTED]]
    more = [f"and {len(known) - MAX_LISTED} more"] if len(known) > MAX_LISTED else []
    return f"known here: {', '.join(listed + more)}" if known else "nothing is settable here"


def explain(error: ValidationError, spec: type) -> list[Fault]:
    """Pydantic's findings as faults: the dotted path, the value, and what would be right. At most `MAX_FAULTS`."""
    found: list[Fault] = []
    items = [item for item in error.errors(include_url=False) if not _follows_from_others(item)]
    for item in items[:MAX_FAULTS]:
        if rule := rule_of(item):
            found += [fault.under(locate(spec, item["loc"]).path) for fault in rule.faults]
        else:
            fault = _explain_one(item, locate(spec, item["loc"]))
            if found and found[-1].path == fault.path:
                fault = _either(found.pop(), fault)
            found.append(fault)
    if len(items) > MAX_FAULTS:
        found.append(Fault("", f"{len(items) - MAX_FAULTS} more faults"))
    return found


def _either(one: Fault, other: Fault) -> Fault:
    """Return the fault of a value that fits no member of a union: what would be right for either of two members."""
    return Fault(one.path, f"{one.message} or {other.message.rpartition(': must be ')[2]}")


def _follows_from_others(item: Any) -> bool:
    """Return True for a list that pydantic calls too short because its items have faults."""
    return item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]


def rule_of(item: Any) -> ConfigError | None:
    """Return the fault that a validator of ours raised, from one of pydantic's errors."""
    cause = item.get("ctx", {}).get("error")
    return cause if isinstance(cause, ConfigError) else None


def _explain_one(item: Any, place: "ErrorLocation") -> Fault:
    ctx, value, path = item.get("ctx", {}), item.get("input"), place.path
    match item["type"]:
        case "extra_forbidden":
            key = str(place.steps[-1])
            owners = [tag for tag, member in kinds(place.among).items() if key in member.model_fields]
            if owners:
                own = place.parent.model_fields["kind"].default
                return Fault(path, f"unknown key for kind '{own}'; these have it: {', '.join(owners)}")
            return Fault(path, f"unknown key; {did_you_mean(key, fields(place.parent))}")
        case "union_tag_invalid" if isinstance(value, Spec):
            what = f"its kind '{ctx['tag']}' is not registered: call anyformer.register({type(value).__name__})"
            return Fault(path, f"= {_show(value)}: {what}")
        case "union_tag_invalid":
            tags = [tag.strip(" '") for tag in ctx["expected_tags"].split(",")]
            what = f"unknown kind; {did_you_mean(str(ctx['tag']), tags)}"
            among = members(place.field.annotation if place.field else place.parent)
            if not close_to(str(ctx["tag"]), tags) and any(hasattr(member, "is_family") for member in among):
                what += "; or give a file with one of your own by --import FILE"
            return Fault(f"{path}.kind".removeprefix("."), f"= {_show(ctx['tag'])}: {what}")
        case "union_tag_not_found":
            what = "must name its kind: a table with `kind = ...`, or just the kind as a string"
            return Fault(path, f"= {_show(value)}: {what}")
        case _:
            return Fault(path, sentence(item))


def sentence(item: Any) -> str:
    """Return the fault of a value and how to fix it, from one of pydantic's errors."""
    kind, ctx, value = item["type"], item.get("ctx", {}), item.get("input")
    match kind:
        case "missing":
            return "is required"
        case "literal_error":
            known = ctx["expected"].replace(" or ", ", ").replace("'", "").split(", ")
            message = f"must be {ctx['expected']}"
            if isinstance(value, str) and close_to(value, known):
                message += f"; {did_you_mean(value, known)}"
        case "int_type" | "int_from_float" | "int_parsing":
            message = "must be a whole number"
        case "float_type" | "finite_number":
            message = "must be a finite number"
        case "bool_type":
            message = "must be true or false"
        case "greater_than_equal":
            message = f"must be at least {ctx['ge']:g}"
        case "greater_than":
            message = f"must be greater than {ctx['gt']:g}"
        case "less_than":
            message = f"must be less than {ctx['lt']:g}"
        case "less_than_equal":
            message = f"must be at most {ctx['le']:g}"
        case "model_type" | "model_attributes_type" | "dict_type":
            message = "must be a table"
        case "tuple_type":
            message = "must be a list"
        case "string_type":
            message = "must be a string"
        case "too_short":
            message = f"must have at least {ctx['min_length']} item{'s' * (ctx['min_length'] != 1)}"
        case _:
            message = item["msg"][:1].lower() + item["msg"][1:]
    return f"= {_show(value)}: {message}"


def is_file_name(name: object) -> bool:
    """Return whether a value names a file directly in a folder: not a path, nor the folder itself."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and "\0" not in name


def visible(text: str) -> str:
    """Return the text with lone surrogates, which no terminal can print, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = "a number of more than 4,300 digits"
    return text if len(text) <= 60 else text[:57] + "..."


def fields(spec: Any) -> dict[str, FieldInfo]:
    """Return the fields of a spec; none for anything else."""
    return spec.model_fields if isinstance(spec, type) and issubclass(spec, BaseModel) else {}


def alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union or family, with `Annotated` unwrapped and without None."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return alternatives(args[0])
    if origin in (typing.Union, types.UnionType):
        return [member for part in args for member in alternatives(part)]
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return list(annotation.choices())
    return [] if annotation is types.NoneType else [annotation]


def elements(annotation: Any) -> list[Any]:
    """Return the item types of the tuples in an annotation."""
    return [typing.get_args(a)[0] for a in alternatives(annotation) if typing.get_origin(a) is tuple]


def members(annotation: Any) -> list[Any]:
    """Return the alternatives inside an annotation, including those in its tuples."""
    inside = [member for element in elements(annotation) for member in members(element)]
    return [a for a in alternatives(annotation) if typing.get_origin(a) is not tuple] + inside


def kinds(among: Iterable[Any]) -> dict[str, Any]:
    """The specs among some alternatives that carry a kind, by kind; more than one make a union by kind."""
    return {m.model_fields["kind"].default: m for m in among if "kind" in fields(m)}


def member_for(annotation: Any, data: dict[str, Any]) -> Any:
    """Return the spec class of a table: by its kind, or the only one possible; else None."""
    among = members(annotation)
    if len(tags := kinds(among)) > 1:
        return next((member for tag, member in tags.items() if tag == data.get("kind")), None)
    return next(filter(fields, among), None)


class ErrorLocation(NamedTuple):
    """Location of a pydantic error in the user's data: its path, and the spec and field that it concerns."""

    steps: tuple[str | int, ...]  # without pydantic's union tags
    parent: Any  # the spec that has the last key
    among: list[Any]  # the alternatives to that spec, itself included
    field: FieldInfo | None  # of the last key, unless it is unknown

    @property
    def path(self) -> str:
        return ".".join(map(str, self.steps))


def locate(spec: type, loc: tuple[str | int, ...]) -> ErrorLocation:
    """Return the location of an error from pydantic's `loc`, without the tags by which it enters unions."""
    place = ErrorLocation((), spec, [spec], None)
    among = here = members(spec)  # what the current position may be, before and after reading its tag
    for step in loc:
        tags = kinds(here)
        if len(tags) > 1 and step in tags:
            here = [tags[str(step)]]
        elif place.field and not any(map(fields, here)) and not isinstance(step, int):
            continue  # pydantic's name of a member in a union of plain values
        elif isinstance(step, int):
            place = place._replace(steps=(*place.steps, step))
        else:
            parent = next((m for m in here if step in fields(m)), next(filter(fields, here), None))
            place = ErrorLocation((*place.steps, step), parent, among, fields(parent).get(step))
            among = here = members(place.field.annotation) if place.field else []
    return place
