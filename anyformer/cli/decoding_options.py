"""The options of all verbs that let a run write: how tokens are chosen, what answers must be, on what machine."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from anyformer.run import Run

SAMPLING, BEAM, CONTRAST = "Drawing tokens", "Beam search", "Contrastive search"
PENALTIES, LIMITS = "What is less likely", "What answers must be"
SPECULATION, MACHINE = "Guessing ahead", "On this machine"


def _declared(
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens that are added at most; if not given, as the task has it.")
    ] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="Tokens before which no answer ends.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help=r"End before this string; may be given again. In bash, $'\n' is a newline.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Of a mixture of tasks: which one.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0, as if not given: always the likeliest token; 1: as likely as it is.", rich_help_panel=SAMPLING
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from the k likeliest tokens only.", rich_help_panel=SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the likeliest tokens that have this probability together.", rich_help_panel=SAMPLING
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Draw from tokens at least this much as likely as the likeliest.", rich_help_panel=SAMPLING),
    ] = None,
    typical_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the tokens of usual surprise that have this probability together.", rich_help_panel=SAMPLING
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same number draws the same text.", rich_help_panel=SAMPLING)
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1: tokens that were there already are less likely.", rich_help_panel=PENALTIES),
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Off the logits of tokens in the answer.", rich_help_panel=PENALTIES)
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, as often as they are there.", rich_help_panel=PENALTIES)
    ] = None,
    no_repeat_ngram: Annotated[
        int | None, typer.Option(help="No sequence of so many tokens comes twice.", rich_help_panel=PENALTIES)
    ] = None,
    beams: Annotated[
        int | None, typer.Option(help="Beginnings of answers that go on side by side.", rich_help_panel=BEAM)
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Above 0 long answers are favoured, below 0 short ones.", rich_help_panel=BEAM)
    ] = None,
    early_stopping: Annotated[
        Literal["first", "heuristic", "never"] | None,
        typer.Option(help="When the search ends that has as many answers as beams.", rich_help_panel=BEAM),
    ] = None,
    groups: Annotated[
        int | None, typer.Option(help="Groups of beams that are to differ.", rich_help_panel=BEAM)
    ] = None,
    diversity_penalty: Annotated[
        float | None, typer.Option(help="How much they are to differ.", rich_help_panel=BEAM)
    ] = None,
    phrases: Annotated[
        list[str] | None, typer.Option(help="A string that must appear; may be given again.", rich_help_panel=BEAM)
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Likeliest tokens that are tried out.", rich_help_panel=CONTRAST)
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="From 0 to 1: how much a repetition counts against one.", rich_help_panel=CONTRAST),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="A pattern that the whole answer matches.", rich_help_panel=LIMITS)
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|JSON", help="A JSON schema that the answer is valid by.", rich_help_panel=LIMITS),
    ] = None,
    choices: Annotated[
        list[str] | None,
        typer.Option(help="An answer that may be given; give all of them, one by one.", rich_help_panel=LIMITS),
    ] = None,
    banned: Annotated[
        list[str] | None,
        typer.Option(help="A string that must not appear; may be given again.", rich_help_panel=LIMITS),
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="How the answer begins.", rich_help_panel=LIMITS)] = None,
    draft: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A smaller run of the same tokenizer guesses.", rich_help_panel=SPECULATION),
    ] = None,
    lookup: Annotated[
        int | None,
        typer.Option(help="What followed the last so many tokens before is the guess.", rich_help_panel=SPECULATION),
    ] = None,
    ahead: Annotated[
        int | None, typer.Option(help="Tokens that are guessed at a time.", rich_help_panel=SPECULATION)
    ] = None,
    bits: Annotated[
        int | None, typer.Option(metavar="8|4", help="Weights of so many bits.", rich_help_panel=MACHINE)
    ] = None,
    cache: Annotated[
        Literal["auto", "static", "int8"] | None,
        typer.Option(help="What is kept of each token: int8 takes least memory.", rich_help_panel=MACHINE),
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile", help="Faster tokens after tens of seconds of compiling.", rich_help_panel=MACHINE),
    ] = None,
) -> None:
    """The options themselves; their names are those of `run.generate`."""


NAMES = tuple(inspect.signature(_declared).parameters)


def decoding(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb with these options after its own, called with those that were given, as `how`."""

    @wraps(verb)
    def command(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in NAMES}
        verb(**arguments, how={name: value for name, value in given.items() if value is not None})

    own = [parameter for name, parameter in inspect.signature(verb).parameters.items() if name != "how"]
    shared = list(inspect.signature(_declared).parameters.values())
    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own + shared]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def prepare(folder: Path, how: dict[str, Any]) -> tuple["Run", dict[str, Any]]:
    """The run, in as many bits as were asked for, and what is left of the options, in Python's terms."""
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.run import load

    how = dict(how)
    bits = how.pop("bits", None)
    if bits not in (None, 8, 4):
        raise ConfigError([Fault("--bits", f"= {bits}: must be 8 or 4")])
    if "json_schema" in how:
        how["json_schema"] = _schema(how["json_schema"])
    run = load(folder)
    if "task" in how:
        run = run.part(how.pop("task"))
    if "draft" in how:
        how["draft"] = load(how["draft"])
    return run if bits is None else run.quantise(bits), how


UNKNOWN = "have parts that are not in the vocabulary, which the model reads as <unk>"


def unknown(run: "Run", texts: list[str]) -> list[int]:
    """Return the numbers, from 1, of the texts that hold unknown tokens."""
    tokenizer = run.task.source_tokenizer or run.task.tokenizer
    if tokenizer.unk is None:
        return []
    from anyformer.tasks.fill_mask import split_at

    special = [i for i in (tokenizer.mask, *tokenizer.sentinels) if i is not None]  # known by their names
    if special:
        texts = ["".join(split_at(tokenizer, text, special)[::2]) for text in texts]
    return [i for i, ids in enumerate(tokenizer.encode_batch(texts), 1) if tokenizer.unk in ids]


def _schema(text: str) -> Any:
    """A schema in JSON, or in a file."""
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
        raise ConfigError([Fault(where, f"is no JSON: {error}")]) from None


@contextmanager
def as_options(text: str) -> Iterator[None]:
    """What is wrong, by the names that it has on the command line, and each fault once; `text` is what a text is."""
    from anyformer.config.spec import ConfigError, Fault

    def option(fault: Fault) -> Fault:
        if fault.path.startswith("text "):
            return Fault(text.format(fault.path.removeprefix("text ")), fault.message)
        name, _, rest = fault.path.partition(".")
        if name not in (*NAMES, "n_best"):
            return fault
        return Fault(f"--{name.replace('_', '-')}", str(Fault(rest, fault.message)) if rest else fault.message)

    try:
        yield
    except ConfigError as error:
        raise ConfigError(dict.fromkeys(map(option, error.faults))) from None
