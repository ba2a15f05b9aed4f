"""`lab`: experiments and grids."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from anyformer.cli.app import app


@app.command()
def lab(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME... | all | run GRID.toml [KEY=VALUE...]]", help="Experiments, or a grid."),
    ] = None,
    size: Annotated[
        Literal["quick", "cpu", "gpu"],
        typer.Option(help="Size of the experiment: seconds, minutes on a CPU, or minutes on a GPU."),
    ] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Measurements in parallel; they share the cores.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. Default: runs/lab/...")] = None,
) -> None:
    """Test claims about Transformers by experiment, or compare your own settings on your data.

    Without a name it lists the experiments. If it is stopped, the same command continues.
    """
    if not what:
        return _list()
    from anyformer.training.loop import Interrupted

    try:
        if what[0] == "run":
            _grid(what[1:], jobs, out)
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
    typer.echo("\nanyformer lab NAME runs one; anyformer lab run GRID.toml compares settings of your own.")


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


def _grid(words: list[str], jobs: int, out: Path | None) -> None:
    from rich.console import Console

    from anyformer.config import ConfigError, Fault
    from anyformer.lab.compare import cells, compare, markdown, report
    from anyformer.lab.grid import load_grid, run_grid

    if not words:
        raise ConfigError([Fault("", "which grid? anyformer lab run GRID.toml")])
    grid = load_grid(words[0], words[1:])
    folder = out or Path("runs") / "lab" / Path(words[0]).stem
    results = run_grid(grid, folder, jobs=jobs, console=Console(stderr=True))
    typer.echo(markdown(cells(compare(results, grid.metric), grid.metric)))
    try:
        typer.echo(f"{folder / 'results.jsonl'}, {report(grid, results, folder)}")
    except ImportError as error:
        typer.echo(f"{folder / 'results.jsonl'}; {error}")
