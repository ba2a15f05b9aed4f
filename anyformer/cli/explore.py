"""The verb that opens the page."""

from pathlib import Path
from typing import Annotated

import typer

from anyformer.cli.app import app

PORT = 8642


@app.command()
def explore(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of runs.")],
    port: Annotated[int, typer.Option(help="Where the page is; 0: any that is free.")] = PORT,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, and open no browser.")] = False,
) -> None:
    """Look into runs in the browser: attention, scores, layers, the cache, and answers as they are written.

    The page is served to this machine alone, until it is interrupted (Ctrl-C).
    """
    import webbrowser

    from anyformer.explore.opened import open_runs
    from anyformer.explore.server import Server

    with Server(open_runs(runs), port) as server:
        typer.echo(f"{server.address}  (Ctrl-C ends it)")
        if not no_browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")
