"""A class has a name of its own, which tells it from every other class of the package."""

import ast
from collections import Counter
from pathlib import Path

import anyformer


def test_no_two_classes_have_one_name() -> None:
    files = [file for file in Path(anyformer.__file__).parent.rglob("*.py") if file.parent.name != "experiments"]
    classes = [node.name for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    assert [name for name, count in Counter(classes).items() if count > 1] == []


def test_an_experiment_is_the_class_claim_of_its_file() -> None:
    for file in (Path(anyformer.__file__).parent / "lab" / "experiments").glob("*.py"):
        classes = [n.name for n in ast.parse(file.read_text("utf-8")).body if isinstance(n, ast.ClassDef)]
        assert classes.count("Claim") == (file.stem not in ("__init__", "common"))
