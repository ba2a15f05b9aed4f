"""`tokenizer`: training and showing."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anyformer.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator

tokenizer_app = typer.Typer(no_args_is_help=True, help="Train tokenizers, and show the tokens of a text.")
app.add_typer(tokenizer_app, name="tokenizer")


@tokenizer_app.command("train")
def tokenizer_train(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Text files, plain or as .gz.")],
    out: Annotated[Path, typer.Option(help="The folder for tokenizer.json.")],
    kind: Annotated[
        str, typer.Option(help="What a token is: chars, bytes, words, bpe, unigram, wordpiece, or a kind of your own.")
    ] = "bpe",
    size: Annotated[int | None, typer.Option(min=1, help="How many tokens at most; not for chars and bytes.")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Convert text to lower case.")] = False,
    encoding: Annotated[str, typer.Option(help="Of the files: utf-8, latin-1, cp949, ...")] = "utf-8",
) -> None:
    """Train a tokenizer on the lines of text files."""
    from rich.console import Console

    from anyformer.config.parse import build
    from anyformer.config.spec import ConfigError, Fault, did_you_mean
    from anyformer.data.lines import read_lines
    from anyformer.data.tokenizer import file_of, train_tokenizer
    from anyformer.recipe import trainable

    if os.path.exists(path := file_of(out)) or os.path.isfile(out):
        raise ConfigError([Fault(str(path), "exists already; choose another --out")])
    if kind not in (known := trainable()):
        raise ConfigError([Fault("--kind", f"= {kind!r}: unknown kind; {did_you_mean(kind, known)}")])
    given = {"size": size, "lowercase": lowercase or None}
    spec = build(known[kind], {key: value for key, value in given.items() if value is not None})
    example = ""

    def lines() -> "Iterator[str]":
        nonlocal example
        for line in read_lines(files, encoding, Console(stderr=True)):
            example = example or line.strip()
            yield line

    tokenizer = train_tokenizer(spec, lines())
    tokenizer.save(path)
    typer.echo(f"{path}: {tokenizer.size:,} tokens")
    ids = tokenizer.encode(example)[:20]
    typer.echo(f"tokens: {' '.join(map(tokenizer.token, ids))}\n   ids: {' '.join(map(str, ids))}")


@tokenizer_app.command("show")
def tokenizer_show(
    tokenizer: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A tokenizer.json, or a folder with one.")],
    text: Annotated[str, typer.Argument(help="Text to tokenize.")],
) -> None:
    """Print the ids and tokens of a text, a line each; ▁ is a space, <0xE2> a part of a character."""
    from anyformer.data.tokenizer import TextTokenizer

    found = TextTokenizer.load(tokenizer)
    for i in found.encode(text):
        typer.echo(f"{i:>{len(str(found.size))}}  {found.token(i)}")
