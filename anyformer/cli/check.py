"""`check`: the laws on your own parts."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from anyformer.cli.app import Json, app, json_line

if TYPE_CHECKING:
    from anyformer.testing import Report

CELLS = {True: "holds", False: "BROKEN", None: "-"}


@app.command("check")
def check_(
    parts: Annotated[
        str,
        typer.Argument(
            metavar="FILE|PACKAGE[:PART]",
            help="A Python file, or an installed package or module, with parts; after a colon one of them, by the name "
            "of its class or its kind.",
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Fields of the part, as in a config. For one part alone."),
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="A law that is not tried; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Check parts of your own by the laws that ours obey. Exit code 1 if one does not hold.

    \b
    anyformer check my_parts.py                 all parts in a file
    anyformer check my_parts.py:Strided step=3  one of them, with other fields than its defaults
    """
    from anyformer.config.outside import parts_of
    from anyformer.config.overrides import override
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.testing.check import example, known_laws, run_laws

    found = parts_of(parts)
    if changes and len(found) > 1:
        names = ", ".join(part.__name__ for part in found)
        raise ConfigError(
            [Fault(changes[0], f"is for one part, and there are {names}: write {parts}:{found[0].__name__}")]
        )
    if wrong := [law for law in skip or () if law not in known_laws()]:
        raise ConfigError([Fault("--skip", f"= {wrong[0]}: the laws are {', '.join(known_laws())}")])
    reports = run_laws([override(example(part), changes or ()) for part in found], skip=skip or ())
    if as_json:
        typer.echo(json_line([report.to_dict() for report in reports]))
    else:
        _print(reports)
    if any(report.broken for report in reports):
        raise typer.Exit(1)


def _print(reports: "list[Report]") -> None:
    """Print a table with a row for each law and a column for each part, then the faults."""
    from rich.console import Console
    from rich.table import Table

    table = Table("law", box=None, pad_edge=False)
    laws = dict.fromkeys(result.law for report in reports for result in report.results)
    for report in reports:
        table.add_column(report.part.kind)
    for law in laws:
        cells = [next((CELLS[each.holds] for each in report.results if each.law == law), "") for report in reports]
        table.add_row(law, *cells)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for report in reports:
        for result in report.results:
            if result.remark:
                typer.echo(f"{report.part.kind}: {result.law}: {result.remark}")
