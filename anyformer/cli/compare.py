"""`compare`: runs beside each other."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anyformer.cli.app import Json, app


@app.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN... [KEY=VALUE]",
            help="Folders of runs; the first is the baseline. KEY=VALUE changes its recipe: data.root=DIR.",
        ),
    ],
    split: Annotated[
        str, typer.Option(help="Split of the first run's data: train, valid, test, or the name of a test set.")
    ] = "test",
    out: Annotated[Path | None, typer.Option(help="Write the comparison: .html, or the figure: .png.")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: settings, learning curves, cost, and metrics on the same rows with a paired bootstrap."""
    from anyformer.comparison import page
    from anyformer.comparison.compare import compare as compare_runs
    from anyformer.config.spec import ConfigError, Fault

    if out is not None and out.suffix.lower() not in (".html", ".png"):
        raise ConfigError([Fault("--out", f"= {out}: must end in .html or .png")])
    changes = [one for one in runs if "=" in one and not Path(one).exists()]
    found = compare_runs([one for one in runs if one not in changes], split, changes)
    typer.echo(json.dumps(asdict(found), ensure_ascii=False) if as_json else page.text(found), nl=as_json)
    if out is not None:
        if out.suffix.lower() == ".html":
            out.write_text(page.page(found), encoding="utf-8")
        else:
            page.figure(found, out)
        typer.echo(f"written: {out}", err=as_json)
