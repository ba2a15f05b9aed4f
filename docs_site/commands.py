"""Reference page of the command line, from the commands themselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from anyformer.cli import app
from docs_site.text import NOTE, docstring, plain, table

INTRO = """Every command of `anyformer` with its arguments and options. `anyformer COMMAND --help` prints the same in a
terminal. Wrong input ends with exit code 2 and a message that says what is wrong and how to fix it."""
TYPES = {str: "string", Path: "path", int: "integer", float: "number", bool: "flag"}


def pages() -> dict[str, str]:
    """Return the page by its file name."""
    parts = [NOTE, "# Command line\n", INTRO + "\n"]
    for name, command in walk(typer.main.get_command(app), "anyformer"):
        parts += [f"## {name}\n", docstring(command.help.replace("\b", "")) + "\n"]
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option"]
        if not getattr(command, "commands", None):
            usage = [name, *(_usage(one) for one in arguments), *["[OPTIONS]"] * bool(options)]
            parts.append(f"```text\n{' '.join(usage)}\n```\n")
        if arguments or options:
            head = ["argument or option", "type", "default", "meaning"]
            parts.append(table(head, [_row(one) for one in (*arguments, *options)]) + "\n")
    return {"cli.md": "\n".join(parts)}


def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a command and all commands inside it, with their full names."""
    yield name, command
    for inner, part in getattr(command, "commands", {}).items():
        yield from walk(part, f"{name} {inner}")


def _usage(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper() + " ..." * (argument.nargs == -1)
    return name if argument.required else f"[{name}]"


def _row(one: Any) -> list[str]:
    if one.param_type_name == "argument":
        words = (one.metavar or one.name).upper().split("|")
        name = ", ".join(f"`{word}`" for word in words) + " (any number)" * (one.nargs == -1)
    else:
        name = ", ".join(f"`{opt}`" for opt in one.opts) + (" (repeatable)" if one.multiple else "")
    default = one.default
    shown = (
        "*required*" if one.required else "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    )
    return [name, _type(one), shown, plain(" ".join((one.help or "").split()))]


def _type(one: Any) -> str:
    if getattr(one, "is_flag", False):
        return "flag"
    annotation = one.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    inner = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    limits = [f"≥ {one.min}"] * (one.min is not None) + [f"≤ {one.max}"] * (one.max is not None)
    return " ".join([TYPES[inner], ", ".join(limits)]).strip()
