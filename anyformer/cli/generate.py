"""The verb that lets a run write."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from anyformer.cli.app import app
from anyformer.cli.runs import Folder

BETWEEN = "---"  # two samples


@app.command("generate")
def generate_(
    run: Folder,
    prompt: Annotated[str, typer.Option(help="What goes on, or is answered.")],
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens that are added at most; if not given, what `predict` adds.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0, as if not given: always the likeliest token; 1: as likely as it is.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that have this probability together.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from tokens at least this much as likely as the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens that were there already are less likely.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help=r"End before this string; may be given again. In bash, $'\n' is a newline.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same number draws the same text.")] = None,
    samples: Annotated[int, typer.Option("-n", "--samples", help="How many texts; a line of --- is between two.")] = 1,
) -> None:
    """Let a run go on from a prompt, or answer it; on a terminal, as it is said."""
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.run import load

    given = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop,
        "seed": seed,
    }
    faults = [] if samples >= 1 else [Fault("--samples", f"= {samples}: must be at least 1")]
    for name, number, idle in (("samples", samples, samples < 2), ("seed", seed, seed is None)):
        if not temperature and not idle:
            faults.append(Fault(f"--{name}", f"= {number}: needs a --temperature above 0: at 0 nothing is drawn"))
    if faults:
        raise ConfigError(faults)
    how = {name: value for name, value in given.items() if value is not None}
    loaded = load(run)
    with _as_options(given):
        if samples == 1 and sys.stdout.isatty():
            for piece in loaded.stream(prompt, **how):
                typer.echo(piece, nl=False)
            typer.echo()
        else:
            typer.echo(f"\n{BETWEEN}\n".join(loaded.generate([prompt] * samples, **how)))


@contextmanager
def _as_options(names: Collection[str]) -> Iterator[None]:
    """What is wrong, by the names that it has on the command line, and each fault once."""
    from anyformer.config.spec import ConfigError, Fault

    def option(path: str) -> str:
        if path.startswith("text "):
            return "--prompt"
        return f"--{path.replace('_', '-')}" if path in names else path

    try:
        yield
    except ConfigError as error:
        raise ConfigError(dict.fromkeys(Fault(option(fault.path), fault.message) for fault in error.faults)) from None
    except FloatingPointError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
