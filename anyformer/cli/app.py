"""The program: its help, its exit codes, and the options that commands share.

Exit codes: 0 done; 1 failed at run time, or interrupted with nothing saved; 2 wrong input, one line per fault on
stderr; 3 interrupted and saved: the same command continues, `train` with --resume.
"""

import atexit
import errno
import gc
import io as streams
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from anyformer import __version__
from anyformer.kernels.conventions import Note

# Errors caused by a path in the input, not by the machine.
PATH_ERRORS = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
)


VERBS = "anyformer.verbs"  # of entry points


def print_once(text: str, err: bool = False) -> None:
    """Print a line that would be the same in all processes of torchrun: only the first prints it."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0":
        typer.echo(text, err=err)


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    print_once(f"{'note' if issubclass(category, Note) else 'warning'}: {message}", err=True)


class Verbs(TyperGroup):
    """Group of commands that prints warnings, wrong input, unusable paths, interruption and lack of memory as lines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args, files = _take_imports(args)
        if files and not ctx.resilient_parsing:  # which completes a word
            _import(files)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *self._from_outside()]

    def get_command(self, ctx: Any, name: str) -> Any:
        return super().get_command(ctx, name) or self._from_outside().get(name)

    def _from_outside(self) -> dict[str, Any]:
        """Return the commands of packages and of the user's files."""
        if entry_points(group=VERBS):
            _import(group=VERBS)
        module = sys.modules.get("anyformer.cli.verb")  # not imported: no file and no package has a verb
        found = dict(module.commands()) if module else {}
        for name in found.keys() & self.commands.keys():
            raise _ended(2, f"{name}: is a verb of anyformer: give yours another kind")
        return found

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("always", category=UserWarning, module="anyformer")
                warnings.filterwarnings("ignore", ".*training has not finished")  # commands print this with the step
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except KeyboardInterrupt:  # commands that save something raise an error or exit by themselves
            print_once("interrupted", err=True)
            raise typer.Exit(1) from None
        except (ValueError, OSError, RuntimeError, MemoryError, FloatingPointError) as error:
            code, line = _exit_code(error)
            if code is None:
                raise
        raise _ended(code, line)  # after the block above: no traceback keeps tensors alive


def _ended(code: int, line: str) -> typer.Exit:
    """Print the faults, and return the exit of the program."""
    print_once(line, err=True)
    if code == 2:
        from anyformer.runs.processes import record_failure

        record_failure(line, exit_code=code)
    return typer.Exit(code)


def _import(files: Iterable[str] = (), group: str | None = None) -> None:
    """Import the user's files, and the entry points of a group."""
    from anyformer.config.outside import find, import_file
    from anyformer.config.spec import ConfigError

    try:
        for file in files:
            import_file(file)
        if group:
            find(group)
    except ConfigError as error:
        raise _ended(2, str(error)) from None


def _take_imports(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without each `--import FILE`, which may be before or after the verb, and the files."""
    rest, files, waiting = list[str](), list[str](), iter(args)
    for arg in waiting:
        if arg == "--":
            return [*rest, arg, *waiting], files
        name, equals, value = arg.partition("=")
        if name != "--import":
            rest.append(arg)
        elif equals or (value := next(waiting, "")):
            files.append(value)
        else:
            rest.append(arg)  # refused as an option that is not known
    return rest, files


def _exit_code(error: Exception) -> tuple[int | None, str]:
    """Return the exit code and the message of an error that a user can fix; None for any other."""
    from anyformer.config.spec import ConfigError, visible  # imported late: `anyformer --help` imports no pydantic
    from anyformer.kernels.hardware import is_out_of_memory

    if isinstance(error, ConfigError):
        return 2, str(error)
    if isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename is not None:
        return 2, f"{visible(os.fsdecode(error.filename))}: {error.strerror}"
    if isinstance(error, FloatingPointError):  # the outputs of a model are not finite
        return 1, str(error)
    if is_out_of_memory(error):
        details = str(error).partition("DefaultCPUAllocator: ")[2] or "use a smaller model or less data"
        return 1, f"out of memory: {details}"
    return None, ""


class SingleOptions(TyperCommand):
    """Command that refuses an option with one value which is given twice, rather than keep the last value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from anyformer.config.spec import ConfigError, Fault

        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        single = [one for one in order if isinstance(one, TyperOption) and not one.multiple and not one.is_flag]
        if repeated := [one for one in dict.fromkeys(single) if single.count(one) > 1]:
            raise ConfigError(Fault(one.opts[0], "is given twice: give it once") for one in repeated)
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Any Transformer is one config away.

A model is a preset or a .toml or .json file, changed by KEY=VALUE. A recipe describes a whole training run.

\b
  anyformer presets                                list the well-known models
  anyformer count gpt2 depth=24 width=1024         parameters and FLOPs of a resized model
  anyformer config show llama > my.toml            write a config to start from
  anyformer count my.toml decoder.position=alibi   the same with one part changed
  anyformer train sort --dry-run                   data, memory and time of a training
  anyformer train sort                             train
""",
    epilog="With --import FILE, before or after the verb, the parts in a Python file of yours are known, too. "
    "Exit codes: 0 done, 1 failed at run time, 2 wrong input, 3 interrupted and saved.",
)


def main() -> None:
    """Run the program. SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # before torch is loaded: idle threads sleep, as spinning ones would take the cores from other programs and from us
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # torch creates many permanent objects, and searching them for garbage is slow, most of all at exit
    gc.set_threshold(100_000)
    atexit.register(_skip_last_collection)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, streams.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # never fail on characters that a terminal cannot show
    try:
        app(prog_name="anyformer")
    finally:  # a signal while Python shuts down must not change the exit code
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _skip_last_collection() -> None:
    """Skip the search for garbage at exit, unless code was compiled.

    torch's compiler keeps file locks until the end. Without the search, they outlive the modules that their finalizers
    use: "Exception ignored in BaseFileLock.__del__".
    """
    if "torch._inductor" not in sys.modules:
        gc.freeze()


RayAddress = Annotated[
    str | None,
    typer.Option(help="With ray: a running cluster, HOST:PORT or auto. Default: $RAY_ADDRESS, or a new one here."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def json_line(value: Any) -> str:
    """Return a value as one line of JSON; NaN and infinities, which JSON does not have, are null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anyformer {__version__}")
        raise typer.Exit


@app.callback()
def anyformer(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...
