"""The verbs that make a run and use it."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from anyformer.cli.app import Json, app, print_once
from anyformer.cli.decoding_options import UNKNOWN, as_options, decoding, prepare, unknown

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


@app.command("recipes")
def recipes_() -> None:
    """List the recipes that come with anyformer."""
    from importlib import resources

    from anyformer.recipes import names

    for name in names():
        first = (resources.files("anyformer.recipes") / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0]
        typer.echo(f"{name:<16} {first.removeprefix('# ')}")


def _recipes(incomplete: str) -> list[str]:
    from anyformer.recipes import names

    return [name for name in names() if name.startswith(incomplete)]


@app.command("train")
def train_(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe's name, or a .toml or .json file.", autocompletion=_recipes),
    ] = "sort",
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes of the recipe: train.steps=200, model.decoder.depth=4."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/RECIPE if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    allow_changed_data: Annotated[
        bool,
        typer.Option(
            "--allow-changed-data", help="With --resume: accept data files that changed since the last checkpoint."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Read the data, build the model, take a few steps, tell what it will take; write nothing."
        ),
    ] = False,
) -> None:
    """Train a model by a recipe; interrupted, it saves and goes on with --resume to the same numbers."""
    if dry_run:
        _plan(recipe, changes, out, resume or allow_changed_data)
        return
    from anyformer.training.signals import Signals

    with Signals(lambda: print_once("stopping after this step; a second signal stops at once", err=True)):
        from anyformer.training.train import train

        with _told():
            run = train(recipe, out, changes or (), resume=resume, allow_changed_data=allow_changed_data)
        print_once(f"trained: {run.folder}")


def _plan(recipe: str, changes: list[str] | None, out: Path | None, resume: bool) -> None:
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.recipes import read_recipe
    from anyformer.training.plan import plan

    if out is not None or resume:
        raise ConfigError([Fault("--dry-run", "writes nothing: leave out --out and --resume")])
    with _told():
        typer.echo(plan(read_recipe(recipe, changes or ())).render())


@contextmanager
def _told() -> Iterator[None]:
    """How a training may end before its end, in one line each."""
    from anyformer.training.loop import Diverged, Interrupted
    from anyformer.training.out_of_memory import OutOfMemory

    try:
        yield
    except Interrupted as told:
        print_once(str(told), err=True)
        raise typer.Exit(3) from None
    except (Diverged, FloatingPointError) as told:
        print_once(str(told), err=True)
        raise typer.Exit(1) from None
    except OutOfMemory as told:  # of one process, maybe not of the first
        typer.echo(str(told), err=True)
        raise typer.Exit(1) from None


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

    with _told():
        found = evaluate(run, changes or (), split)
    if as_json:
        whole = {"task": found.task, "split": split, "n": found.count, "metrics": found.values, "notes": found.notes}
        typer.echo(json.dumps(whole, ensure_ascii=False))
        return
    table = {"task": found.task, "split": split, "n": found.count, **found.values, **found.notes}
    lines = list(_lines(table))
    width = max(16, *(len(name) for name, _ in lines))
    for name, text in lines:
        typer.echo(f"{name:<{width}} {text}")


def _lines(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each value; those of a table within a table have the names of both."""
    for key, value in values.items():
        name = f"{before}{key}"
        match value:
            case dict():
                yield from _lines(value, f"{name}.")
            case list():
                yield from ((name, str(item)) for item in value)
            case float():
                yield name, f"{value:.6g}"
            case int():
                yield name, f"{value:,}"
            case _:
                yield name, str(value)


@app.command("predict")
@decoding
def predict_(
    run: Folder,
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Texts, one a line; - reads standard input.")] = "-",
    out: Annotated[Path | None, typer.Option(help="Where the answers go, one a line; else to standard output.")] = None,
    *,
    how: dict[str, Any],
) -> None:
    """Answer each line of a file: labels, numbers, translations, or texts that go on."""
    from anyformer.cli.progress import counting
    from anyformer.config.spec import ConfigError, Fault

    if file != "-" and not Path(file).is_file():
        raise ConfigError([Fault(file, "is not a file")])
    if out is not None and (out.is_dir() or not out.parent.is_dir()):  # before the work of hours
        what = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ConfigError([Fault(str(out), f"{what}: --out is the file that answers are written to")])
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([Fault(file, f"is not UTF-8 at byte {error.start}: convert it to UTF-8")]) from None
    lines = text.removesuffix("\n").split("\n") if text else []
    failed = None
    with as_options("line {}"):
        loaded, how = prepare(run, how)
        with counting(len(lines), "texts") as progress:
            if found := unknown(loaded, lines):
                shown = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
                typer.echo(f"{len(found):,} of {len(lines):,} lines {UNKNOWN}: line {shown}", err=True)
            try:
                answers = loaded.predict(lines, progress=progress, **how)
            except FloatingPointError as error:  # the answers to the other lines are there
                failed, answers = str(error), [answer or "" for answer in getattr(error, "answers", ())]
    said = "".join(f"{answer}\n" for answer in answers)
    if out is None:
        typer.echo(said, nl=False)
    else:
        out.write_text(said, encoding="utf-8")
    if failed is not None:
        typer.echo(failed.replace("text", "line", 1), err=True)
        raise typer.Exit(1)


@app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="A folder with a config.json and weights, or llama2.c's .bin.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the run that is made of it.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Its tokenizer, if it is not in the folder.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin, too, as weights and nothing else.")
    ] = False,
    family: Annotated[
        str | None, typer.Option(help="The model_type of a config.json that has none, or an unknown one.")
    ] = None,
    ignore_field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Read config.json as if it did not have this field; repeat for several. The model may be another one.",
        ),
    ] = None,
) -> None:
    """Make a run of a model that another program wrote."""
    from anyformer.interop import import_model

    run = import_model(
        source,
        out,
        tokenizer=tokenizer,
        allow_pickle=allow_pickle,
        family=family,
        ignore_fields=ignore_field or (),
    )
    typer.echo(f"imported: {out}, {run.model.num_parameters():,} parameters, {run.tokenizer.size:,} tokens")


@app.command("merge")
def merge_(
    run: Folder,
    out: Annotated[Path, typer.Option(help="The folder of the run that is made of it.")],
) -> None:
    """Make a run of one with an adapter that does the same without, by its weights alone."""
    from anyformer.training.train import merge

    made = merge(run, out)
    typer.echo(f"merged: {out}, {made.model.num_parameters():,} parameters")


@app.command("export")
def export_(
    run: Folder,
    out: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="The folder, or of ONNX the file, made of it.")],
    to: Annotated[
        Literal["hf", "onnx"], typer.Option("--format", help="hf: as transformers reads it; onnx: for onnxruntime.")
    ] = "hf",
    family: Annotated[str | None, typer.Option(help="A family of public models, if several have this one.")] = None,
) -> None:
    """Write a run as a model that other programs read, or name what of it they do not have."""
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.interop.hf_folder import to_hf
    from anyformer.interop.onnx import export_onnx
    from anyformer.run import load

    if to == "onnx":
        if family is not None:
            raise ConfigError([Fault("--family", "is for --format hf: an ONNX file is of no family")])
        typer.echo(f"exported: {export_onnx(load(run, device='cpu'), out)}, as onnx")
        return
    found = to_hf(load(run, device="cpu"), out, family=family)
    typer.echo(f"exported: {out}, as {found}")
