"""Commands in tables and sentences of the pages: the CLI accepts their options, and what they name exists.

`docs_site/test_pages_run.py` runs the blocks of commands. Here a command is parsed by the real CLI; recipes are read
with their settings, and commands that only print something really run. In a command, a word in capital letters is a
placeholder.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config import ConfigError
from anyformer.lab.experiment import every
from anyformer.recipe.ready import read_recipe
from tests.pages import FENCE, PAGES, ROOT, faults

CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PRINTS = ("presets", "recipes", "doctor", "count", "config", "lab")  # commands that run, if all they name exists
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*(\.\w+)?")
ANY_RECIPE = ("sort", "multi30k-en-de", "shakespeare")  # one of them must take the settings after `train ...`


def inline(text: str) -> Iterator[str]:
    """Yield the inline code of a page, without its blocks; a piece of code may continue on the next line."""
    for found in CODE.finditer(FENCE.sub("", text)):
        if "\n\n" not in found[1]:
            yield " ".join(found[1].split())


def command(code: str) -> list[str] | None:
    """Return the words after `anyformer` of a command in inline code, also after `python -m`; None for other code."""
    found = re.match(r"(?:.*-m )?anyformer ([a-z].*)", code)
    return shlex.split(found[1].partition(" > ")[0].replace("\\|", "|")) if found else None


def check(words: list[str]) -> str:
    """Return what is wrong with the words of a command, or nothing."""
    verb, *rest = (word.partition("|")[0] if number < 2 else word for number, word in enumerate(words))
    left = [word for word in rest if word not in ("...", "…", "key=value", "KEY=VALUE")]
    given, error = parse([verb, *(word for word in left if word != "--help")])
    if given is None:
        after = left[verb in ("config", "data", "tokenizer") :]  # of these the next word is a command, too
        named_only = not after or after[0].startswith("-")  # an option in a sentence, without the rest of the command
        return "" if named_only and re.search("Missing argument|requires an argument", error) else error
    if verb == "train":
        name, changes = given["recipe"], given["changes"] or []
        return recipe_fault("...", [name, *changes]) if "..." in rest and "=" in name else recipe_fault(name, changes)
    if verb == "lab" and left and left[0] != "run":
        known = ("all", *(experiment.kind for experiment in every()))
        unknown = [name for name in left[: left.index("--size")] if name not in known] if "--size" in left else []
        return f"no experiments {unknown}" if unknown else ""
    return ran(verb, left) if verb in PRINTS and (verb != "lab" or not left) else ""


def parse(words: list[str]) -> tuple[dict[str, Any] | None, str]:
    """Return the parameters that the CLI takes from the words, without running the command; or None and the error."""
    group: Any = typer.main.get_command(app)
    found: list[dict[str, Any]] = []

    def record(command: Any) -> None:
        for inner in getattr(command, "commands", {}).values():
            record(inner)
        if not hasattr(command, "commands"):
            command.callback = lambda **params: found.append(params)

    record(group)
    with redirect_stdout(StringIO()) as out, redirect_stderr(out), pytest.raises(SystemExit):
        group.main(words, prog_name="anyformer")
    return (found[0], "") if found else (None, out.getvalue())


def recipe_fault(name: str, changes: list[str]) -> str:
    """Return why no recipe of this name takes the settings, or nothing; a file of the reader is not checked."""
    if PLACEHOLDER.fullmatch(name) or name.endswith(".toml"):
        return ""
    given = [re.sub(r"=[A-Z]$", "=1", change) for change in changes]
    found = []
    for recipe in ANY_RECIPE if name == "..." else (name,):
        try:
            read_recipe(recipe, given)
        except ConfigError as error:
            found.append(str(error))
        else:
            return ""
    return found[0]


def ran(verb: str, rest: list[str]) -> str:
    """Run a command that prints something; a run or a file of the reader is not there."""
    if any(word.endswith(".toml") or word.startswith("runs/") or PLACEHOLDER.fullmatch(word) for word in rest):
        return ""
    if verb in ("count", "config") and not rest:
        return ""
    done = CliRunner().invoke(app, [verb, *rest])
    return "" if done.exit_code == 0 else f"exit code {done.exit_code}: {done.output}"


@cache
def checked(code: str) -> str:
    words = command(code)
    return check(words) if words else "; ".join(faults(code)) if re.match(r"(make|pip) ", code) else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_in_tables_and_sentences_are_accepted(page: Path) -> None:
    wrong = {code: fault for code in inline(page.read_text(encoding="utf-8")) if (fault := checked(code))}
    assert not wrong


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("anyformer train sort --nonsense 3", "nonsense"),
        ("anyformer train nonsense", "nonsense"),
        ("anyformer train sort model.widht=3", "width"),
        ("torchrun --nproc-per-node 8 -m anyformer train ... train.stepz=3", "steps"),
        ("anyformer nonsense", "nonsense"),
        ("anyformer data nonsense", "nonsense"),
        ("anyformer lab nonsense --size quick", "nonsense"),
        ("anyformer count nonsense", "nonsense"),
        ("anyformer predict runs/mt --beams many", "beams"),
        ("make nonsense", "nonsense"),
    ],
)
def test_a_wrong_command_is_found(code: str, fault: str) -> None:
    assert fault in checked(code)


def test_inline_code_is_found_over_lines_and_not_in_blocks() -> None:
    text = "a `b\nc` | `d` |\n\n```bash\n`e`\n```\n"
    assert list(inline(text)) == ["b c", "d"]
    assert command("python -m anyformer config show multitask > tasks.toml") == ["config", "show", "multitask"]
    assert command("anyformer.config") is None
