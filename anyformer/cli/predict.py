"""The verb `predict`."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from anyformer.cli.app import RayAddress, app, print_once
from anyformer.cli.decoding_options import UNKNOWN, DecodingCommand, as_options, decoding, note_unfinished, parse
from anyformer.cli.runs import Folder
from anyformer.cli.torch_import import import_torch

if TYPE_CHECKING:
    from anyformer.generation.batch.predictor import Predictor
    from anyformer.generation.batch.stream import Notes


@app.command("predict", cls=DecodingCommand)
@decoding
def predict_(
    run: Folder,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...|-",
            help="Input, one text per line; - (default) reads standard input. Or one picture or sound.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the predictions, one per line; of several files, or with ray, a folder. "
            "Default: standard output."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="A candidate label, for runs of the task embed: the nearest one is predicted; repeat the option for "
            "each."
        ),
    ] = None,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="For classes and answers: print each with its probability, with tabs."),
    ] = False,
    n_best: Annotated[
        int | None,
        typer.Option(min=1, help="For runs of the task span: print a JSON list of the best answers, this many."),
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(help="For imported models with prompts: the name of the one to read before each text."),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Where to predict: in this process, or on a Ray cluster.")
    ] = "local",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="With ray: number of workers. Default: as many as fit.")
    ] = None,
    address: RayAddress = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="With ray: GPUs of each worker, such as 0.5. Default: 0.")
    ] = None,
    *,
    how: dict[str, Any],
) -> None:
    """Predict for each line of a file: a label, a number, a translation or a continuation.

    With --out, a command that was stopped continues where it was, if it is repeated.
    """
    names = files or ["-"]
    _check_paths(names, out, engine, {"jobs": jobs, "address": address, "gpus": gpus})
    import_torch()
    from anyformer.generation.batch.predictor import Predictor

    with as_options("line {}"):
        given = {**parse(how), "labels": label or None, "scores": scores or None, "n_best": n_best}
        given["prompt_name"] = prompt_name
        predictor = Predictor(run, device="cpu" if engine == "ray" else None, **given)
        _check_options(predictor, labels=label, scores=scores, n_best=n_best, prompt_name=prompt_name)
        note_unfinished(predictor.run, run)
        try:
            if engine == "ray" or len(names) > 1:
                assert out is not None
                ray = {"jobs": jobs, "address": address, "gpus": gpus} if engine == "ray" else None
                all_notes = _predict_files(predictor, names, out, ray)
            else:
                all_notes = {names[0]: _predict_file(predictor, names[0], out)}
        except KeyboardInterrupt:
            if out is None:
                raise
            print_once("interrupted: finished predictions are kept; the same command continues", err=True)
            raise typer.Exit(3) from None
    for name, notes in all_notes.items():
        _print_notes(f"{name}: " if len(names) > 1 else "", notes)
    if any(notes.failures for notes in all_notes.values()):
        raise typer.Exit(1)


def _predict_file(predictor: "Predictor", name: str, out: Path | None) -> "Notes":
    """Predict the lines of a file or of standard input, to a file or to standard output."""
    from anyformer.cli.progress import counting_lines
    from anyformer.generation.batch.input_lines import LineReader
    from anyformer.generation.batch.partial_file import PartialFile
    from anyformer.generation.batch.stream import Notes, Sink, TextSink, predict_stream

    with ExitStack() as stack:
        file, size = stack.enter_context(_open(name))
        reader, notes = LineReader(file, name), Notes()
        sink: Sink = TextSink(sys.stdout)
        if out is not None and out.exists() and not out.is_file():  # a device or a pipe
            sink = TextSink(stack.enter_context(out.open("w", encoding="utf-8")))
        elif out is not None:
            sink = partial = stack.enter_context(PartialFile(out, predictor.identity()).open(reader))
            notes = partial.notes
            if notes.lines:
                typer.echo(f"{out}: continues after line {notes.lines:,}", err=True)
        advance = stack.enter_context(counting_lines(size))
        advance.skip(reader.bytes)
        predict_stream(predictor, reader, sink, notes, advance)
    return notes


def _predict_files(
    predictor: "Predictor", names: list[str], out: Path, ray: dict[str, Any] | None
) -> dict[str, "Notes"]:
    """Predict the lines of files to files of the same names in a folder; `ray` has the options of a cluster."""
    from anyformer.cli.progress import counting_lines
    from anyformer.generation.batch.predictor import Predictor
    from anyformer.generation.batch.shards import LocalWorker, Workers, predict_files

    identity = predictor.identity()
    workers: Workers = LocalWorker(predictor)
    if ray is not None:
        from anyformer.generation.batch.ray_workers import RayWorkers

        identity["device"] = "cuda" if ray["gpus"] else "cpu"
        given = {"address": os.environ.get("RAY_ADDRESS") or None} | {k: v for k, v in ray.items() if v is not None}
        workers = RayWorkers(Predictor(predictor.folder.resolve(), **_absolute(predictor.options)), **given)
    with counting_lines(sum(os.path.getsize(name) for name in names)) as advance:
        found = predict_files(predictor, identity, list(map(Path, names)), out, workers, advance)
    return {str(file): notes for file, notes in found.items()}


def _absolute(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the full path of a draft run, for workers in other folders."""
    return {**options, "draft": Path(options["draft"]).resolve()} if options.get("draft") else options


@contextmanager
def _open(name: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """Open a stream of lines; yield it with its size, if that is known. A picture or sound is one line, its name."""
    from anyformer.data.media_files import is_media_file

    if is_media_file(name):
        yield io.BytesIO(os.fsencode(name)), None
    elif name == "-":
        yield sys.stdin.buffer, None
    else:
        with Path(name).open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size


def _print_notes(before: str, notes: "Notes") -> None:
    """Print which lines hold unknown tokens, and which failed."""
    if notes.unknowns:
        shown = ", ".join(map(str, notes.unknown[:5])) + (", ..." if notes.unknowns > 5 else "")
        typer.echo(f"{before}{notes.unknowns:,} of {notes.lines:,} lines {UNKNOWN}: line {shown}", err=True)
    if notes.failures:
        more = f", ... ({notes.failures:,} in all)" if notes.failures > len(notes.failed) else ""
        where = f"line{'s' * (notes.failures > 1)} {', '.join(map(str, notes.failed))}{more}"
        typer.echo(f"{before}{where}: the model's logits are not finite", err=True)


def _check_options(predictor: "Predictor", **given: object) -> None:
    """Refuse options that are of other tasks."""
    from anyformer.config.part import kind_of
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.recipe import AnyTask

    spec = predictor.run.spec
    for name, value in given.items():
        if value in (None, False, []) or name in spec.predict_options:
            continue
        takers = [kind_of(task) for task in AnyTask.choices() if name in getattr(task, "predict_options", ())]
        tasks = f"task{'s' * (len(takers) > 1)} {' and '.join(takers)}"
        flag = f"--{name.removesuffix('s') if name == 'labels' else name.replace('_', '-')}"
        raise ConfigError([Fault(flag, f"is for runs of the {tasks}, not {spec.kind}")])


def _check_paths(names: list[str], out: Path | None, engine: str, ray: dict[str, Any]) -> None:
    """Raise the faults of the command line before anything is loaded."""
    from anyformer.config.spec import ConfigError, Fault, close_file

    faults = []
    if engine != "ray":
        faults += [Fault(f"--{name}", "belongs to --engine ray") for name, value in ray.items() if value is not None]
    for name in names:
        if name == "-" and (len(names) > 1 or engine == "ray"):
            faults.append(Fault("-", "standard input is for one process alone: name files"))
        elif name != "-" and not Path(name).is_file():
            close = close_file(name)
            faults.append(Fault(name, "is not a file" + (f"; did you mean '{close}'?" if close else "")))
    if engine == "ray" or len(names) > 1:
        why = "with --engine ray" if engine == "ray" else "of several files"
        if out is None:
            faults.append(Fault("--out", f"is missing: {why}, name a folder for the predictions"))
        elif out.exists() and not out.is_dir():
            faults.append(Fault(str(out), f"is a file: {why}, --out is a folder for the predictions"))
    elif out is not None and (out.is_dir() or not out.parent.is_dir()):  # before hours of work
        what = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        faults.append(Fault(str(out), f"{what}: --out is the file for the predictions"))
    if faults:
        raise ConfigError(faults)
