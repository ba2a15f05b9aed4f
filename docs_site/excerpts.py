"""Excerpts of source files on pages: blocks of ```py title="FILE: NAME, ...", whose lines are those of the source."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r'^(```py title="(?P<file>[^":]+): (?P<names>[^"]+)"\n).*?^```$', re.MULTILINE | re.DOTALL)


def with_excerpts(page: str) -> str:
    """Return a page whose excerpts are those of the source as it is."""
    return BLOCK.sub(lambda found: found[1] + _source(found["file"], found["names"].split(", ")) + "\n```", page)


def _source(file: str, names: list[str]) -> str:
    """Return functions as they are written, and methods below the first line of their class."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines, shown, last = text.splitlines(), list[str](), ""
    for name in names:
        holder, _, _ = name.rpartition(".")
        start, end = _lines(text, name)
        if holder and holder != last:
            shown.append(lines[_lines(text, holder)[0]])
        shown += [*lines[start:end], ""]
        last = holder
    return "\n".join(shown[:-1])


def _lines(text: str, name: str) -> tuple[int, int]:
    """Return where the definition of a name begins and ends, in lines from 0."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        (node,) = (one for one in ast.iter_child_nodes(node) if getattr(one, "name", None) == part)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    assert node.end_lineno is not None
    return node.lineno - 1, node.end_lineno
