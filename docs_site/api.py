"""Reference pages of the Python API, from signatures and docstrings as they are in the source.

The public names are those of `anyformer.__all__` and of the modules that `docs/stability.md` lists.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from anyformer import _HOMES, __all__ as PUBLIC
from docs_site.fields import SPECS
from docs_site.text import NOTE, docstring, plain

ROOT = Path(__file__).resolve().parent.parent
HOMES = {
    "anyformer.config": "model.md",
    "anyformer.recipe": "recipe.md",
    "anyformer.presets": "presets.md",
    "anyformer.testing": "../extending.md",
}
RETURNED = {
    "anyformer.nn.inspection.count": ["Table"],
    "anyformer.nn.inspection.memory": ["Memory"],
}
INTRO = """`import anyformer as af` imports no torch; a name loads its module at first use. Shapes are written with
b batch, t queries, s keys, d width, h heads, g key/value heads, k head width, f feed-forward width, v vocabulary."""
MODULES = """Modules with stable names beside [`af`](python.md) and the fields of [models](model.md),
[recipes](recipe.md), [decoding](decoding.md) and [grids](grid.md)."""
ROOMS = ("nn", "nn.inspection", "generation", "data", "training", "lab")
OTHERS = (
    "config.io",
    "config.cost",
    "config.families",
    "config.norm",
    "config.feedforward",
    "config.scheme",
    "recipe.logger",
    "recipe.optimizer",
    "recipe.schedule",
    "recipe.source",
    "recipe.width_transfer",
    "testing.check",
    "nn.inspection.plot",
    "cli.verb",
    "explore.view",
    "runs.run_inspection",
    "generation.http.app",
    "generation.http.service",
    "lab.evaluation.harness",
    "lab.figures",
)


class Name(NamedTuple):
    """A function, class or method: its signature as written, its docstring, and for a class its public members."""

    name: str
    signature: str
    doc: str
    members: tuple["Name", ...] = ()


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    return {"python.md": _top(), "modules.md": _modules()}


@cache
def module_names(module: str) -> dict[str, Name]:
    """Return the public functions and classes that a module defines, in order."""
    tree = ast.parse(path(module).read_text(encoding="utf-8"))
    return {one.name: one for one in _names(tree.body)}


def path(module: str) -> Path:
    """Return the file of a module."""
    file = ROOT.joinpath(*module.split("."))
    return file / "__init__.py" if file.is_dir() else file.with_suffix(".py")


def _names(body: list[ast.stmt]) -> Iterator[Name]:
    seen = set[str]()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if "overload" in decorators or node.name in seen or any(".setter" in one for one in decorators):
                continue
            seen.add(node.name)
            doc = ast.get_docstring(node) or ""
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_property = "property" in decorators or "cached_property" in decorators
                yield Name(node.name, _signature(node, is_property), doc)
            else:
                yield Name(node.name, _class_signature(node), doc, tuple(one for one in _names(node.body) if one.doc))


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, is_property: bool) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if is_property:
        return node.name + returns.replace(" -> ", ": ")
    args = node.args
    for first in (args.posonlyargs or args.args)[:1]:
        if first.arg in ("self", "cls"):
            (args.posonlyargs or args.args).pop(0)
    name = f"async {node.name}" if isinstance(node, ast.AsyncFunctionDef) else node.name
    whole = f"{name}({ast.unparse(args)}){returns}"
    if len(whole) <= 100:
        return whole
    return f"{name}(\n    " + ",\n    ".join(_split(ast.unparse(args))) + f",\n){returns}"


def _split(args: str) -> list[str]:
    """Split arguments at the commas between them."""
    parts, depth = [""], 0
    for char in args:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _class_signature(node: ast.ClassDef) -> str:
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            inner.returns = None
            return _signature(inner, False).replace("__init__", node.name, 1)
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    if not fields:
        return f"class {node.name}"
    return f"class {node.name}:\n" + "\n".join(f"    {ast.unparse(one)}" for one in fields)


def _entry(one: Name, level: int) -> Iterator[str]:
    yield f"{'#' * level} {one.name}\n"
    yield f"```python3\n{one.signature}\n```\n"
    yield docstring(one.doc) + "\n"
    for member in one.members:
        yield f"**{plain(member.name)}**\n"
        yield f"```python3\n{member.signature}\n```\n"
        yield docstring(member.doc) + "\n"


def _top() -> str:
    parts = [NOTE, "# Python\n", INTRO + "\n"]
    for name in PUBLIC:
        home = _HOMES.get(name, "")
        if home in HOMES:
            parts += [f"## {name}\n", _module_summary(home) + f" See [its page]({HOMES[home]}).\n"]
        elif home == f"anyformer.{name}":
            parts += [f"## {name}\n", _module_summary(home) + "\n"]
            parts += [line for one in _collected(home) for line in _entry(one, 3)]
        elif name == "ModelConfig":
            parts += [f"## {name}\n", "The config of a whole model. See [its fields](model.md#modelconfig).\n"]
        elif name == "__version__":
            parts += ["## \\_\\_version\\_\\_\n", "The version of the package, a string.\n"]
        else:
            parts += _entry(module_names(home)[name], 2)
    parts.append("## What these return\n")
    for module, names in RETURNED.items():
        for name in names:
            parts += _entry(module_names(module)[name], 3)
    return "\n".join(parts)


def _collected(package: str) -> Iterator[Name]:
    """Yield the functions and classes that a module imports from others, to be found in one place."""
    for node in ast.parse(path(package).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            known = module_names(node.module or "")
            yield from (known[alias.name] for alias in node.names if alias.name in known)


def _module_summary(module: str) -> str:
    text = ast.get_docstring(ast.parse(path(module).read_text(encoding="utf-8"))) or ""
    return plain(" ".join(text.partition("\n\n")[0].split()).replace(" Imports no torch.", ""))


def _modules() -> str:
    parts = [NOTE, "# Modules\n", MODULES + "\n"]
    shown = {name for names in RETURNED.values() for name in names} | {*PUBLIC, *SPECS}
    listed = [(module, _collected(module)) for module in (f"anyformer.{room}.api" for room in ROOMS)]
    listed += [(module, iter(module_names(module).values())) for module in (f"anyformer.{other}" for other in OTHERS)]
    for module, names in listed:
        parts += [f"## {module}\n", _module_summary(module) + "\n"]
        parts += [line for one in names if one.name not in shown for line in _entry(one, 3)]
    return "\n".join(re.sub(r"\n{3,}", "\n\n", part) for part in parts)
