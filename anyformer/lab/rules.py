"""Hash of the rule of a claim, which is fixed before the data is seen.

The hash covers the claim, its prediction and the code of its judgement, with every function and constant that this code
uses from the claim's file, from its package or from files beside it, and the rule for learning rates if several of them
are tried. Comments, docstrings, annotations, formatting and the names of modules do not count. Statistics count by the
name of their method: `lab/stats.py` and `lab/decision.py` implement standard definitions. A result stores the hash
under which it was measured, so a rule that is changed later is noticed.
"""

import ast
import hashlib
import importlib.util
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from anyformer.lab.decision import METHOD, RATES

LENGTH = 12  # hexadecimal digits
IGNORED = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind"}  # fields of a syntax tree


def tries_rates(cells: Iterable[Mapping[str, Any]]) -> bool:
    """Test whether cells that are equal in all else but the seed have several learning rates."""
    rates: dict[str, set[float]] = {}
    for cell in cells:
        setting = json.dumps({name: value for name, value in cell.items() if name not in ("lr", "rates", "seed")})
        rates.setdefault(setting, set()).update(cell.get("rates", [cell["lr"]] if "lr" in cell else []))
    return any(len(some) > 1 for some in rates.values())


def rule_hash(kind: type[Any], tuned: bool = False) -> str:
    """Return the first digits of the SHA-256 of the rule of an experiment's class; `tuned`: with learning rates."""
    texts = [METHOD, *([RATES] if tuned else []), " ".join(kind.claim.split()), " ".join(kind.prediction.split())]
    parts = [*texts, *_code(kind)]
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()[:LENGTH]


def _code(kind: type[Any]) -> list[str]:
    """Return the canonical code of `judge` and of all that it uses, sorted by name."""
    module = kind.__module__
    found: dict[tuple[str, str], str] = {}
    waiting = [(module, f"{kind.__name__}.judge")]
    while waiting:
        place = waiting.pop()
        if place not in found:
            home, node = _definition(*place)
            if node is not None:
                found[place] = canonical(node)
                waiting += _used(home, place[1].partition(".")[0], node)
    return [f"{name} {code}" for (_, name), code in sorted(found.items(), key=lambda item: item[0][1])]


def _used(module: str, owner: str, node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that a definition uses: those of its module, and attributes of `self`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield module, part.id
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
            yield module, f"{owner}.{part.attr}"


def _definition(module: str, name: str) -> tuple[str, ast.AST | None]:
    """Return the module and the syntax tree that define a name; None for a name from elsewhere."""
    names = _names(module)
    if name in names:
        return module, names[name]
    for origin, imported in _imports(module).get(name, ()):
        if _is_beside(module, origin):
            return _definition(origin, imported)
    return module, None


def _is_beside(module: str, origin: str) -> bool:
    """Test whether another module is of the same package, or its file in the same folder."""
    return module.partition(".")[0] == origin.partition(".")[0] or "" != _folder(module) == _folder(origin)


def _folder(module: str) -> str:
    spec = importlib.util.find_spec(module)
    return os.path.dirname(spec.origin or "") if spec else ""


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


@cache
def _names(module: str) -> dict[str, ast.AST]:
    """Return functions and constants of a module, and the members of its classes as `Class.member`."""
    found: dict[str, ast.AST] = {}
    for node in _tree(module).body:
        found |= dict.fromkeys(_bound(node), node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": member for member in node.body for name in _bound(member)}
    return found


def _bound(node: ast.AST) -> list[str]:
    """Return the names that a statement binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    return []


@cache
def _imports(module: str) -> dict[str, list[tuple[str, str]]]:
    """Return the names that a module imports, with the module and the name there."""
    found: dict[str, list[tuple[str, str]]] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(name, module.rpartition(".")[0])
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, []).append((origin, alias.name))
    return found


def canonical(node: Any) -> str:
    """Return a syntax tree as text that is the same in every version of Python: empty fields are left out."""
    if isinstance(node, list):
        return "[" + ",".join(map(canonical, _without_docstring(node))) + "]"
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr(_joined(node.values))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [
        f"{name}={canonical(value)}"
        for name, value in ast.iter_fields(node)
        if name not in IGNORED and value is not None and value != []
    ]
    return f"{type(node).__name__}({','.join(fields)})"


def _without_docstring(body: list[Any]) -> list[Any]:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """Join adjacent texts of an f-string, which versions of Python split differently."""
    found: list[ast.expr] = []
    for value in values:
        match found, value:
            case [*_, ast.Constant(value=str() as before)], ast.Constant(value=str() as text):
                found[-1] = ast.Constant(before + text)
            case _:
                found.append(value)
    return found
