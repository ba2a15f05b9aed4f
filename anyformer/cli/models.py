"""`presets`, `count`, `doctor` and `config`."""

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from anyformer.cli.app import Json, app
from anyformer.cli.resolve import complete

config_app = typer.Typer(no_args_is_help=True, help="Show, check and compare the configs of models and recipes.")
app.add_typer(config_app, name="config")

Named = Annotated[
    str,
    typer.Argument(
        metavar="PRESET|RECIPE|RUN|FILE",
        help="A preset, a recipe, the folder of a run, or a .toml or .json file.",
        autocompletion=complete,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes, from left to right. An argument of the preset (depth, width, heads, vocab, ...) resizes the "
        "whole model; any other key is a path in the config: decoder.depth=4, 'decoder.blocks.*.placement=post', "
        "decoder.position=rotary, 'decoder.position={kind=\"rotary\", theta=5e5}'; none undoes an optional value. "
        "In a recipe paths begin at its top: model.decoder.depth=4.",
    ),
]


@app.command()
def presets() -> None:
    """List the well-known models: name, parameters, shape, what it is."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from anyformer.nn.inspection.count import count
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
    model: Named,
    changes: Changes = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per row (of the target, in an encoder-decoder). Default: 1024, or the limit of the model.",
        ),
    ] = None,
    source_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per row of the source. Default: --length.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    as_json: Json = False,
) -> None:
    """Count parameters, FLOPs, activation and cache memory, part by part, and the peak of a training step on a GPU."""
    from anyformer.cli.resolve import model_of, read
    from anyformer.nn.inspection.count import count
    from anyformer.nn.inspection.memory import ADAMW, training_memory
    from anyformer.recipe import Recipe

    given = read(model, changes)
    config, optimizer = model_of(given), given.train.optimizer if isinstance(given, Recipe) else ADAMW
    table = count(config, length, batch=batch, source_length=source_length)
    training = training_memory(config, length, batch=batch, source_length=source_length, optimizer=optimizer)
    result = {**table.to_dict(), "training": training.to_dict()}
    typer.echo(json.dumps(result) if as_json else f"{table}\n{training}")


@app.command("doctor")
def doctor_(as_json: Json = False) -> None:
    """Report this machine, and the device, precision, kernels and compilation that anyformer chooses."""
    from anyformer.training.doctor import doctor

    report = doctor()
    typer.echo(json.dumps(report.to_dict()) if as_json else report.render())


@config_app.command("schema")
def config_schema(
    of: Annotated[Literal["model", "recipe"], typer.Argument(help="Of which kind of file.")] = "model",
) -> None:
    """Print the JSON schema of models or recipes, for completion and checks in editors."""
    from anyformer.config import io
    from anyformer.config.model import ModelConfig
    from anyformer.recipe import ready as recipes

    schema = io.schema(ModelConfig) if of == "model" else recipes.schema()
    typer.echo(json.dumps(schema, indent=2, ensure_ascii=False))


@config_app.command("show")
def config_show(
    model: Named,
    changes: Changes = None,
    format: Annotated[Literal["toml", "json"], typer.Option(help="How to write it.")] = "toml",
) -> None:
    """Print the whole config of a model or a recipe; save it as a file to start from."""
    from anyformer.cli.resolve import read
    from anyformer.config import io

    typer.echo(io.dumps(read(model, changes), format), nl=False)


@config_app.command("check")
def config_check(files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=".toml or .json files.")]) -> None:
    """Check files of models and recipes, and print all faults."""
    from anyformer.cli.resolve import load
    from anyformer.config.spec import ConfigError, Fault

    found: list[Fault] = []
    for file in files:
        try:
            load(file)
            typer.echo(f"{file}: right")
        except ConfigError as error:
            found += error.faults
    if found:
        raise ConfigError(found)


@config_app.command("diff")
def config_diff(left: Named, right: Named) -> None:
    """Print the differences of two models or two recipes, one per line: path, left -> right."""
    from anyformer.cli.resolve import read
    from anyformer.config import io
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.recipe import Recipe

    one, other = read(left), read(right)
    if isinstance(one, Recipe) != isinstance(other, Recipe):
        recipe, model = (left, right) if isinstance(one, Recipe) else (right, left)
        raise ConfigError([Fault("", f"'{recipe}' is a recipe and '{model}' a model: they cannot be compared")])
    typer.echo("\n".join(map(str, io.diff(one, other))) or "no difference")
