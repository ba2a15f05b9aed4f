"""No choice falls through: where code compares a field of few values with one of them, it names the others, too.

`x if spec.how == "a" else y` computes y for a value that is added later. A `match` that ends with `assert_never`, or a
dictionary, refuses it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import anyformer
from anyformer.explore.show import sources

HOME = Path(anyformer.__file__).parent
# Fields of which code singles one value out, and means all others alike: a side, shape or head of a model, precision
# fp32, rows of training, beams that stop first, tables with tabs, layouts without padding, options to sample.
ALIKE = {"side", "shape", "output", "precision", "split", "early_stopping", "format", "padding", "stage", "batched_by"}
ALIKE |= {"find", "name"}  # of a lesson, and of a request


def trees() -> dict[str, ast.Module]:
    files = [file for file in HOME.rglob("*.py") if not {"lab", "interop"} & set(file.relative_to(HOME).parts)]
    return {str(file.relative_to(HOME)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def literals(annotation: ast.AST, aliases: dict[str, set[str]]) -> set[str]:
    """Return the words of the `Literal` of an annotation, if it has one."""
    found = set[str]()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal":
            found |= {
                one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
        found |= aliases.get(getattr(node, "id", ""), set())
    return found


def choices(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Return the values of all fields with more than one."""
    nodes = [node for tree in trees for node in tree.body]
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    aliases = {node.targets[0].id: literals(node.value, {}) for node in assigned if "'Literal'" in ast.dump(node.value)}
    fields = defaultdict[str, set[str]](set)
    for field in [field for node in nodes if isinstance(node, ast.ClassDef) for field in node.body]:
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) != "kind":
            values = literals(field.annotation, aliases)
            fields[ast.unparse(field.target)] |= values if len(values) > 1 else set()
    return fields


def fall_throughs(tree: ast.AST, fields: dict[str, set[str]]) -> Iterator[str]:
    """Yield line and field of each `... == "a"` with an `else` that compares no more and refuses nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            ends = not isinstance(node.orelse, ast.IfExp)
        elif isinstance(node, ast.If) and node.orelse:
            last = node.orelse[0]
            ends = not isinstance(last, ast.If | ast.Raise) and "assert_never" not in ast.dump(last)
        else:
            continue
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=str(value))]) if ends:
                name = getattr(left, "attr", getattr(left, "id", ""))
                if name not in ALIKE and value in fields.get(name, ()):
                    yield f"{node.lineno}: {name} == {value!r}"


def test_no_choice_falls_through() -> None:
    parsed = trees()
    fields = choices(parsed.values())
    assert fields["normalizer"] == {"softmax", "relu", "sum", "none"}
    assert [f"{file}:{fault}" for file, tree in parsed.items() for fault in fall_throughs(tree, fields)] == []


def test_the_law_finds_one() -> None:
    fields = choices([ast.parse("How = Literal['a', 'b']\nclass S:\n    how: How | None = None\n")])
    wrong = "if how == 'b':\n    pass\nelse:\n    x = 1 if s.how == 'a' else 2\n"
    right = "if how == 'a':\n    pass\nelif how == 'b':\n    pass\nelse:\n    assert_never(how)\n"
    assert sorted(fall_throughs(ast.parse(wrong), fields)) == ["1: how == 'b'", "4: how == 'a'"]
    assert list(fall_throughs(ast.parse(right), fields)) == []


def test_the_page_has_words_for_each_normalizer() -> None:
    scripts = "".join(text for name, text in sources().items() if name.endswith(".js"))
    for value in ("softmax", "relu"):
        for key in (f"say.{value}", f"about.matrix.{value}"):
            assert len(re.findall(rf'^  "{re.escape(key)}":', scripts, re.M)) == 2, f"{key} in English and Korean"
    assert 'normalizer === "' not in scripts
