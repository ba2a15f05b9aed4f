"""Imports run one way, importing the light parts costs no torch, and files stay small."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "anyformer"

# The house, from the ground up: a unit, and what stands directly under it. An import may reach these units and
# whatever stands under them. A unit is a file or folder of `anyformer/`; the files of `config/` are units themselves.
UNDER: dict[str, tuple[str, ...]] = {
    "conventions": (),
    "config.spec": (),
    "config.position": ("config.spec",),
    "config.norm": ("config.spec",),
    "config.pattern": ("config.spec",),
    "config.feedforward": ("config.spec",),
    "config.mixer": ("config.position", "config.pattern", "config.norm"),
    "config.block": ("config.mixer", "config.feedforward"),
    "config.inputs_heads": ("config.block",),
    "config.adapter": ("config.block",),
    "config.model": ("config.inputs_heads", "config.adapter"),
    "config.parse": ("config.spec",),
    "config.schema": ("config.spec",),
    "config.overrides": ("config.parse",),
    "config.io": ("config.model", "config.overrides", "config.schema"),
    "config": ("config.io",),  # its __init__.py, which only collects
    "presets": ("config",),
    "recipe": ("presets",),
    "recipes": ("recipe",),
    "hardware": (),
    "kernels": ("conventions",),  # tensors in, tensors out
    "attention": ("kernels", "config"),
    "cache": ("attention",),
    "nn": ("cache",),  # knows nothing of text, tasks or training
    "transforms": ("nn",),
    "processes": ("config.spec",),
    "data": ("recipe", "processes", "hardware", "conventions"),  # knows nothing of nn
    "decoding": ("transforms",),  # speaks ids, never text
    "inspection": ("transforms", "hardware"),
    "doctor": ("transforms", "hardware"),
    "tasks": ("decoding", "data"),
    "atomic_folder": ("config", "processes"),
    "run": ("tasks", "atomic_folder", "inspection"),
    "run_inspection": ("run",),
    "training": ("run", "recipes"),
    "interop": ("run",),
    "lab": ("training", "interop", "inspection"),
    "explore": ("lab", "run_inspection"),
    "cli": ("explore", "doctor"),
    "__main__": ("cli",),
}

# Importing these, and `anyformer` itself, imports no torch: `anyformer --help`, completion and configs answer at once.
TORCHLESS = (
    "conventions",
    "config",
    "presets",
    "recipe",
    "recipes",
    "cli",
    "inspection.count",
    "inspection.memory",
    "data.shard_writer",
    "processes",
    "data.readers",
)

LONGEST = 400  # lines; a file past that is two files
LONGEST_ATTENTION = 119  # the file that people read first


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def unit_of(module: str) -> str:
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["config"] else parts[:1])


def imports(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """The modules that a file names in its imports, with the line: at the top, inside functions, or for types only."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(names=names):
                source = _absolute(node, module)
                for name in (alias.name for alias in names):
                    if (source, name) == ("anyformer", "__version__"):
                        continue  # a fact, not a part
                    inner = f"{source}.{name}"  # `from anyformer import presets` names the module anyformer.presets
                    yield (inner if inner in SOURCES else source), node.lineno


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if SOURCES[module].name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


@cache
def reach(unit: str) -> frozenset[str]:
    """All that stands under a unit."""
    return frozenset(UNDER[unit]).union(*(reach(lower) for lower in UNDER[unit]))


def where(module: str) -> str:
    return SOURCES[module].relative_to(ROOT).as_posix()


def test_every_unit_has_a_place() -> None:
    homeless = {unit_of(module) for module in SOURCES} - {""} - UNDER.keys()
    assert not homeless, (
        f"no place for {', '.join(sorted(homeless))}: add a line to UNDER in tests/test_layers.py that says what "
        "stands directly under it, and the new name to each unit that stands on it"
    )


def test_the_table_has_no_circles() -> None:
    for unit, lower in UNDER.items():
        assert set(lower) <= UNDER.keys(), f"UNDER[{unit!r}] names a unit that is not in the table"
    TopologicalSorter(UNDER).prepare()


def test_imports_run_one_way() -> None:
    """Imports inside functions and for types count too: the order says who may *know* whom, not only who loads whom."""
    wrong = []
    for module, path in SOURCES.items():
        unit = unit_of(module)
        if unit not in UNDER:
            continue  # the package's __init__.py collects from everywhere; anything else is told by the test above
        for name, line in imports(ast.parse(path.read_text(encoding="utf-8")), module):
            if name.split(".")[0] != "anyformer":
                continue
            target = unit_of(name)
            if not target:
                wrong.append(f"{where(module)}:{line}: import from the part itself, not from the public names")
            elif target != unit and target not in reach(unit):
                wrong.append(f"{where(module)}:{line}: {unit} may not import {target}")
    assert not wrong, "\n".join(["imports that run the wrong way (the order is UNDER, above):", *dict.fromkeys(wrong)])


def test_importing_costs_no_torch() -> None:
    """Run rather than read: this also sees torch behind other imports. The traceback shows the way to it."""
    homes = tuple(f"anyformer.{name}" for name in TORCHLESS)
    code = """
import importlib, sys
class Refuse:
    def find_spec(self, name, *rest):
        if name == "torch":
            raise RuntimeError("torch is imported here")
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    modules = [m for m in SOURCES if f"{m}.".startswith(tuple(f"{home}." for home in homes)) or m == "anyformer"]
    done = subprocess.run([sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_answering_imports_nothing_of_training() -> None:
    """What `anyformer predict` imports is what its users wait for."""
    code = "import sys, anyformer.cli, anyformer.cli.progress, anyformer.run; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    slow = {"anyformer.training", "anyformer.explore", "anyformer.lab", "anyformer.interop", "rich", "transformers"}
    slow |= {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy", "pandas"}
    assert not slow & set(done.stdout.split())


def test_files_are_small() -> None:
    files = (*SOURCES.values(), *sorted((ROOT / "tests").rglob("*.py")))
    lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    long = [f"{name}: {n} lines" for name, n in lengths.items() if n > LONGEST]
    assert not long, "\n".join([f"past {LONGEST} lines; make two files of it:", *long])
    assert lengths["anyformer/nn/attention.py"] <= LONGEST_ATTENTION


def test_every_folder_names_its_modules() -> None:
    """A folder's __init__.py is its table of contents: one line for each module and folder in it."""
    missing = []
    for init in sorted(PACKAGE.rglob("__init__.py")):
        text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        named = set(re.findall(r"^([a-z_0-9]+)  +\S", text, flags=re.MULTILINE))
        here = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}
        here |= {path.parent.name for path in init.parent.glob("*/__init__.py")}
        if init.parent != PACKAGE and here != named:
            missing.append(f"{init.relative_to(ROOT)}: missing {sorted(here - named)}, unknown {sorted(named - here)}")
    assert not missing, "\n".join(missing)


def test_the_reader_sees_every_kind_of_import() -> None:
    source = """
import torch
from anyformer import __version__, config
from anyformer.config.spec import Spec
from . import inputs_heads
from .norm import Norm
if TYPE_CHECKING:
    import anyformer.config.position
def f():
    from anyformer.attention import layout
"""
    found = [name for name, _ in imports(ast.parse(source), "anyformer.config.model")]
    assert sorted(found) == [
        "anyformer.attention.layout",
        "anyformer.config",
        "anyformer.config.inputs_heads",
        "anyformer.config.norm",
        "anyformer.config.position",
        "anyformer.config.spec",
        "torch",
    ]
