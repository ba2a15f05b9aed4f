"""A class has a name of its own, which tells it from every other class of the package."""

import ast
from collections import Counter
from pathlib import Path

import anyformer


def test_no_two_classes_have_one_name() -> None:
    files = Path(anyformer.__file__).parent.rglob("*.py")
    classes = [node.name for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    assert [name for name, count in Counter(classes).items() if count > 1] == []
