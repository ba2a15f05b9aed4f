"""`train`, `evaluate`, `import`, `merge` and `export`."""

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from anyformer.cli.app import Json, app, json_line, print_once
from anyformer.cli.torch_import import import_torch, start_loading

if TYPE_CHECKING:
    from anyformer.nn.transforms.rounding import Bits
    from anyformer.runs.run import Run
    from anyformer.tasks.base import Metrics

AUTO = ("--resume", "auto")
Folder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


def _recipes(incomplete: str) -> list[str]:
    from anyformer.recipe.ready import names

    return [name for name in names() if name.startswith(incomplete)]


class TrainCommand(TyperCommand):
    """Command that takes `--resume auto`, as elastic launchers spell it, for `--resume`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        after = ["", *args]
        return super().parse_args(ctx, [word for word, last in zip(args, after, strict=False) if (last, word) != AUTO])


@app.command("train", cls=TrainCommand)
def train_(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe's name, or a .toml or .json file.", autocompletion=_recipes),
    ] = "sort",
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings to change: train.steps=200, model.decoder.depth=4."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/RECIPE.")] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in that folder, or start it if there is none; also `--resume auto`."
        ),
    ] = False,
    allow_changed_data: Annotated[
        bool,
        typer.Option(
            "--allow-changed-data", help="With --resume: accept data files that changed since the last checkpoint."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Read the data, build the model, take a few steps, and print memory and time. No run is written.",
        ),
    ] = False,
) -> None:
    """Train a model by a recipe. Ctrl-C saves a checkpoint; --resume continues from it with the same result."""
    if dry_run:
        _plan(recipe, changes, out, resume or allow_changed_data)
        return
    start_loading()
    _refuse_useless_restart()
    try:
        _train(recipe, changes or [], out, resume=resume, allow_changed_data=allow_changed_data)
    except KeyboardInterrupt:
        print_once("interrupted before the first checkpoint: nothing is saved", err=True)
        raise typer.Exit(1) from None


def _train(recipe: str, changes: list[str], out: Path | None, *, resume: bool, allow_changed_data: bool) -> None:
    """Train and print the next commands."""
    began = time.monotonic()
    from anyformer.training.signals import Signals

    with Signals(lambda: print_once("stopping after this step; a second signal stops at once", err=True)):
        import_torch()
        from anyformer.training.train import train

        with _errors_as_lines():
            options: dict[str, Any] = {"resume": resume, "allow_changed_data": allow_changed_data}
            run = train(recipe, out, changes, **options, began=began)
        print_once(f"trained: {run.folder}\n{_next_commands(run)}{_longer_command(run, recipe, changes, out)}")


def _refuse_useless_restart() -> None:
    """Exit at once if torchrun restarted a training that cannot succeed, such as one with wrong input."""
    from anyformer.runs.processes import final_failure, record_failure, restart_count

    if failure := final_failure():
        reason, code = failure
        print_once(f"restart {restart_count()}: not tried again, as it would fail again: {reason}", err=True)
        record_failure(reason, code)
        raise typer.Exit(code)


def _longer_command(run: "Run", recipe: str, changes: list[str], out: Path | None) -> str:
    """Return a line with the command that trains twice as long, if the run was still improving; else nothing."""
    from anyformer.config import io
    from anyformer.recipe import Recipe
    from anyformer.training.log import is_improving

    train = io.load(Recipe, run.folder / "recipe.toml").train
    if not is_improving(run.folder, train.best):
        return ""
    name = "steps" if train.minutes is None else "minutes"
    kept = [change for change in changes if not change.startswith(f"train.{name}=")]
    words = [
        recipe,
        *kept,
        f"train.{name}={2 * getattr(train, name):g}",
        *(["--out", str(out)] if out else []),
        "--resume",
    ]
    return f"\nlonger:  anyformer train {shlex.join(words)}   (validation {train.best} was still improving)"


def _next_commands(run: "Run") -> str:
    """Return the commands that use a trained run: its answers, and its test metrics if the recipe has test data."""
    from anyformer.config import io
    from anyformer.recipe import Recipe

    folder = shlex.quote(str(run.folder))
    lines = [run.spec.command.format(run=folder)]
    if io.load(Recipe, run.folder / "recipe.toml").data.test is not None:
        lines.append(f"evaluate {folder}")
    return "\n".join(f"{'next:' if i == 0 else '':<8} anyformer {line}" for i, line in enumerate(lines))


def _plan(recipe: str, changes: list[str] | None, out: Path | None, resume: bool) -> None:
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.recipe.ready import read_recipe
    from anyformer.training.plan import plan

    if out is not None or resume:
        raise ConfigError([Fault("--dry-run", "writes nothing: leave out --out and --resume")])
    with _errors_as_lines():
        typer.echo(plan(read_recipe(recipe, changes or ())).render())


@contextmanager
def _errors_as_lines() -> Iterator[None]:
    """Print the errors of a training as one line each, and exit with their codes."""
    from anyformer.runs.processes import record_failure
    from anyformer.training.loop import Diverged, Interrupted
    from anyformer.training.out_of_memory import OutOfMemory
    from anyformer.training.parallel import LostProcess

    try:
        yield
    except Interrupted as error:
        print_once(str(error), err=True)
        raise typer.Exit(3) from None
    except (Diverged, FloatingPointError) as error:
        print_once(str(error), err=True)
        record_failure(str(error), exit_code=1)
        raise typer.Exit(1) from None
    except (OutOfMemory, LostProcess) as error:  # any process may raise it
        record_failure(str(error))
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@app.command("evaluate")
def evaluate_(
    run: Folder,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings of the run's recipe to change: data.root=DIR."),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Split of the recipe's data: train, valid, test (all test sets), or the name of one.")
    ] = "test",
    by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Also report the metrics for each value of this column.")
    ] = None,
    bits: Annotated[int | None, typer.Option(metavar="8|4", help="Quantise weights to this many bits.")] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Evaluate a language model on this task of lm-evaluation-harness, a .yaml file or the name of one; "
            "may be repeated.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of each task.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run on the data of its recipe, or on tasks. With --json the last line is one JSON object."""
    from anyformer.cli.decoding_options import checked_bits
    from anyformer.config.spec import ConfigError, Fault

    width = checked_bits(bits)
    if tasks:
        if changes or by or split != "test":
            raise ConfigError([Fault("--tasks", "replaces the recipe's data: leave out KEY=VALUE, --split and --by")])
        _evaluate_tasks(run, tasks, limit, width, as_json)
        return
    if limit is not None:
        raise ConfigError([Fault("--limit", "is for --tasks")])
    import_torch()
    from anyformer.training.train import evaluate

    with _errors_as_lines():
        metrics = evaluate(run, changes or (), split, by, width)
    _print_metrics(metrics, {"split": split}, as_json)


def _evaluate_tasks(folder: Path, tasks: list[str], limit: int | None, bits: "Bits | None", as_json: bool) -> None:
    """Print the metrics of each task of lm-evaluation-harness."""
    from anyformer.cli.decoding_options import note_unfinished
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.runs.run import load

    try:
        from anyformer.lab.evaluation.harness import evaluate_tasks
    except ImportError as error:
        raise ConfigError([Fault("--tasks", str(error))]) from None
    run = load(folder)
    run = run if bits is None else run.quantise(bits)
    note_unfinished(run, folder)
    for metrics in evaluate_tasks(run, tasks, limit):
        _print_metrics(metrics, {}, as_json)


def _print_metrics(metrics: "Metrics", more: dict[str, str], as_json: bool) -> None:
    """Print metrics as lines, or as one JSON object."""
    if as_json:
        found = {"n": metrics.count, "metrics": metrics.values, "notes": metrics.notes}
        typer.echo(json_line({"task": metrics.task, **more, **found}))
        return
    head = {"task": metrics.task, **more, "n": metrics.count, **metrics.values}
    lines = [*_lines(head), *_lines(metrics.notes)]  # not merged: both have a "bleu", its value and its signature
    width = max(16, *(len(name) for name, _ in lines))
    for name, text in lines:
        typer.echo(f"{name:<{width}} {text}")


def _lines(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each value; nested tables have dotted names."""
    for key, value in values.items():
        name = f"{before}{key}"
        match value:
            case dict():
                yield from _lines(value, f"{name}.")
            case list():
                yield from ((name, str(item)) for item in value)
            case float():
                yield name, f"{value:.6g}"
            case int():
                yield name, f"{value:,}"
            case _:
                yield name, str(value)


@app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR|FILE|hf:OWNER/NAME",
            help="Folder with a config.json and weights, a folder of PEFT with a LoRA adapter, a .gguf file of "
            "llama.cpp, a .bin file of llama2.c, a .pt file of nanoGPT, minGPT or nanochat, or a public model by name, "
            "with @REVISION if it is not the newest.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder of the new run. Default: runs/NAME.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Its tokenizer, if that is not in the folder.")] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Also read pytorch_model.bin and .pt files: weights and plain data alone."),
    ] = False,
    family: Annotated[
        str | None, typer.Option(help="Family of the model, if model_type in config.json is missing or unknown.")
    ] = None,
    ignore_field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Ignore this field of config.json (repeatable). The imported model may then differ.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|hf:OWNER/NAME", help="Model of a PEFT adapter: a run, a folder or a name. Default: its own."
        ),
    ] = None,
) -> None:
    """Import a model of another program as a run."""
    from anyformer.interop import import_model
    from anyformer.interop.hub import folder_name

    out = Path("runs") / folder_name(source) if out is None else out
    run = import_model(
        source,
        out,
        tokenizer=tokenizer,
        allow_pickle=allow_pickle,
        family=family,
        ignore_fields=ignore_field or (),
        base=base,
    )
    typer.echo(f"imported: {out}, {run.model.num_parameters():,} parameters, {run.tokenizer.size:,} tokens")
    if defaults := run.defaults.describe():
        typer.echo(f"defaults: {defaults}")
    writes = run.config.decoder is not None and run.spec.kind != "transcribe"
    use = f"generate {out} --prompt TEXT" if writes else f"predict {out} FILE"
    chats = writes and run.config.encoder is None and run.chat_template is not None
    typer.echo(f"next:     anyformer {f'chat {out}' if chats else use}")


@app.command("merge")
def merge_(
    run: Folder,
    out: Annotated[Path, typer.Option(help="Folder of the new run.")],
) -> None:
    """Merge a run's LoRA adapter into its weights and write a new run."""
    from anyformer.training.train import merge

    made = merge(run, out)
    typer.echo(f"merged: {out}, {made.model.num_parameters():,} parameters")


BY_SUFFIX: dict[str, Literal["onnx", "gguf"]] = {".onnx": "onnx", ".gguf": "gguf"}


@app.command("export")
def export_(
    run: Folder,
    out: Annotated[
        Path | None,
        typer.Argument(metavar="DIR|FILE", help="Folder to write, or file for ONNX and GGUF; or give --out."),
    ] = None,
    to: Annotated[
        Literal["hf", "peft", "onnx", "gguf", "ctranslate2"] | None,
        typer.Option(
            "--format",
            help="hf: for transformers; peft: its LoRA adapter alone, for PEFT; onnx: for ONNX Runtime; "
            "gguf: for llama.cpp; ctranslate2: for CTranslate2. Default: that of a FILE.onnx or FILE.gguf, else hf.",
        ),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Family of public models, if several fit.")] = None,
    dtype: Annotated[
        Literal["f32", "f16", "q8_0"] | None,
        typer.Option(help="Type of the weights in a GGUF file; q8_0: 8 bits. Default: f32."),
    ] = None,
    to_path: Annotated[Path | None, typer.Option("--out", help="The same as DIR|FILE.")] = None,
) -> None:
    """Export a run for other programs. An error names the parts that they do not support."""
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.interop.ctranslate2_export import export_ctranslate2
    from anyformer.interop.gguf_export import to_gguf
    from anyformer.interop.hf_folder import to_hf
    from anyformer.interop.onnx import export_onnx
    from anyformer.interop.peft import export_peft
    from anyformer.runs.run import load

    if (out is None) == (to_path is None):
        raise ConfigError([Fault("--out", "give the folder or file to write once, as DIR|FILE or by --out")])
    out = out or to_path
    assert out is not None
    to = to or BY_SUFFIX.get(out.suffix.lower(), "hf")
    if to in ("onnx", "gguf") and family is not None:
        raise ConfigError([Fault("--family", f"is for --format hf: {to.upper()} has no families")])
    if to != "gguf" and dtype is not None:
        raise ConfigError([Fault("--dtype", "is for --format gguf")])
    loaded = load(run, device="cpu")
    match to:
        case "gguf":
            made = f"{out}, as gguf, {to_gguf(loaded, out, dtype=dtype or 'f32')} in {dtype or 'f32'}"
        case "onnx":
            made = f"{export_onnx(loaded, out)}, as onnx"
        case "peft":
            made = f"{out}, an adapter of {export_peft(loaded, out, family=family)}"
        case "ctranslate2":
            made = f"{out}, as ctranslate2, {export_ctranslate2(loaded, out, family=family)}"
        case "hf":
            made = f"{out}, as {to_hf(loaded, out, family=family)}"
    typer.echo(f"exported: {made}")
