"""Tutorials: the list of pages is complete, and their commands are short and parse. `make docs-test` runs them."""

import json
import re
import statistics
from pathlib import Path

import pytest
from typer.main import get_command

from anyformer import count
from anyformer.cli import app
from anyformer.config import io
from anyformer.recipe.ready import read_recipe
from tests.pages import ROOT, blocks, commands, words

FOLDER = ROOT / "docs" / "tutorials"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
LONGEST_COMMAND = 100  # characters


def shown(page: Path) -> list[str]:
    """The commands of a page, line by line, without comments at their ends."""
    found = [block.body for block in blocks(page.read_text(encoding="utf-8")) if block.language == "bash"]
    return [re.sub(r"\s+# .*", "", line) for body in found for line in commands(body)]


def test_the_list_names_every_tutorial_once() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\(([\w-]+\.md)\)", text)) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_short_and_parse(page: Path) -> None:
    lines = shown(page)
    assert any(line.startswith("anyformer train") for line in lines)
    for line in lines:
        assert len(line) <= LONGEST_COMMAND, line
        for program, *rest in words(line):
            if program == "anyformer":
                parse(rest)


def parse(rest: list[str]) -> None:
    """Parse a command as the program does, and its settings if the recipe is a built-in one; run nothing."""
    command, name = get_command(app), "anyformer"
    while commands := getattr(command, "commands", None):
        name, *rest = rest
        command = commands[name]
    found = command.make_context(name, list(rest)).params
    if name == "train" and "." not in (recipe := found["recipe"]):
        io.override(read_recipe(recipe), found["changes"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_explain_and_lead_on(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    _, _, end = text.partition("## What just happened")
    assert "Where to go next" in end
    assert "](../concepts/" in end
    assert any(block.language == "text" for block in blocks(text)), "a tutorial shows what is printed"


def write_file(block: str, folder: Path) -> None:
    """Write a block that begins with `# NAME.toml` to this file."""
    if found := re.match(r"# ([\w-]+\.toml)\n", block):
        (folder / found[1]).write_text(block, encoding="utf-8")


def test_losses_and_sizes_of_the_modern_decoder(tmp_path: Path) -> None:
    """The table of the page is computed: losses from the stored runs, sizes from the recipes that the page shows."""
    text = (FOLDER / "modern-decoder.md").read_text(encoding="utf-8")
    for block in blocks(text):
        if block.language == "toml":
            write_file(block.body, tmp_path)
    runs = json.loads((FOLDER / "results" / "modern-decoder.json").read_text(encoding="utf-8"))["rows"]
    before, table = None, dict[str, list[str]]()
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        losses = [run["loss"] for run in runs if run["recipe"] == recipe]
        assert len(losses) == 5
        mean = statistics.mean(losses)
        model = io.override(read_recipe(str(tmp_path / f"{recipe}.toml")), ["model.target.vocab=71"]).model
        cost = count(model, length=64)
        table[recipe] = [
            f"{cost.parameters:,}",
            f"{cost.cache_bytes // 1024} KiB",
            f"{mean:.3f} ± {statistics.stdev(losses):.3f}",
            "" if before is None else f"{mean - before:+.3f}".replace("-", "−"),
        ]
        before = mean
    shown = re.findall(r"^\| `(\w+)` \|[^|]*\|(.*)\|$", text, re.MULTILINE)
    assert {recipe: [cell.strip() for cell in cells.split("|")] for recipe, cells in shown} == table
