"""The verb that lets a run write."""

import sys
from typing import Annotated, Any

import typer

from anyformer.cli.app import app
from anyformer.cli.decoding_options import BEAM, SAMPLING, UNKNOWN, as_options, decoding, prepare, unknown
from anyformer.cli.runs import Folder

BETWEEN = "---"  # two samples


@app.command("generate")
@decoding
def generate_(
    run: Folder,
    prompt: Annotated[str, typer.Option(help="What goes on, or is answered.")],
    samples: Annotated[
        int,
        typer.Option("-n", "--samples", help="How many texts; a line of --- is between two.", rich_help_panel=SAMPLING),
    ] = 1,
    n_best: Annotated[
        int | None,
        typer.Option(help="So many answers, each a line: score, tab, text.", rich_help_panel=BEAM),
    ] = None,
    *,
    how: dict[str, Any],
) -> None:
    """Let a run go on from a prompt, or answer it; on a terminal, as it is said."""
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.decoding.strategy import CHOICES

    if samples < 1:
        raise ConfigError([Fault("--samples", f"= {samples}: must be at least 1")])
    if samples > 1 and not how.get("temperature"):
        what = "needs a temperature above 0: at 0 nothing is drawn"
        raise ConfigError([Fault("--samples", f"= {samples}: {what}")])
    with as_options("--prompt"):
        loaded, how = prepare(run, how)
        if not prompt.strip() and not getattr(loaded.task, "continues", False):
            raise ConfigError([Fault("--prompt", "is blank: there is nothing to answer")])
        if unknown(loaded, [prompt]):
            typer.echo(f"--prompt: {UNKNOWN.replace('have', 'has', 1)}", err=True)
        try:
            if n_best is not None:
                (found,) = loaded.hypotheses([prompt], n_best=n_best, **how)
                for text, score in found:
                    typer.echo(f"{score:.4f}\t{one_line(text)}")
            elif samples == 1 and sys.stdout.isatty() and not how.keys() & CHOICES:
                for piece in loaded.stream(prompt, **how):
                    typer.echo(piece, nl=False)
                typer.echo()
            else:
                typer.echo(f"\n{BETWEEN}\n".join(loaded.generate([prompt] * samples, **how)))
        except FloatingPointError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None


def one_line(text: str) -> str:
    """A text in which line ends are written as \\n and \\r."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
