"""A verb as a user writes it."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import typer

from anyformer.cli.verb import Verb
from anyformer.config import ConfigError, Fault


class Words(Verb):
    """Count the words of a text file."""

    kind: Literal["words"] = "words"

    def run(
        self,
        file: Annotated[Path, typer.Argument(help="A text file.")],
        top: Annotated[int, typer.Option(min=1, help="Number of words to print.")] = 3,
    ) -> None:
        if not file.is_file():
            raise ConfigError([Fault(str(file), "is no file")])
        for word, count in Counter(file.read_text(encoding="utf-8").split()).most_common(top):
            print(f"{count} {word}")
