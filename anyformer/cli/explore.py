"""The verb that opens the page."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from anyformer.cli.app import app

PORT = 8642
PATIENCE = 10  # seconds that a computation may take to end after Ctrl-C


@app.command()
def explore(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="The folders of runs. Default: a small one that sorts digits."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the page; 0: any free port.")] = PORT,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, and open no browser.")] = False,
    lesson: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A lesson in a TOML file, besides those of the package.")
    ] = None,
) -> None:
    """Look into runs in the browser: attention, scores, layers, the cache, and answers as they are written.

    A training can be opened while it runs: the page follows its snapshots and checkpoints. The page is served to this
    machine alone until Ctrl-C or SIGTERM, which end it with exit code 0.
    """
    with _interrupted_by_signals() as check:
        import webbrowser

        from anyformer.explore.lessons import read_lessons
        from anyformer.explore.open_runs import BUNDLED, open_runs
        from anyformer.explore.server import ExploreServer

        waiting = set[Path]()

        def wait(folder: Path) -> None:
            if folder not in waiting:
                typer.echo(f"{folder}: waiting for the first snapshot or checkpoint of its training (Ctrl-C ends it)")
                waiting.add(folder)
            time.sleep(0.5)

        if not runs:
            typer.echo("a small decoder that sorts digits; `anyformer explore RUN` opens a run of yours")
        workspace = open_runs(runs or [BUNDLED], wait)
        lessons = read_lessons(lesson or [], workspace)
        check()
        with ExploreServer(workspace, port, lessons) as server:
            typer.echo(f"{server.address}  (Ctrl-C ends it)")
            if not no_browser:
                webbrowser.open(server.address)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("")
                _finish(server.finish)


@contextmanager
def _interrupted_by_signals() -> Iterator[Callable[[], None]]:
    """Raise `KeyboardInterrupt` on SIGINT and SIGTERM, and once more by the function that is given.

    Native code that is imported may swallow the exception of a signal.
    """
    came = False

    def take(number: int, frame: object) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(finish: Callable[[float], bool]) -> None:
    """Wait for requests that are being answered; a second signal, or a long computation, ends the process at once."""
    try:
        done = finish(PATIENCE)
    except KeyboardInterrupt:
        done = False
    if not done:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # without Python's own exit, which would abort in the thread that computes
