"""Templates of chats, compiled and rendered by Jinja in a sandbox with bounded work and output. Imports no torch.

The dialect is that of `transformers`: `trim_blocks`, `lstrip_blocks`, `break`, `continue`, `{% generation %}` blocks,
`raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML. A template comes with a model and is not
trusted: loops and macro calls count against `MAX_STEPS`, and no text that it builds is longer than `MAX_LENGTH`.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Sized
from contextvars import ContextVar
from datetime import datetime
from itertools import count
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 50_000  # iterations of loops and calls of macros in one rendering
MAX_LENGTH = 4_000_000  # characters of the result, and of any text or list that `+`, `*`, `~` or a block makes
MAX_WORK = 100_000_000  # product of the sizes that a filter or a method of a text reads
MAX_BITS = 4096  # of an integer
NUMBER = re.compile(r"\d+")  # in a format string: the width of a field, or its precision

_steps: ContextVar[Iterable[int]] = ContextVar("steps")


def compile_template(text: str) -> Template:
    """Compile a template; raises `jinja2.TemplateError`, `RecursionError` or `OverflowError` where it is wrong."""
    return _environment().from_string(text)


def render(template: Template, variables: dict[str, Any]) -> str:
    """Return the text of a template. Raise `SecurityError` where it does more than the limits allow."""
    token = _steps.set(count(1))
    try:
        return template.render(variables)
    finally:
        _steps.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits on work and on the length of texts."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Limited().visit(super()._parse(source, name, filename))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a template or of a block in it."""
        found, length = [], 0
        for part in parts:
            found.append(part)
            if (length := length + len(part)) > MAX_LENGTH:
                raise SecurityError(f"its text is longer than {MAX_LENGTH:,} characters")
        return "".join(found)

    def join(self, *parts: Any) -> str:  # `a ~ b`
        return self.concat(map(str, parts))

    def tick(self) -> str:
        if next(iter(_steps.get())) > MAX_STEPS:
            raise SecurityError(f"its loops and macros take more than {MAX_STEPS:,} steps")
        return ""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            large = len(left) + len(right) > MAX_LENGTH
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            large = left.bit_length() * right > MAX_BITS
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            large = left.bit_length() + right.bit_length() > MAX_BITS
        else:
            large = operator == "*" and _size(left) * _size(right) > MAX_LENGTH
        if large:
            raise SecurityError(f"`{operator}` makes a value that is too large")
        if operator == "%" and isinstance(left, str):
            _check_work([left, *(right if isinstance(right, tuple) else [right])], left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_work([text, *args, *kwargs.values()], text if "format" in method.__name__ else "")
        return super().call(__context, __obj, *args, **kwargs)


class _Limited(NodeTransformer):
    """Count a step in the body of each loop and macro, and join texts by `_Environment.join`."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        if isinstance(node, nodes.Concat):
            return nodes.Call(nodes.EnvironmentAttribute("join"), node.nodes, [], None, None).set_lineno(node.lineno)
        return node


class _Generation(Extension):
    """`{% generation %}`: the part of a template that a model writes. It is rendered like the rest."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own type

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


@functools.cache
def _environment() -> _Environment:
    found = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    found.filters["tojson"] = _to_json
    found.filters = {name: _with_limit(function) for name, function in found.filters.items()}
    del found.globals["lipsum"]  # text of any length
    found.globals["raise_exception"] = _raise
    found.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return found


def _with_limit(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        format = str(args[0]) if args and function.__name__ == "do_format" else ""
        _check_work([*args, *kwargs.values()], format)
        return function(*args, **kwargs)

    return limited


def _check_work(values: list[Any], format: str = "") -> None:
    widths = NUMBER.findall(format)
    wide = any(len(width) > 4 for width in widths) or sum(map(int, widths)) > MAX_LENGTH
    if wide or math.prod(map(_size, values)) > MAX_WORK:
        raise SecurityError("a filter or a method of a text makes a value that is too large")


def _size(value: Any) -> int:
    if isinstance(value, Context):  # the first argument of filters such as `map`; it has no length
        return 1
    if isinstance(value, Sized):
        return max(1, len(value))
    return max(1, abs(value)) if isinstance(value, int) else 1


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateRefusal(message)


class TemplateRefusal(TemplateError):
    """An error that a template raises about a conversation."""
