"""`lab`: experiments and grids."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from anyformer.cli.app import app


@app.command()
def lab(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME... | all | run RECIPE KEY=A,B,C... | run GRID.toml [KEY=VALUE...]]",
            help="Experiments, a recipe with the settings to compare, or a grid in a file.",
        ),
    ] = None,
    size: Annotated[
        Literal["quick", "cpu", "gpu"],
        typer.Option(
            help="Size of the experiment: smallest, for a CPU, or for a GPU. `anyformer lab` lists the minutes."
        ),
    ] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Measurements in parallel; they share the cores.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. Default: runs/lab/...")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With run RECIPE: steps of each training. Default: the recipe's.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="With run RECIPE: trainings of each setting. Default: 3.")
    ] = None,
) -> None:
    """Test claims about Transformers by experiment, or compare your own settings on your data.

    Without a name it lists the experiments. If it is stopped, the same command continues.

    anyformer lab run reverse 'model.*.position=none,sinusoidal,rotary' --steps 400
    """
    from anyformer.config import ConfigError, Fault

    if not what:
        return _list()
    if (steps or seeds) and not (what[0] == "run" and len(what) > 1 and not _is_grid(what[1])):
        raise ConfigError([Fault("", "--steps and --seeds belong to `lab run RECIPE KEY=A,B,C`")])
    from anyformer.training.loop import Interrupted

    try:
        if what[0] == "run":
            _grid(what[1:], jobs, out, steps, seeds)
        else:
            _experiments(what, size, jobs, out)
    except (KeyboardInterrupt, Interrupted):
        typer.echo("interrupted: finished results are kept; the same command measures the rest", err=True)
        raise typer.Exit(3) from None


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from anyformer.lab.experiment import every

    table = Table("", "name", "claim", "quick", "cpu", "gpu", box=None, pad_edge=False)
    for e in every():
        table.add_row(str(e.number), e.name, e.claim, *(f"{minutes:g} min" for minutes in e.minutes))
    Console().print(table)
    typer.echo("\nMinutes with --jobs 2 on two cores, or on a GPU. Of the cpu and gpu sizes some are estimates.")
    typer.echo("anyformer lab NAME runs one; anyformer lab run GRID.toml compares settings of your own.")


def _experiments(names: list[str], size: Literal["quick", "cpu", "gpu"], jobs: int, out: Path | None) -> None:
    from rich.console import Console

    from anyformer.lab import experiment, figures
    from anyformer.lab.compare import markdown

    chosen = [experiment.find(name) for name in (experiment.NAMES if names == ["all"] else names)]
    folder = out or Path("runs") / "lab" / size
    for claim in chosen:
        typer.echo(f"{claim.number}. {claim.claim}")
        path = folder / f"{claim.name}.jsonl"
        results = claim.run(size, path, jobs=jobs, console=Console(stderr=True))
        typer.echo(markdown(claim.table(results)))
        typer.echo(f"{claim.judge(results)}")
        try:
            figure = figures.save(claim.draw(results), folder / f"{claim.name}.png")
            typer.echo(f"{path}, {figure}\n")
        except ImportError as error:
            typer.echo(f"{path}; {error}\n")


def _is_grid(name: str) -> bool:
    """Return whether a name is a file with a grid, which has axes; any other name or file is a recipe."""
    path = Path(name)
    return path.is_file() and bool(re.search(r'^\W*axes"?\W', path.read_text("utf-8", errors="replace"), re.MULTILINE))


def _grid(words: list[str], jobs: int, out: Path | None, steps: int | None, seeds: int | None) -> None:
    from rich.console import Console

    from anyformer.config import ConfigError, Fault
    from anyformer.lab.compare import aligned, cells, compare, report, verdict
    from anyformer.lab.grid import grid_of_recipe, load_grid, run_grid

    if not words:
        what = "compare what? anyformer lab run RECIPE KEY=A,B,C, or anyformer lab run GRID.toml"
        raise ConfigError([Fault("", what)])
    if _is_grid(words[0]):
        grid = load_grid(words[0], words[1:])
    else:
        grid = grid_of_recipe(words[0], words[1:], steps, seeds or 3)
    folder = out or Path("runs") / "lab" / Path(words[0]).stem
    results = run_grid(grid, folder, jobs=jobs, console=Console(stderr=True))
    lines = compare(results, grid.metric)
    typer.echo(f"{aligned(cells(lines, grid.metric))}\n{verdict(lines, grid.metric)}")
    try:
        typer.echo(f"{folder / 'results.jsonl'}, {report(grid, results, folder)}")
    except ImportError as error:
        typer.echo(f"{folder / 'results.jsonl'}; {error}")
