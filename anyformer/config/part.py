"""Parts: specs that describe themselves, in families that anyone may add to. Imports no torch.

A family is a class without a default `kind`, such as `Norm`; every part of it has its methods. A field whose type is a
family takes any part of it, ours or yours, by its `kind`. Parts of the package are known when their class is defined;
your own are made known by `register`.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from anyformer.config.spec import Spec, alternatives, as_table

PACKAGE = __name__.partition(".")[0]
_PARTS: "list[type[Part]]" = []  # all known ones, in the order of their definition


class Part(Spec):
    """Base of families and parts."""

    kind: str
    default_kind: ClassVar[str | None] = None  # of a family: the kind of a table without one

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        own_kind = "kind" in cls.__annotations__ and not cls.is_family()
        if own_kind and cls.__module__.partition(".")[0] == PACKAGE:
            _PARTS.append(cls)

    @classmethod
    def is_family(cls) -> bool:
        """Return whether the class has no default `kind`: fields of this type take any of its parts."""
        return cls.model_fields["kind"].is_required()

    @classmethod
    def none(cls) -> Self:
        """Return the part "none" of a family, which does nothing."""
        return next(part() for part in cls.choices() if kind_of(part) == "none")

    @property
    def is_none(self) -> bool:
        """True for the part "none" of a family."""
        return self.kind == "none"

    @classmethod
    def choices(cls) -> list[type[Any]]:
        return [part for part in _PARTS if cls in part.__mro__] if cls.is_family() else [cls]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if not cls.is_family() or not (parts := cls.choices()):
            return handler(source)
        return _chosen_by_kind(parts, cls.default_kind, handler)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        if cls.default_kind and cls.is_family():
            found["default_kind"] = cls.default_kind
        return found


def _chosen_by_kind(specs: Iterable[type[Spec]], default: str | None, handler: GetCoreSchemaHandler) -> CoreSchema:
    by_kind: dict[Any, CoreSchema] = {kind_of(spec): handler.generate_schema(spec) for spec in specs}
    chosen = core_schema.tagged_union_schema(by_kind, discriminator="kind")
    return core_schema.no_info_before_validator_function(lambda value: as_table(value, default), chosen)


class _ByKindOfFamily:
    """Annotation of a union of families and specs: the kind selects a part or a spec."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _chosen_by_kind(alternatives(source), None, handler)


BY_KIND_OF_FAMILY = _ByKindOfFamily()


def all_parts() -> list[type[Part]]:
    """Return all parts that are known."""
    return list(_PARTS)


def kind_of(part: type[Spec]) -> str:
    """Return the word that selects a part."""
    return str(part.model_fields["kind"].default)


def families(part: type[Part]) -> list[type[Part]]:
    """Return the families that a part belongs to, the narrowest first."""
    return [cls for cls in part.__mro__ if issubclass(cls, Part) and cls is not Part and cls.is_family()]


def register(*parts: type[Part]) -> None:
    """Make parts of your own known, so that configs name them by their `kind`.

    A part is a subclass of a family (`anyformer.config.Norm`, for example) that has a literal `kind` and its family's
    methods. Registering a class again, after a change in a notebook, replaces it.

    Args:
        parts: classes.

    Raises:
        ValueError: a class is incomplete, belongs to no family, or has the kind of another part.

    Example:
        >>> from typing import Literal
        >>> from anyformer.config import Activation
        >>> class Cube(Activation):
        ...     kind: Literal["cube"] = "cube"
        ...     def function(self):
        ...         return lambda x: x**3
        >>> af.register(Cube)  # doctest: +SKIP
    """
    for part in parts:
        _check(part)
    for part in parts:
        _PARTS[:] = [known for known in _PARTS if _name(known) != _name(part)] + [part]
    for spec in _containing({family for part in parts for family in families(part)}):
        spec.model_rebuild(force=True)


def _check(part: Any) -> None:
    """Raise a `ValueError` for an incomplete part, or one with the kind of another one."""
    if not isinstance(part, type) or not issubclass(part, Part):
        raise ValueError(f"{part!r} is no part: a part is a subclass of a family such as anyformer.config.Norm")
    name = part.__name__
    if part.is_family():
        raise ValueError(
            f'{name} has no kind: give it one, such as `kind: Literal["{name.lower()}"] = "{name.lower()}"`'
        )
    if not (own := families(part)):
        raise ValueError(f"{name} belongs to no family: derive it from one, such as anyformer.config.Norm")
    if missing := sorted(getattr(part, "__abstractmethods__", ())):
        raise ValueError(f"{name} lacks {', '.join(missing)}: every {own[-1].__name__} has these methods")
    for known in own[-1].choices():
        if kind_of(known) == kind_of(part) and _name(known) != _name(part):
            raise ValueError(f"{name} has the kind '{kind_of(part)}', which {_name(known)} has already: choose another")


def _name(part: type[Spec]) -> str:
    """Return the full name of a class, by which one that was defined again replaces it."""
    return f"{part.__module__}.{part.__qualname__}"


def _containing(changed: set[type[Part]]) -> list[type[Spec]]:
    """Return all specs with a part of the changed families inside, each after those inside it."""
    found: dict[type[Spec], bool] = {}

    def visit(spec: type[Spec]) -> bool:
        """Return whether a spec, or a field of it, is or holds a changed family."""
        if spec in found:
            return found[spec]
        found[spec] = False  # a part that holds its own family
        specs = {member for field in spec.model_fields.values() for member in _specs(field.annotation)}
        reached = [visit(choice) for member in specs for choice in {member, *member.choices()}]
        holds = any(reached) or any(member in changed for member in specs)
        del found[spec]
        found[spec] = holds  # after those inside it
        return holds

    for spec in _subclasses(Spec):
        visit(spec)
    return [spec for spec, holds in found.items() if holds and not (issubclass(spec, Part) and spec.is_family())]


def _subclasses(cls: type[Spec]) -> Iterator[type[Spec]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _specs(annotation: Any) -> Iterator[type[Spec]]:
    """Yield the specs in the type of a field."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        yield annotation
    for inner in get_args(annotation):
        yield from _specs(inner)
