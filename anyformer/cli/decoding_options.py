"""Decoding options shared by all verbs that generate: strategy, constraints on answers, cache and precision.

Those of strategies and filters come from the table of `decoding.strategy`, when a verb needs them: those of a file
given by `--import` are among them, and `anyformer --help` imports none.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from anyformer.nn.transforms.rounding import Bits
    from anyformer.runs.run import Run

SAMPLING, BEAM, PENALTIES = "Sampling", "Beam search", "Penalties and bans"
LIMITS, MACHINE = "Constraints on answers", "Memory and speed"


def _of_a_call(
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of new tokens; the default depends on the task.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens of prompt and answer; the default is the length of the training."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help=r"Stop before this string; may be repeated. In bash, $'\n' is a newline.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Name of the task, for a run trained on a mixture.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed; the same seed samples the same text.", rich_help_panel=SAMPLING)
    ] = None,
    phrases: Annotated[
        list[str] | None, typer.Option(help="A string that must occur; may be repeated.", rich_help_panel=BEAM)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="A regular expression that matches the whole answer.", rich_help_panel=LIMITS)
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|JSON", help="A JSON schema for the answer.", rich_help_panel=LIMITS),
    ] = None,
    choices: Annotated[
        list[str] | None,
        typer.Option(help="A permitted answer; repeat the option for each.", rich_help_panel=LIMITS),
    ] = None,
    banned: Annotated[
        list[str] | None,
        typer.Option(help="A string that must not occur; may be repeated.", rich_help_panel=LIMITS),
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Text that the answer begins with.", rich_help_panel=LIMITS)
    ] = None,
    bits: Annotated[
        int | None, typer.Option(metavar="8|4", help="Quantise weights to this many bits.", rich_help_panel=MACHINE)
    ] = None,
    cache: Annotated[
        Literal["auto", "static", "int8", "none"] | None,
        typer.Option(
            help="Kind of KV cache; int8 takes least memory, none reads the whole text with each token.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile", help="Compile decode steps: faster, after tens of seconds.", rich_help_panel=MACHINE),
    ] = None,
) -> None:
    """Declare the options that belong to a call, whatever the strategy; their names are those of `run.generate`."""


def _parameters() -> list[inspect.Parameter]:
    """Return all options of decoding."""
    from anyformer.config.outside import find
    from anyformer.config.spec import alternatives
    from anyformer.generation.strategy import Sampling, options

    find()  # those of installed packages
    made = list(inspect.signature(_of_a_call).parameters.values())
    for name, option in options().items():
        if name == "n_best" or (option.filter and option.filter.in_ids):
            continue  # an option of some verbs alone; constraints in place of ids
        panel = PENALTIES if option.filter and option.owner is not Sampling else option.owner.title.capitalize()
        kind = Path if name == "draft" else alternatives(option.type)[0]
        flag = [f"--{name.replace('_', '-')}"] if kind is bool else []
        text = option.help.rstrip(".")
        shown = typer.Option(*flag, help=f"{text[:1].upper()}{text[1:]}.", rich_help_panel=panel)
        made.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, shown]
            )
        )
    return made


def _made() -> list[Any]:
    """Return the options of decoding as a command has them."""

    def declared() -> None: ...

    declared.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
    program = typer.Typer(add_completion=False)
    program.command()(declared)
    return typer.main.get_command(program).params


class DecodingCommand(TyperCommand):
    """Command with the options of decoding beside its own; those given are the context's `obj`."""

    shared: list[Any] | None = None

    @property
    def params(self) -> list[Any]:
        if self.shared is None:
            self.shared = _made()
            self._params += self.shared
        return self._params

    @params.setter
    def params(self, own: list[Any]) -> None:
        self._params = own

    def invoke(self, ctx: Any) -> Any:
        shared = {one.name: ctx.params.pop(one.name) for one in self.shared or ()}
        given = {name: value for name, value in shared.items() if value not in (None, ())}
        ctx.obj = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        return super().invoke(ctx)


def decoding(verb: Callable[..., None]) -> Callable[..., None]:
    """Make a verb, whose command is a `DecodingCommand`, receive the options of decoding as the dict `how`."""

    @wraps(verb)
    def command(context: typer.Context, **arguments: Any) -> None:
        verb(**arguments, how=context.obj)

    own = [parameter for name, parameter in inspect.signature(verb).parameters.items() if name != "how"]
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]
    return command


def parse(how: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a command as those of `run.generate`, and `bits`, `task` and `draft`."""
    return {**how, "json_schema": _schema(how["json_schema"])} if "json_schema" in how else how


def prepare(folder: Path, how: dict[str, Any]) -> tuple["Run", dict[str, Any]]:
    """Load the run as the options say, and return it with the options of `run.generate`."""
    from anyformer.generation.batch.predictor import open_run

    run, how = open_run(folder, parse(how))
    note_unfinished(run, folder)
    return run, how


def checked_bits(bits: int | None) -> "Bits | None":
    """Return `--bits` of a verb that evaluates."""
    match bits:
        case None | 8 | 4:
            return bits
        case _:
            from anyformer.config.spec import ConfigError, Fault

            raise ConfigError([Fault("--bits", f"= {bits}: must be 8 or 4")])


def note_unfinished(run: "Run", folder: Path) -> None:
    """Print a line about a run whose training has not finished."""
    from anyformer.runs.run import unfinished

    if note := unfinished(run, folder):
        typer.echo(f"{folder}: {note}", err=True)


def limit_note(limit: int, instead: str) -> str:
    """Return why an answer was cut off after `limit` tokens; `instead` is what helps where positions ran out."""
    from anyformer.tasks.answer_budgets import PositionLimit, TrainedLimit

    match limit:
        case PositionLimit():
            why = f"the model has no further positions; {instead}"
        case TrainedLimit():
            why = f"the model was trained for no longer texts; {instead}, or --context allows more"
        case _:
            why = "--max-new-tokens sets it"
    return f"stopped at the limit of {limit:,} tokens: {why}"


UNKNOWN = "have parts that are not in the vocabulary, which the model reads as <unk>"


def _schema(text: str) -> Any:
    """Parse a schema given as JSON or as a file."""
    from anyformer.config.spec import ConfigError, Fault

    where = "--json-schema"
    if not text.lstrip().startswith("{"):
        where = text
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError([Fault(where, f"cannot be read: {error.strerror}")]) from None
        except UnicodeDecodeError as error:
            raise ConfigError([Fault(where, f"is not UTF-8 at byte {error.start}")]) from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError([Fault(where, f"is not JSON: {error}")]) from None


@contextmanager
def as_options(text: str) -> Iterator[None]:
    """Rename faults to command-line options and drop duplicates; `text` is the name of an input text."""
    from anyformer.config.spec import ConfigError, Fault

    known = {"n_best", *(parameter.name for parameter in _parameters())}

    def option(fault: Fault) -> Fault:
        if fault.path.startswith("text "):
            return Fault(text.format(fault.path.removeprefix("text ")), fault.message)
        name, _, rest = fault.path.partition(".")
        if name not in known:
            return fault
        return Fault(f"--{name.replace('_', '-')}", str(Fault(rest, fault.message)) if rest else fault.message)

    try:
        yield
    except ConfigError as error:
        raise ConfigError(dict.fromkeys(map(option, error.faults))) from None
