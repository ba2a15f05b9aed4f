"""Decoding options shared by all verbs that generate: strategy, constraints on answers, cache and precision."""

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
    from anyformer.transforms.rounding import Bits

SAMPLING, BEAM, CONTRAST = "Sampling", "Beam search", "Contrastive search"
PENALTIES, LIMITS = "Penalties", "Constraints on answers"
SPECULATION, MACHINE = "Speculative decoding", "Memory and speed"


def _declared(
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of new tokens; the default depends on the task.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens of prompt and answer; the default is the length of the training."),
    ] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="Minimum number of new tokens.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help=r"Stop before this string; may be repeated. In bash, $'\n' is a newline.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Name of the task, for a run trained on a mixture.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature. 0 is greedy, 1 samples the model's own distribution. Default: that of an "
            "imported run's generation_config.json, else 0.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k most probable tokens.", rich_help_panel=SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Nucleus sampling: sample from the most probable tokens whose probabilities sum to p.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from tokens at least p times as probable as the most probable one.", rich_help_panel=SAMPLING
        ),
    ] = None,
    typical_p: Annotated[
        float | None,
        typer.Option(
            help="Typical sampling: tokens with surprisal nearest to the entropy, of total probability p.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed; the same seed samples the same text.", rich_help_panel=SAMPLING)
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1 it makes tokens of the prompt and the answer less probable.", rich_help_panel=PENALTIES
        ),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(help="Subtracted from the logit of every generated token.", rich_help_panel=PENALTIES),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            help="Subtracted from the logit of a generated token once per occurrence.", rich_help_panel=PENALTIES
        ),
    ] = None,
    no_repeat_ngram: Annotated[
        int | None, typer.Option(help="Length of n-grams that may not occur twice.", rich_help_panel=PENALTIES)
    ] = None,
    beams: Annotated[int | None, typer.Option(help="Number of beams.", rich_help_panel=BEAM)] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Exponent of the length in scores; above 0 favours long answers, below 0 short ones.",
            rich_help_panel=BEAM,
        ),
    ] = None,
    early_stopping: Annotated[
        Literal["first", "heuristic", "never"] | None,
        typer.Option(
            help="When to stop once there are `beams` finished hypotheses: first, heuristic or never.",
            rich_help_panel=BEAM,
        ),
    ] = None,
    groups: Annotated[
        int | None, typer.Option(help="Diverse beam search: number of groups.", rich_help_panel=BEAM)
    ] = None,
    diversity_penalty: Annotated[
        float | None,
        typer.Option(
            help="Subtracted from a token's score for each beam of an earlier group that chose it.",
            rich_help_panel=BEAM,
        ),
    ] = None,
    phrases: Annotated[
        list[str] | None, typer.Option(help="A string that must occur; may be repeated.", rich_help_panel=BEAM)
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Number of top tokens to compare.", rich_help_panel=CONTRAST)
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Weight of the repetition penalty, 0 (greedy) to 1.", rich_help_panel=CONTRAST),
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
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="A smaller run with the same tokenizer, as draft model.", rich_help_panel=SPECULATION
        ),
    ] = None,
    lookup: Annotated[
        int | None,
        typer.Option(
            help="Prompt-lookup decoding: n-gram length. Drafts are copied from its last occurrence.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    self_draft: Annotated[
        bool | None,
        typer.Option(
            "--self-draft",
            help="Draft by the model's own layers for further tokens (model.head.multi_token).",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    ahead: Annotated[
        int | None, typer.Option(help="Number of draft tokens at a time.", rich_help_panel=SPECULATION)
    ] = None,
    bits: Annotated[
        int | None, typer.Option(metavar="8|4", help="Quantise weights to this many bits.", rich_help_panel=MACHINE)
    ] = None,
    cache: Annotated[
        Literal["auto", "static", "int8"] | None,
        typer.Option(help="Kind of KV cache; int8 takes least memory.", rich_help_panel=MACHINE),
    ] = None,
    compile: Annotated[
        bool | None,
        typer.Option("--compile", help="Compile decode steps: faster, after tens of seconds.", rich_help_panel=MACHINE),
    ] = None,
) -> None:
    """Declare the options; their names are those of `run.generate`."""


NAMES = tuple(inspect.signature(_declared).parameters)


def decoding(verb: Callable[..., None]) -> Callable[..., None]:
    """Add these options to a verb, which receives those given as the dict `how`."""

    @wraps(verb)
    def command(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in NAMES}
        verb(**arguments, how={name: value for name, value in given.items() if value is not None})

    own = [parameter for name, parameter in inspect.signature(verb).parameters.items() if name != "how"]
    shared = list(inspect.signature(_declared).parameters.values())
    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own + shared]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def parse(how: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a command as those of `run.generate`, and `bits`, `task` and `draft`."""
    return {**how, "json_schema": _schema(how["json_schema"])} if "json_schema" in how else how


def prepare(folder: Path, how: dict[str, Any]) -> tuple["Run", dict[str, Any]]:
    """Load the run as the options say, and return it with the options of `run.generate`."""
    from anyformer.batch.predictor import open_run

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
    from anyformer.run import unfinished

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
