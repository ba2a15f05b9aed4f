"""Reads the documentation pages: their fenced blocks, the commands in them, and what is wrong with a command.

A block that must not run (a server, an hour of training) has an HTML comment before it: <!-- not run: reason -->
"""

import contextlib
import io
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]

FENCE = re.compile(
    r"(?P<skip><!--\s*not run:[^>]*-->\s*\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^[ ]*```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block, the line it starts on, and whether it may run."""

    line: int
    language: str
    body: str
    run: bool


def blocks(text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(line, found["language"], textwrap.dedent(found["body"]), run=not found["skip"])


def check_outputs(text: str) -> int:
    """Run the Python of a page in one namespace; each block prints the text below it. Return the number of blocks."""
    names: dict[str, object] = {"__name__": "__main__"}
    checked = 0
    for block, below in pairwise([*blocks(text), None]):
        if block is not None and block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(block.body, names)
            assert below is not None
            assert below.language == "text", "the output stands below the code"
            assert printed.getvalue() == below.body
            checked += 1
    return checked


def commands(body: str) -> list[str]:
    """The lines of a shell block, continued lines joined, without prompts and comments."""
    lines = (line.strip().removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def words(command: str) -> list[list[str]]:
    """The simple commands of a line, each as its words, without leading assignments."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    simple: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|;&"):
            simple.append([])
        elif simple[-1] or not re.match(r"\w+=", word):
            simple[-1].append(word)
    return [part for part in simple if part]


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def faults(command: str) -> Iterator[str]:
    """What is wrong with a line that is not run: a target, file or extra that is not there."""
    for program, *rest in words(command):
        if program == "make":
            yield from (f"no target {word}" for word in rest if re.fullmatch(r"[\w-]+", word) and word not in targets())
        elif re.fullmatch(r"(.*/)?python[\d.]*", program) and rest and rest[0].endswith(".py"):
            if not (ROOT / rest[0]).exists():
                yield f"no file {rest[0]}"
        elif program == "pip":
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for extras in re.findall(r"(?:\.|anyformer)\[([^\]]*)\]", command):
                yield from (f"no extra {extra}" for extra in extras.split(",") if extra.strip() not in known)
