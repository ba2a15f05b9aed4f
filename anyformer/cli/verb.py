"""Verbs from outside: of a file given by --import, or of an installed package. Imports no torch."""

import inspect
from abc import abstractmethod
from typing import Any

import typer

from anyformer.config.part import Part, kind_of


class Verb(Part):
    """A command of the program, by its `kind`. Its docstring is the help."""

    @abstractmethod
    def run(self, *arguments: Any, **options: Any) -> None:
        """Do what the command is for. Typer reads its parameters: `def run(self, file: Path, top: int = 10)`."""


def commands() -> dict[str, Any]:
    """Return the commands of all known verbs from outside."""
    return {kind_of(verb): _command(verb) for verb in Verb.choices()}


def _command(verb: Any) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(kind_of(verb), help=inspect.getdoc(verb))(verb().run)
    return typer.main.get_command(app)
