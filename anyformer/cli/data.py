"""`data`: data sets of the recipes, token shards of corpora that are larger than memory, and arrays of images."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from anyformer.cli.app import app

if TYPE_CHECKING:
    from anyformer.data.shards import Index
    from anyformer.data.tokenizer import TextTokenizer
    from anyformer.recipe import Tokenizer

data_app = typer.Typer(
    no_args_is_help=True, help="List and fetch data sets; write token shards of large corpora, and arrays of images."
)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list() -> None:
    """List the data sets of the recipes: size, state on this machine, licence, recipes that use them."""
    from anyformer.data.datasets.registry import registry
    from anyformer.data.datasets.storage import state
    from anyformer.recipe import ready as recipes

    used = {name: recipes.read_recipe(name).data.sets for name in recipes.names()}
    for name, one in registry().items():
        here = state(one) if one.verified or state(one) == "present" else f"{state(one)}, unverified"
        typer.echo(f"{name:<18} {one.bytes / 1e6:>5.1f} MB  {here:<24} {one.licence}")
        typer.echo(f"{'':<18} {one.about}")
        typer.echo(f"{'':<18} recipes: {', '.join(recipe for recipe, sets in used.items() if name in sets)}")


def _sets(incomplete: str) -> list[str]:
    from anyformer.data.datasets.registry import registry

    return [name for name in registry() if name.startswith(incomplete)]


@data_app.command("fetch")
def data_fetch(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Data sets: see `data list`.", autocompletion=_sets)
    ],
    mirror: Annotated[
        str | None,
        typer.Option(metavar="DIR|URL", help="Folder or address with files as OWNER/REPOSITORY/COMMIT/PATH."),
    ] = None,
) -> None:
    """Download data sets to ANYFORMER_DATA or to the cache folder. A stopped download is resumed."""
    from anyformer.cli.progress import counting_bytes
    from anyformer.config.spec import ConfigError, Fault, did_you_mean
    from anyformer.data.datasets.download import DownloadFailed, fetch
    from anyformer.data.datasets.registry import HOST, registry
    from anyformer.data.datasets.storage import download_folder, state

    known = registry()
    if wrong := [name for name in names if name not in known]:
        raise ConfigError([Fault("", f"'{name}': no such data set; {did_you_mean(name, known)}") for name in wrong])
    for name in dict.fromkeys(names):
        one = known[name]
        if not one.verified and state(one) != "present":
            typer.echo(f"{name}: this address was never tried ({one.note})", err=True)
        try:
            with counting_bytes(name) as progress:
                folder = fetch(one, download_folder(), mirror or HOST, progress)
        except DownloadFailed as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("interrupted: complete files are kept; the same command resumes", err=True)
            raise typer.Exit(3) from None
        typer.echo(f"{name}: {folder} (licence: {one.licence})")


@data_app.command("prepare")
def data_prepare(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Text, .jsonl or .parquet; patterns such as '*.txt.gz' too.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the shards; an unfinished one is continued.")],
    tokenizer: Annotated[
        str,
        typer.Option(help="A tokenizer.json, a run, or one to train on a sample: bytes, '{kind=\"bpe\", size=32000}'."),
    ],
    document: Annotated[
        Literal["line", "blank", "file"],
        typer.Option(help="A document of plain text: a line, a paragraph between blank lines, or a file."),
    ] = "line",
    column: Annotated[str, typer.Option(help="Of JSON and Parquet: the text, such as text or meta.title.")] = "text",
    encoding: Annotated[str, typer.Option(help="Of the files: utf-8, latin-1, cp949, ...")] = "utf-8",
    sample: Annotated[float, typer.Option(min=0.001, help="Megabytes on which a tokenizer is trained.")] = 100.0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: the number of cores.")] = None,
    on_bad_row: Annotated[
        Literal["error", "skip"], typer.Option(help="Stop at text that cannot be read, or leave it out.")
    ] = "error",
) -> None:
    """Write token shards of files of any size, in little memory. If it is stopped, the same command continues."""
    from anyformer.cli.progress import counting_bytes
    from anyformer.data.chunks import ChunkedFiles
    from anyformer.data.shard_writer import WorkerLost, prepare
    from anyformer.kernels.hardware import usable_cores

    paths, made = _found(files), _tokenizer(tokenizer)
    how = ChunkedFiles(document, column, encoding)
    try:
        with counting_bytes("reading") as progress:
            index = prepare(
                paths,
                out,
                made,
                how,
                sample=int(sample * 1e6),
                skip_bad=on_bad_row == "skip",
                workers=workers or usable_cores(),
                progress=progress,
            )
    except WorkerLost as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("interrupted: finished shards are kept; the same command continues", err=True)
        raise typer.Exit(3) from None
    _show(out, index)


@data_app.command("pack")
def data_pack(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Class folders of images (cat/1.png), or splits of them (train/cat/).")
    ],
    out: Annotated[Path, typer.Option(help="The .npz file.")],
    on_bad_file: Annotated[
        Literal["error", "skip"], typer.Option(help="Stop at a damaged image or one of another size, or leave it out.")
    ] = "error",
) -> None:
    """Pack folders of images into one array file, for sources of the kind `arrays`. Nothing is resized."""
    from anyformer.cli.progress import counting
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.data.image_pack import find_images, pack_images

    if out.suffix != ".npz" or not out.parent.is_dir():
        what = "must end in .npz" if out.suffix != ".npz" else f"there is no folder {out.parent}"
        raise ConfigError([Fault("out", f"= '{out}': {what}")])
    found = find_images(folder)
    with counting(sum(map(len, found.values())), "images") as progress:
        arrays, bad = pack_images(found, out, on_bad_file == "skip", progress)
    typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
    for name, array in arrays.items():
        typer.echo(f"{name:<14} {array.dtype.name:<8} {list(array.shape)}")
    for why in bad:
        typer.echo(f"left out: {why}", err=True)


@data_app.command("show")
def data_show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of shards.")],
    check: Annotated[bool, typer.Option("--check", help="Read all shards and verify their checksums.")] = False,
) -> None:
    """Print the contents of a folder of shards."""
    from anyformer.data.shards import Corpus

    corpus = Corpus(folder)
    corpus.tokenizer()
    if check:
        corpus.verify()
    _show(folder, corpus.index)


def _show(folder: Path, index: "Index") -> None:
    tokens, text, files = index.total("tokens"), index.total("bytes"), len(index.shards)
    typer.echo(f"{folder}: {tokens:,} tokens in {files:,} file{'s' if files > 1 else ''}")
    typer.echo(f"documents  {index.total('documents'):,}")
    typer.echo(f"text       {text:,} bytes, {text / tokens:.2f} to a token")
    typer.echo(f"tokenizer  {folder / 'tokenizer.json'}, {index.vocabulary:,} ids of {index.dtype[-1]} bytes")
    if bad := index.total("bad"):
        named = "; ".join((*index.first_bad, "...") if bad > len(index.first_bad) else index.first_bad)
        typer.echo(f"left out   {bad:,} bad row{'s' if bad > 1 else ''}: {named}")


def _found(patterns: list[str]) -> list[Path]:
    """The files that are meant, each once, in order."""
    import glob

    from anyformer.config.spec import ConfigError, Fault, visible

    found: dict[Path, None] = {}
    for pattern in patterns:
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise ConfigError([Fault("", f"{visible(pattern)}: no such file")])
        for path in map(Path, paths):
            if not path.is_file():
                raise ConfigError([Fault("", f"{visible(str(path))}: is not a regular file")])
            found[path] = None
    return list(found)


def _tokenizer(text: str) -> "Tokenizer | TextTokenizer":
    """One that is there, or the spec of one that is to be trained."""
    from anyformer.config.overrides import assignment
    from anyformer.config.parse import build
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.data.tokenizer import TextTokenizer
    from anyformer.recipe import trainable

    if os.path.exists(text):
        return TextTokenizer.load(text)
    _, value = assignment(f"tokenizer={text}")
    fields = {"kind": value} if isinstance(value, str) else value
    known = trainable()
    if not isinstance(fields, dict) or fields.get("kind") not in known:
        what = f"= '{text}': no such file, and no kind; such as bytes or {{kind=\"bpe\", size=32000}}"
        raise ConfigError([Fault("tokenizer", f"{what}; known are {', '.join(known)}")])
    try:
        return build(known[fields["kind"]], fields)
    except ConfigError as error:
        raise ConfigError(fault.under("tokenizer") for fault in error.faults) from None
