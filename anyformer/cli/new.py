"""`new`: a recipe for one's own files; `recipes`: those that come with the package."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anyformer.cli.app import SingleOptions, app

if TYPE_CHECKING:
    from anyformer.config import ModelConfig
    from anyformer.training.new_recipe.columns import Role
    from anyformer.training.new_recipe.draft import RecipeDraft
    from anyformer.training.plan import TrainingPlan

SETTING = re.compile(r"[a-z_]+(\.(\w+|\*))*=")  # the beginning of KEY=VALUE
Column = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of a table, by name or by number.")]


def _tasks(incomplete: str) -> list[str]:
    from anyformer.training.new_recipe.draft import TASKS

    return [name for name in TASKS if name.startswith(incomplete)]


@app.command("new", cls=SingleOptions)
def new_(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="translate (any text to text), classify, tag, lm (language model), mlm (masked language model), "
            "regress (a number for a text or a pair), embed (vectors of texts).",
            autocompletion=_tasks,
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|KEY=VALUE]...",
            help="Further files, and settings of the recipe, as for `train`: data.on_bad_row=skip.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE...",
            help="A table (.tsv, .csv, .jsonl, .parquet), a CoNLL file, plain text, a folder with a folder for each "
            "class, or two files with one row per line. Names with train, valid or test are these splits.",
        ),
    ] = None,
    text: Column = None,
    pair: Column = None,
    label: Column = None,
    source: Column = None,
    target: Column = None,
    words: Column = None,
    tags: Column = None,
    first: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN|DIR|hf:OWNER/NAME",
            help="Fine-tune this model: a run, the folder of a public checkpoint, or its name.",
        ),
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="With --from: train LoRA adapters, not all weights.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Time of the training, evaluations included; it determines the number of steps. "
            "Default: the number of steps of 5 minutes here, or more where learning needs them.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The recipe. Default: the name of the data with .toml.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the recipe if it exists.")] = False,
) -> None:
    """Write a short recipe for your own files, with sizes that fit the data and this machine.

    The format, the encoding, the columns and the labels are found by looking at the files.
    """
    import torch

    from anyformer.config.overrides import assignment
    from anyformer.config.spec import ConfigError, Fault, close_file, visible
    from anyformer.training.new_recipe.budget import cycles_within, measure, minutes_note, steps_within
    from anyformer.training.new_recipe.draft import RecipeRequest, draft, task_kind

    given = [*(data or ()), *(more or ())]
    overrides = [text for text in given if SETTING.match(text) and not os.path.exists(text)]
    paths = [text for text in given if text not in overrides]
    fixed = dict(map(assignment, overrides)).get("train.steps")
    if fixed is not None and minutes is not None:
        raise ConfigError([Fault("--minutes", f"= {minutes:g}: train.steps is given: leave out one of them")])
    if not paths:
        raise ConfigError([Fault("--data", "is missing: name the file, or the two files, to learn from")])
    if missing := [path for path in paths if not os.path.exists(os.path.expanduser(path))]:
        hints = [f"; did you mean '{close}'?" if (close := close_file(path)) else "" for path in missing]
        texts = [f"= '{visible(path)}': no file of this name{hint}" for path, hint in zip(missing, hints, strict=True)]
        raise ConfigError(Fault("--data", text) for text in texts)
    out = Path(f"{_stem(paths[0])}.toml") if out is None else out
    if out.suffix.lower() != ".toml":
        raise ConfigError([Fault("--out", f"= '{out}': a recipe ends in .toml")])
    if out.exists() and not force:
        raise ConfigError([Fault(str(out), "exists already: choose another --out, or add --force to overwrite it")])
    if lora and first is None:
        raise ConfigError([Fault("--lora", "needs a pretrained model: add --from")])
    task_kind(task)  # refuses an unknown one before a public model is imported
    columns: dict[Role, str | None] = {"text": text, "pair": pair, "label": label, "source": source}
    columns |= {"target": target, "words": words, "tags": tags}
    given_columns = {role: column for role, column in columns.items() if column is not None}
    start, gpu = None if first is None else _run(first), torch.cuda.is_available()
    made = draft(RecipeRequest(task, paths, given_columns, start, lora, gpu, tuple(overrides)))
    typer.echo("building tokenizer and model, and timing a few steps", err=True)
    made, measured = measure(made)
    steps, reason = steps_within(measured, minutes, made.facts) if fixed is None else (fixed, "")
    cycles = 1 if minutes is None else cycles_within(measured, steps, made.facts)
    out.write_text(made.text(steps, reason, minutes, cycles), encoding="utf-8")
    _report(made, measured, steps, minutes, out)
    if note := minutes_note(measured, minutes, steps, made.facts):
        typer.echo(f"note       {note}")


def _stem(path: str) -> str:
    """Return the name of a file without its suffixes."""
    name = Path(path).resolve().name
    return name.removesuffix(".gz").partition(".")[0] or "recipe"


def _run(first: str) -> "tuple[str, ModelConfig]":
    """Return the run to start from, and its model; a public checkpoint is imported to runs/NAME."""
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.interop import import_model
    from anyformer.interop.hub import folder_name, is_hub_name
    from anyformer.recipe.ready.from_run import config_of_run

    if not is_hub_name(first) and not Path(first).is_dir():
        what = "is neither a run nor a folder of a public checkpoint; a public name begins with hf:"
        raise ConfigError([Fault("--from", f"= '{first}': {what}")])
    path = Path(first)
    if is_hub_name(first) or ((path / "config.json").is_file() and not (path / "task.json").is_file()):
        path = Path("runs") / folder_name(first)
        if path.exists():
            typer.echo(f"from       {path}, imported before")
        else:
            run = import_model(first, path)
            typer.echo(f"imported   {path}, {run.model.num_parameters():,} parameters")
    return path.as_posix(), config_of_run(path)


def _report(made: "RecipeDraft", measured: "TrainingPlan", steps: int, minutes: float | None, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from anyformer.training.plan import duration

    table = Table(box=None, pad_edge=False, show_header=False)
    for what, choice, why in made.reasons:
        table.add_row(what, choice, why)
    time = f"{steps:,} steps, about {duration(steps * measured.seconds)} on {measured.device}, without evaluations"
    if minutes is not None:
        time = f"{minutes:g} min on {measured.device}, about {steps:,} updates"
    epochs = measured.epochs * steps / measured.recipe.train.steps
    table.add_row("training", time, f"{epochs:.3g} epochs; {measured.table.parameters:,} parameters")
    Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False).print(table)
    run = Path("runs") / out.stem
    typer.echo(f"\nwritten    {out}\nnext       anyformer train {out}")
    use = f"anyformer generate {run} --prompt ..." if made.facts.task.kind == "lm" else f"anyformer predict {run} FILE"
    typer.echo(f"then       {use}")


@app.command("recipes")
def recipes_() -> None:
    """List the recipes that come with anyformer, with their data: data sets and whether these are here, and files."""
    from importlib import resources

    from anyformer.data.datasets.registry import registry
    from anyformer.data.datasets.storage import state
    from anyformer.data.files import set_of
    from anyformer.recipe.data import named_files
    from anyformer.recipe.ready import names, read_recipe

    for name in names():
        first = (
            (resources.files("anyformer.recipe.ready") / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0]
        )
        typer.echo(f"{name:<16} {first.removeprefix('# ')}")
        data = read_recipe(name).data
        sets = [f"{one} ({state(registry()[one])})" for one in data.sets]
        files = dict.fromkeys(f"{file} (your own)" for _, file in named_files(data) if not set_of(file, data))
        typer.echo(f"{'':<16} data: {', '.join([*sets, *files]) or 'synthetic'}")
