"""`compare`: runs beside each other."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anyformer.cli.app import Json, app, json_line


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN... [KEY=VALUE]",
            help="Folders of runs; the first is the baseline. KEY=VALUE changes that one's recipe: data.root=DIR.",
        ),
    ],
    split: Annotated[
        str, typer.Option(help="Split of the first run's data: train, valid, test, or the name of a test set.")
    ] = "test",
    out: Annotated[
        Path | None, typer.Option(help="File to write: .html for the whole comparison, .png for its figure.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: settings, learning curves, cost, and metrics on the same rows with a paired bootstrap.

    For example: anyformer compare runs/small runs/large --split valid --out compared.html
    """
    from anyformer.config.io import write_file
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.lab.comparison import page
    from anyformer.lab.comparison.compare import compare as compare_runs
    from anyformer.runs.atomic_folder import writing

    if out is not None and out.suffix.lower() not in (".html", ".png"):
        raise ConfigError([Fault("--out", f"= {out}: must end in .html or .png")])
    if out is not None and (out.is_dir() or not out.parent.is_dir()):  # before the work
        what = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ConfigError([Fault("--out", f"= {out}: {what}")])
    changes = [one for one in runs if "=" in one and not Path(one).exists()]
    found = compare_runs([one for one in runs if one not in changes], split, changes)
    typer.echo(json_line(asdict(found)) if as_json else page.text(found), nl=as_json)
    if out is not None:
        content = page.page(found).encode() if out.suffix.lower() == ".html" else page.figure(found)
        with writing(out):
            write_file(out, content)
        typer.echo(f"written: {out}", err=as_json)
