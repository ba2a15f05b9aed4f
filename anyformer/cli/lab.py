"""`lab`: experiments and grids."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anyformer.cli.app import RayAddress, app

if TYPE_CHECKING:
    from anyformer.config import ConfigError
    from anyformer.lab.cells import CellEngine
    from anyformer.lab.grid import Grid


@app.command()
def lab(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Experiments by name, or one of the commands above with its arguments.",
        ),
    ] = None,
    size: Annotated[
        Literal["quick", "cpu", "gpu"] | None,
        typer.Option(
            help="Size of an experiment: smallest, for a CPU (default), or for a GPU; `anyformer lab` lists minutes."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measurements in parallel; they share the cores. Default: 1; with ray, all that fit.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. Default: runs/lab/...")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="With run RECIPE: steps of each training. Default: the recipe's. With coordinates: 4."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="With run RECIPE: trainings of each setting. Default: 3.")
    ] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="With cell: wait for a cell that another worker trains. Default: skip it."),
    ] = False,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Where to measure: processes of this machine, or a Ray cluster.")
    ] = "local",
    address: RayAddress = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="With ray: cores of each measurement. Default: 1.")] = None,
    gpus: Annotated[
        float | None,
        typer.Option(min=0, help="With ray: GPUs of each measurement, such as 0.25. Default: 0."),
    ] = None,
    retries: Annotated[
        int | None, typer.Option(min=0, help="With ray: retries of a measurement whose worker died. Default: 3.")
    ] = None,
) -> None:
    """Test claims about Transformers by experiment, or compare your own settings on your data.

    \b
      anyformer lab                        list experiments, verdicts and minutes
      anyformer lab norms cache            test claims by name
      anyformer lab all                    test all claims
      anyformer lab run RECIPE KEY=A,B,C   train with each value, and compare
      anyformer lab run GRID.toml          the same for a grid in a file
      anyformer lab cell GRID.toml         list the cells of a grid
      anyformer lab cell GRID.toml ID      train one of them, on any machine
      anyformer lab coordinates RECIPE model.width=A,B,C
                                           compare sizes of activations by width

    For example: anyformer lab run reverse 'model.*.position=none,sinusoidal,rotary' --steps 400

    If a command is stopped, the same command continues.
    """
    if not what:
        return _list()
    from anyformer.lab.stats import student_t
    from anyformer.training.loop import Interrupted

    verb, words = what[0], what[1:]
    if size is not None and verb in ("run", "cell", "coordinates"):
        raise _wrong(f"--size is for experiments by name, not for `lab {verb}`: its recipe has the sizes")
    if verb == "coordinates":
        return _coordinates(words, steps, out)
    if (steps or seeds) and (verb not in ("run", "cell") or not words or _is_grid(words[0])):
        raise _wrong("--steps and --seeds belong to `lab run RECIPE KEY=A,B,C`")
    if wait and verb != "cell":
        raise _wrong("--wait belongs to `lab cell GRID ID`")
    chosen = _engine(engine, jobs, {"address": address, "cpus": cpus, "gpus": gpus, "retries": retries})
    if verb == "cell" and (engine != "local" or jobs):
        raise _wrong("`lab cell` trains in this process, one cell after another: omit --engine and --jobs")
    if verb != "cell":
        student_t()  # a missing package is an error before hours of measurements, not after them
    try:
        if verb == "cell":
            numbers = [int(word) for word in words if word.isdecimal()]
            _cells(*_grid([word for word in words if not word.isdecimal()], out, steps, seeds), numbers, wait)
        elif verb == "run":
            _compare(*_grid(words, out, steps, seeds), chosen)
        else:
            _experiments(what, size or "cpu", chosen, out)
    except (KeyboardInterrupt, Interrupted):
        typer.echo("interrupted: finished results are kept; the same command measures the rest", err=True)
        raise typer.Exit(3) from None


def _wrong(message: str) -> "ConfigError":
    from anyformer.config import ConfigError, Fault

    return ConfigError([Fault("", message)])


def _engine(name: str, jobs: int | None, ray: dict[str, Any]) -> "CellEngine":
    """Return an engine. `ray` has the options of a Ray cluster, None where not given."""
    given = {option: value for option, value in ray.items() if value is not None}
    if name == "ray":
        from anyformer.lab.ray_engine import RayEngine

        return RayEngine(**{"jobs": jobs, "address": os.environ.get("RAY_ADDRESS") or None, **given})
    if given:
        raise _wrong(f"--{next(iter(given))} belongs to --engine ray")
    from anyformer.lab.cells import Local

    return Local(jobs or 1)


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from anyformer.lab.experiment import every

    table = Table("", "name", "claim", "cpu", "gpu", box=None, pad_edge=False)
    for e in every():
        table.add_row(str(e.number or ""), e.kind, e.claim, e.described("cpu"), e.described("gpu"))
    Console().print(table)
    typer.echo("\nMinutes of all measurements, added up: divide by --jobs. `about`: estimated, not measured.")
    typer.echo("`stale`: the rule of the verdict was changed after its data was measured.")
    typer.echo("anyformer lab NAME runs one; anyformer lab run GRID.toml compares settings of your own.")


def _experiments(
    names: list[str], size: Literal["quick", "cpu", "gpu"], engine: "CellEngine", out: Path | None
) -> None:
    from rich.console import Console

    from anyformer.lab import figures
    from anyformer.lab.compare import markdown
    from anyformer.lab.experiment import every, find
    from anyformer.lab.measurements import measure_together

    chosen = every() if names == ["all"] else [find(name) for name in names]
    folder = out or Path("runs") / "lab" / size
    paths = {claim.kind: folder / f"{claim.kind}.jsonl" for claim in chosen}
    found = measure_together(chosen, size, paths, engine=engine, console=Console(stderr=True))
    for claim in chosen:
        results = found[claim.kind]
        typer.echo(f"{claim.number}. {claim.claim}" if claim.number else claim.claim)
        typer.echo(markdown(claim.table(results)))
        typer.echo(f"{claim.verdict(results)}\n{claim.result(results)}".rstrip())
        stale = ", changed after some of these results: they are stale" if claim.is_stale(results) else ""
        typer.echo(f"rule {claim.rule_for(results)}{stale}")
        try:
            figure = figures.save(claim.draw(results), folder / f"{claim.kind}.png")
            typer.echo(f"{paths[claim.kind]}, {figure}\n")
        except ImportError as error:
            typer.echo(f"{paths[claim.kind]}; {error}\n")


def _is_grid(name: str) -> bool:
    """Return whether a name is a file with a grid, which has axes; any other name or file is a recipe."""
    path = Path(name)
    return path.is_file() and bool(re.search(r'^\W*axes"?\W', path.read_text("utf-8", errors="replace"), re.MULTILINE))


def _grid(words: list[str], out: Path | None, steps: int | None, seeds: int | None) -> "tuple[Grid, Path]":
    """Return a grid and the folder of its results."""
    from anyformer.lab.grid import grid_of_recipe, load_grid

    if not words:
        raise _wrong("compare what? anyformer lab run RECIPE KEY=A,B,C, or anyformer lab run GRID.toml")
    folder = out or Path("runs") / "lab" / Path(words[0]).stem
    if _is_grid(words[0]):
        return load_grid(words[0], words[1:]), folder
    return grid_of_recipe(words[0], words[1:], steps, seeds or 3), folder


def _compare(grid: "Grid", folder: Path, engine: "CellEngine") -> None:
    """Train all cells of a grid and print the comparison."""
    from rich.console import Console

    from anyformer.lab.compare import aligned, cells, compare, report, verdict
    from anyformer.lab.grid import run_grid

    results = run_grid(grid, folder, engine=engine, console=Console(stderr=True))
    lines = compare(grid, results)
    typer.echo(f"{aligned(cells(lines, grid.metric))}\n{verdict(lines, grid.metric, grid.rates)}")
    try:
        typer.echo(f"{folder / 'results.jsonl'}, {report(grid, results, folder)}")
    except ImportError as error:
        typer.echo(f"{folder / 'results.jsonl'}; {error}")


def _coordinates(words: list[str], steps: int | None, out: Path | None) -> None:
    """Print the sizes of activations by width, without and with muP, and draw them."""
    from anyformer.lab import coordinates, figures
    from anyformer.lab.compare import aligned

    if not words:
        raise _wrong("check what? anyformer lab coordinates RECIPE model.width=64,128,256")
    found = coordinates.check_coordinates(words[0], words[1:], steps or coordinates.STEPS)
    typer.echo(aligned(coordinates.table(found)))
    folder = out or Path("runs") / "lab" / Path(words[0]).stem
    try:
        typer.echo(f"{figures.save(coordinates.draw(found), folder / 'coordinates.png')}")
    except ImportError as error:
        typer.echo(f"{error}")


def _cells(grid: "Grid", folder: Path, numbers: list[int], wait: bool) -> None:
    """Train some cells of a grid, or list all."""
    from anyformer.lab.cells import in_words, shown
    from anyformer.lab.claims import Claimed
    from anyformer.lab.grid import cell_states, run_cell

    if not numbers:
        for number, (cell, state) in enumerate(zip(grid.cells(), cell_states(grid, folder), strict=True)):
            typer.echo(f"{number:4}  {in_words(cell)}  {state}")
    skipped = False
    for number in numbers:
        try:
            result = run_cell(grid, folder, number, wait=wait)
            typer.echo(f"{number}  {in_words(result.cell)}  {shown(result.found)}  {result.seconds:.0f} s")
        except Claimed as error:
            typer.echo(f"{number}  skipped: {error}", err=True)
            skipped = True
    if skipped:
        raise typer.Exit(1)
