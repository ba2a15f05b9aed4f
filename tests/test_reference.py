"""The reference covers every public name, command, option and field, and the navigation of the site every page."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
import yaml

import anyformer as af
from anyformer.cli import app
from anyformer.config import ModelConfig
from anyformer.config.schema import nested_specs
from anyformer.generation.strategy import options
from anyformer.lab.grid import Grid
from anyformer.presets import PRESETS
from anyformer.recipe import Recipe
from anyformer.recipe.ready import names
from docs_site import api
from docs_site.__main__ import FOLDER, generate
from docs_site.commands import walk
from tests.pages import PAGES, ROOT, blocks

DOCS = ROOT / "docs"


@cache
def generated() -> dict[str, str]:
    """All generated pages by file name; made by the first test, since every worker imports this file."""
    return generate()


def sections(page: str, level: int) -> dict[str, str]:
    """The text below each heading of this level or a higher one, by the heading."""
    parts = re.split(rf"^#{{1,{level}}} (.*)\n", generated()[page], flags=re.MULTILINE)
    return {name.replace("\\", ""): text for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def meanings(section: str) -> dict[str, str]:
    """The last cell of each row of a table, by the names in the first cell."""
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {name: row[-1].strip() for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def test_pages_are_those_of_the_code() -> None:
    written = {page: FOLDER / page for page in generated()}
    assert [page for page, path in written.items() if not path.exists()] == [], "run `make reference`"
    different = [page for page, path in written.items() if path.read_text(encoding="utf-8") != generated()[page]]
    assert different == [], "run `make reference`"


def test_every_public_name_is_described() -> None:
    found = sections("python.md", 2)
    for name in af.__all__:
        prose = re.sub(r"```.*?```", "", found[name], flags=re.DOTALL).strip()
        assert prose, name


def test_every_name_that_pages_import_is_described() -> None:
    modules, fields = sections("modules.md", 3), "".join(generated().values())
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(block.body)) if block.language == "python" else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anyformer"):
                    for alias in node.names:
                        inner = f"{node.module}.{alias.name}"
                        known = alias.name in modules or inner in modules or f"# {alias.name}\n" in fields
                        private = alias.name[0] == "_" or not alias.name[0].isalpha() or alias.name.isupper()
                        if not (known or private or api.path(inner).exists()):
                            value = getattr(import_module(node.module or ""), alias.name)
                            assert get_origin(value) is Annotated, f"{page.name}: {inner}"  # such as Size
    for name, text in modules.items():
        assert re.sub(r"```.*?```", "", text, flags=re.DOTALL).strip(), f"{name} has no docstring"


def test_every_command_and_option_is_described() -> None:
    found = sections("cli.md", 2)
    for name, command in walk(typer.main.get_command(app), "anyformer"):
        rows = meanings(found[name])
        for one in command.params:
            for opt in one.opts if one.param_type_name == "option" else (one.metavar or one.name).upper().split("|"):
                assert rows[opt], f"{name} {opt}"


def test_every_field_is_described() -> None:
    found: dict[str, str] = {}
    for page in ("model.md", "recipe.md", "grid.md"):
        found |= sections(page, 3)
    specs = nested_specs(ModelConfig) | nested_specs(Recipe) | nested_specs(Grid)
    counted = 0
    for name, spec in specs.items():
        rows = meanings(found[name])
        assert spec.__doc__
        for field in spec.model_fields:
            if field == "kind":
                assert "Selected by `kind = " in found[name]
            else:
                assert rows[field], f"{name}.{field}: add a comment beside it"
                counted += 1
    assert counted > 400


def test_every_option_of_decoding_is_described() -> None:
    found = sections("decoding.md", 2)
    for name, option in options().items():
        assert meanings(found[option.owner.__name__])[name], f"{name}: describe it in its docstring, or beside it"


def test_presets_and_recipes_are_listed() -> None:
    assert set(PRESETS) <= set(sections("presets.md", 3))
    assert set(names()) <= set(sections("recipes.md", 3))


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without calling the functions that it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def navigation(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    parts = node.values() if isinstance(node, dict) else node
    return [path for part in parts for path in navigation(part)]


def test_every_page_is_in_the_navigation() -> None:
    """Once, by its name or by a pattern; and every name there is a page."""
    nav = navigation(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"])
    named = [path for path in nav if "*" not in path]
    matched = {page.relative_to(DOCS).as_posix() for path in nav if "*" in path for page in DOCS.glob(path)}
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert len(named) == len(set(named))
    assert set(named) <= pages, "mkdocs.yml names a page that does not exist"
    assert pages <= matched | set(named), "mkdocs.yml leaves out a page"


def test_every_concept_is_in_its_index() -> None:
    index = (DOCS / "concepts" / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"^- \[.*\]\((.*)\.md\): .+$", index, re.MULTILINE)
    assert sorted(linked) == sorted(page.stem for page in Path(DOCS / "concepts").glob("*.md") if page.stem != "README")
