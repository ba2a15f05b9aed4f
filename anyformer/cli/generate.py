"""The verb `generate`."""

import sys
from typing import Annotated, Any

import typer

from anyformer.cli.app import app
from anyformer.cli.decoding_options import (
    BEAM,
    SAMPLING,
    UNKNOWN,
    DecodingCommand,
    as_options,
    decoding,
    limit_note,
    prepare,
)
from anyformer.cli.runs import Folder
from anyformer.cli.torch_import import import_torch

SEPARATOR = "---"  # between two samples


@app.command("generate", cls=DecodingCommand)
@decoding
def generate_(
    run: Folder,
    prompt: Annotated[str, typer.Option(help="Text to continue or answer.")],
    samples: Annotated[
        int,
        typer.Option("-n", "--samples", help="Number of samples, separated by lines of ---.", rich_help_panel=SAMPLING),
    ] = 1,
    n_best: Annotated[
        int | None,
        typer.Option(help="Print this many hypotheses, one per line: score, tab, text.", rich_help_panel=BEAM),
    ] = None,
    *,
    how: dict[str, Any],
) -> None:
    """Generate from a prompt; streams when stdout is a terminal."""
    import_torch()
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.generation.batch.predictor import texts_with_unknown
    from anyformer.generation.strategy import selectors

    if samples < 1:
        raise ConfigError([Fault("--samples", f"= {samples}: must be at least 1")])
    with as_options("--prompt"):
        loaded, how = prepare(run, how)
        used = loaded.defaults.merged(how)
        if samples > 1 and not used.get("temperature"):
            what = "needs a temperature above 0: at 0 nothing is sampled"
            raise ConfigError([Fault("--samples", f"= {samples}: {what}")])
        if not prompt.strip() and not getattr(loaded.task, "continues", False):
            raise ConfigError([Fault("--prompt", "is blank: type a text")])
        if texts_with_unknown(loaded, [prompt]):
            typer.echo(f"--prompt: {UNKNOWN.replace('have', 'has', 1)}", err=True)
        cut = set[int]()
        if n_best is not None:
            (hypotheses,) = loaded.hypotheses([prompt], n_best=n_best, **how)
            for text, score in hypotheses:
                typer.echo(f"{score:.4f}\t{one_line(text)}")
        elif samples == 1 and sys.stdout.isatty() and not used.keys() & selectors():
            for piece in loaded.stream(prompt, at_limit=cut.add, **how):
                typer.echo(piece, nl=False)
            typer.echo()
        else:
            typer.echo(f"\n{SEPARATOR}\n".join(loaded.generate([prompt] * samples, at_limit=cut.add, **how)))
        if cut:
            typer.echo(limit_note(max(cut), "use a shorter prompt"), err=True)


def one_line(text: str) -> str:
    """Return a text with line ends escaped as \\n and \\r."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
