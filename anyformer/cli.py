"""The command line: one thin function per verb. Importing it, and most verbs, import no torch.

Exit codes: 0 done; 1 failed at run time; 2 wrong input, one line per fault on stderr; 3 interrupted.
"""

import inspect
import io as streams
import json
import os
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from anyformer import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anyformer.config.model import ModelConfig
    from anyformer.config.spec import Spec


class Verbs(TyperGroup):
    """The verbs, with wrong input and interruption told in plain lines rather than as tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(3) from None
        except ValueError as error:
            from anyformer.config.spec import ConfigError  # here: `anyformer --help` imports no pydantic

            if not isinstance(error, ConfigError):
                raise
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Any Transformer is one config away.

A model is a preset or a .toml or .json file, changed by key=value:

\b
  anyformer presets                                the well-known models
  anyformer count gpt2 depth=24 width=1024         what one costs, resized
  anyformer config show llama > my.toml            a file to start from
  anyformer count my.toml decoder.position=alibi   with one part changed
""",
    epilog="Exit codes: 0 done, 1 failed at run time, 2 wrong input, 3 interrupted.",
)
config_app = typer.Typer(no_args_is_help=True, help="Show, check and compare the configs of models.")
app.add_typer(config_app, name="config")
tokenizer_app = typer.Typer(no_args_is_help=True, help="Train tokenizers, and look at what they make of a text.")
app.add_typer(tokenizer_app, name="tokenizer")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, streams.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to fail
    app(prog_name="anyformer")


def _complete(incomplete: str) -> list[str]:
    from anyformer.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(metavar="PRESET|FILE", help="A preset, or a .toml or .json file.", autocompletion=_complete),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes, from left to right. An argument of the preset (depth, width, heads, vocab, ...) resizes the "
        "whole model; any other key is a path in the config: decoder.depth=4, decoder.blocks.*.placement=post, "
        "decoder.position=rotary, 'decoder.position={kind=\"rotary\", theta=5e5}'; none undoes an optional value.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anyformer {__version__}")
        raise typer.Exit


@app.callback()
def anyformer(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def presets() -> None:
    """List the well-known models: name, parameters, shape, what it is."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from anyformer.inspection.count import count
    from anyformer.presets import PRESETS

    table = Table("name", box=None, pad_edge=False)
    table.add_column("parameters", justify="right")
    table.add_column("shape")
    table.add_column("what it is")
    for name, preset in PRESETS.items():
        config = preset()
        about = (inspect.getdoc(preset) or "").partition("\n")[0].replace("`", "")
        table.add_row(name, f"{count(config).parameters:,}", config.shape, escape(about))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@app.command("count")
def count_(
    model: Model,
    changes: Changes = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens in a row (the target's, in an encoder-decoder); if not given, 1024 or the longest."
        ),
    ] = None,
    source_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a row of the source; the same if not given.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    as_json: Json = False,
) -> None:
    """Count parameters, FLOPs, activation and cache memory, part by part."""
    from anyformer.inspection.count import count

    table = count(read_model(model, changes), length, batch=batch, source_length=source_length)
    typer.echo(json.dumps(table.to_dict()) if as_json else str(table))


@app.command("doctor")
def doctor_(as_json: Json = False) -> None:
    """Look at this machine: what it has, and what anyformer would therefore choose."""
    from anyformer.doctor import doctor

    report = doctor()
    typer.echo(json.dumps(report.to_dict()) if as_json else report.render())


Folder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


@app.command("recipes")
def recipes_() -> None:
    """List the recipes that come with anyformer."""
    from importlib import resources

    from anyformer.recipes import names

    for name in names():
        first = (resources.files("anyformer.recipes") / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0]
        typer.echo(f"{name:<16} {first.removeprefix('# ')}")


@app.command("train")
def train_(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe's name, or a .toml or .json file.")
    ] = "sort",
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes of the recipe: train.steps=200, model.decoder.depth=4."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/RECIPE if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
) -> None:
    """Train a model by a recipe; interrupted, it saves and goes on with --resume to the same numbers."""
    from anyformer.training.loop import Diverged, Interrupted
    from anyformer.training.train import train

    try:
        run = train(recipe, out, changes or (), resume=resume)
    except Interrupted as told:
        typer.echo(str(told), err=True)
        raise typer.Exit(3) from None
    except Diverged as told:
        typer.echo(str(told), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"trained: {run.folder}")


@app.command("evaluate")
def evaluate_(
    run: Folder,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes of the run's recipe: data.root=DIR.")
    ] = None,
    split: Annotated[Literal["test", "valid", "train"], typer.Option(help="Which data of the recipe.")] = "test",
    as_json: Json = False,
) -> None:
    """Measure how well a run does on the data of its recipe; with --json the last line is one JSON object."""
    from anyformer.training.train import evaluate

    found = evaluate(run, changes or (), split)
    if as_json:
        whole = {"task": found.task, "n": found.count, "metrics": found.values, "notes": found.notes}
        typer.echo(json.dumps(whole, ensure_ascii=False))
        return
    for name, value in found.values.items():
        typer.echo(f"{name:<16} {value:.6g}")
    for name, note in found.notes.items():
        typer.echo(f"{name}: {note}")


@app.command("predict")
def predict_(
    run: Folder,
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Texts, one a line; - reads standard input.")] = "-",
    out: Annotated[Path | None, typer.Option(help="Where the answers go, one a line; else to standard output.")] = None,
) -> None:
    """Answer each line of a file: translations, or texts that go on."""
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.run import load

    if file != "-" and not Path(file).is_file():
        raise ConfigError([Fault(file, "is not a file")])
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([Fault(file, f"is not UTF-8 at byte {error.start}")]) from None
    lines = text.removesuffix("\n").split("\n") if text else []
    said = "".join(f"{answer}\n" for answer in load(run).predict(lines))
    if out is None:
        typer.echo(said, nl=False)
    else:
        out.write_text(said, encoding="utf-8")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a config, by which editors complete and check files."""
    from anyformer.config import io
    from anyformer.config.model import ModelConfig

    typer.echo(json.dumps(io.schema(ModelConfig), indent=2, ensure_ascii=False))


@config_app.command("show")
def config_show(
    model: Model,
    changes: Changes = None,
    format: Annotated[Literal["toml", "json"], typer.Option(help="How to write it.")] = "toml",
) -> None:
    """Print the whole config of a model; save it as a file to start from."""
    from anyformer.config import io

    typer.echo(io.dumps(read_model(model, changes), format), nl=False)


@config_app.command("check")
def config_check(files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=".toml or .json files.")]) -> None:
    """Check files, and tell everything that is wrong in them at once."""
    from anyformer.config import io
    from anyformer.config.model import ModelConfig
    from anyformer.config.spec import ConfigError, Fault

    found: list[Fault] = []
    for file in files:
        try:
            io.load(ModelConfig, file)
            typer.echo(f"{file}: right")
        except ConfigError as error:
            found += error.faults
    if found:
        raise ConfigError(found)


@config_app.command("diff")
def config_diff(left: Model, right: Model) -> None:
    """Tell where two models differ, a line per place: the path, left -> right."""
    from anyformer.config import io

    found = io.diff(read_model(left), read_model(right))
    typer.echo("\n".join(map(str, found)) or "no difference")


@tokenizer_app.command("train")
def tokenizer_train(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Plain text, or such text as .gz.")],
    out: Annotated[Path, typer.Option(help="The folder for tokenizer.json.")],
    kind: Annotated[
        Literal["chars", "bytes", "words", "bpe", "unigram", "wordpiece"], typer.Option(help="What a token is.")
    ] = "bpe",
    size: Annotated[int | None, typer.Option(min=1, help="How many tokens at most; not for chars and bytes.")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Read capitals as small letters.")] = False,
    encoding: Annotated[str, typer.Option(help="Of the files: utf-8, latin-1, cp949, ...")] = "utf-8",
) -> None:
    """Train a tokenizer on the lines of text files."""
    from rich.console import Console

    from anyformer import recipe
    from anyformer.config.spec import ConfigError, Fault, kinds, members
    from anyformer.data.lines import read_lines
    from anyformer.data.tokenizer import file_of, train_tokenizer

    if os.path.exists(path := file_of(out)) or os.path.isfile(out):
        raise ConfigError([Fault(str(path), "is there already; choose another --out")])
    given = {"size": size, "lowercase": lowercase or None}
    spec = kinds(members(recipe.Tokenizer))[kind](**{key: value for key, value in given.items() if value is not None})
    example = ""

    def lines() -> "Iterator[str]":
        nonlocal example
        for line in read_lines(files, encoding, Console(stderr=True)):
            example = example or line.strip()
            yield line

    tokenizer = train_tokenizer(spec, lines())
    tokenizer.save(path)
    typer.echo(f"{path}: {tokenizer.size:,} tokens")
    ids = tokenizer.encode(example)[:20]
    typer.echo(f"tokens: {' '.join(map(tokenizer.token, ids))}\n   ids: {' '.join(map(str, ids))}")


@tokenizer_app.command("show")
def tokenizer_show(
    tokenizer: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A tokenizer.json, or a folder with one.")],
    text: Annotated[str, typer.Argument(help="What to take apart.")],
) -> None:
    """Print the ids and tokens of a text, a line each; ▁ is a space, <0xE2> a part of a character."""
    from anyformer.data.tokenizer import TextTokenizer

    found = TextTokenizer.load(tokenizer)
    for i in found.encode(text):
        typer.echo(f"{i:>{len(str(found.size))}}  {found.token(i)}")


# -- models by name -------------------------------------------------------------------------------------------------


def read_model(name: str, changes: list[str] | None = None) -> "ModelConfig":
    """The config that a preset's name or a file stands for, with some changes."""
    from anyformer.config import io
    from anyformer.config.model import ModelConfig
    from anyformer.config.spec import ConfigError, Fault, close_to
    from anyformer.presets import PRESETS

    changes = changes or []
    if preset := PRESETS.get(name):
        arguments = _arguments(preset)
        elsewhere = ModelConfig.model_fields.keys() - arguments.model_fields.keys()
        keys = [text.partition("=")[0].strip() for text in changes]
        paths = [text for text, key in zip(changes, keys, strict=True) if "." in key or key in elsewhere]
        given = io.override(arguments(), [text for text in changes if text not in paths])
        return io.override(preset(**{key: value for key, value in given if value is not None}), paths)
    path = Path(name)
    if path.suffix.lower() not in io.SUFFIXES and not os.path.exists(path):
        close = close_to(name, PRESETS)
        hint = f"did you mean '{close}'?" if close else f"presets: {', '.join(PRESETS)}; a file ends in .toml or .json"
        raise ConfigError([Fault("", f"'{name}' is neither a preset nor a file; {hint}")])
    return io.override(io.load(ModelConfig, path), changes)


def _arguments(preset: "Callable[..., ModelConfig]") -> "type[Spec]":
    """A preset's arguments as a spec, so that they are checked and explained like any config."""
    from pydantic import create_model

    from anyformer.config.spec import Number, Size, Spec

    strict = {int: Size, int | None: Size | None, float: Number, float | None: Number | None}
    hints = typing.get_type_hints(preset, include_extras=True)
    fields = {name: (strict.get(hints[name], hints[name]), None) for name in inspect.signature(preset).parameters}
    return create_model("Arguments", __base__=Spec, **fields)  # type: ignore[call-overload]
