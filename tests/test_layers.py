"""Source layout: imports run one way, and light parts import no torch."""

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

# The layers, lowest first: a unit, and the units directly below it. A unit may import these and everything below
# them. A unit is a room (a folder of `anyformer/`) without the files and folders in it that have rows of their own.
# Each file of `config/` has one.
UNDER: dict[str, tuple[str, ...]] = {
    "kernels.conventions": (),
    "config.spec": (),
    "config.media": ("config.cost", "config.spec"),
    "config.part": ("config.spec",),
    "config.cost": (),
    "config.scheme": ("config.part", "config.cost"),
    "config.visibility": ("config.part",),
    "config.families": ("config.scheme", "config.media"),
    "config.norm": ("config.families",),
    "config.position": ("config.norm",),
    "config.pattern": ("config.visibility",),
    "config.feedforward": ("config.families",),
    "config.disentangled": ("config.position",),
    "config.attention": ("config.disentangled", "config.pattern"),
    "config.state_mixer": ("config.attention",),
    "config.mixer": ("config.state_mixer",),
    "config.block": ("config.mixer", "config.feedforward"),
    "config.inputs": ("config.attention",),
    "config.heads": ("config.block", "config.inputs"),
    "config.adapter": ("config.block",),
    "config.model": ("config.heads", "config.adapter"),
    "config.parse": ("config.spec",),
    "config.deprecated": (),
    "config.schema": ("config.spec",),
    "config.overrides": ("config.parse",),
    "config.outside": ("config.part",),
    "config.io": ("config.model", "config.overrides", "config.schema", "config.outside"),
    "config": ("config.io", "config.deprecated"),  # its __init__.py, which only collects
    "presets": ("config",),
    "data.datasets": ("config", "runs.processes", "kernels.conventions"),
    "recipe": ("presets", "data.datasets"),
    "recipe.ready": ("recipe", "runs.atomic_folder"),
    "kernels.gpu_table": (),
    "kernels.hardware": ("kernels.gpu_table",),
    "attention.media_batch": ("config",),
    "kernels": ("kernels.conventions",),  # tensors in, tensors out
    "attention": ("kernels", "config"),
    "attention.cache": ("attention",),
    "nn": ("attention.cache", "attention.media_batch"),  # knows nothing of text, tasks or training
    "nn.transforms": ("nn",),
    "nn.api": ("nn.transforms",),
    "runs.processes": ("config.spec",),
    # knows nothing of nn
    "data": ("recipe", "runs.processes", "kernels.hardware", "kernels.conventions", "attention.media_batch"),
    "generation": ("nn.transforms",),  # speaks ids, never text
    "nn.inspection": ("nn.transforms", "kernels.hardware", "recipe"),
    "tasks": ("generation", "data"),
    "runs": (),  # its __init__.py
    "runs.atomic_folder": ("config", "runs.processes"),
    "training.forecast": ("nn.inspection", "recipe"),
    "runs.run": ("tasks", "runs.atomic_folder", "nn.inspection"),
    "runs.run_inspection": ("runs.run",),
    "training.ranks": ("nn", "data"),  # splits the modules of nn, and batches
    "training": ("runs.run", "recipe.ready", "training.ranks"),
    "testing": ("training.ranks", "nn.inspection", "generation"),  # laws of parts, for their authors and for our tests
    "training.doctor": ("training",),  # prints what training chooses
    "tasks.environments": ("runs.run",),
    "generation.engine": ("runs.run",),
    "interop": ("runs.run",),
    "lab.evaluation": ("runs.run",),
    "training.new_recipe": ("training",),
    "generation.ray_cluster": ("kernels.hardware", "runs.processes"),
    "lab": ("generation.ray_cluster", "training", "interop", "nn.inspection"),
    "lab.comparison": ("lab",),
    "explore": ("lab", "runs.run_inspection"),
    "generation.http": ("generation.engine",),
    "generation.api": ("generation.batch",),
    "generation.batch": ("generation.engine", "generation.ray_cluster"),
    "cli": (
        *("testing", "explore", "lab.comparison", "lab.evaluation", "training.forecast", "training.doctor"),
        *("training.new_recipe", "tasks.environments", "generation.batch", "generation.http"),
    ),
    "__main__": ("cli",),
}

# A part imports its module where it is built: these files may import BUILT inside functions, for types.
PARTS = ("config.", "recipe.", "generation.filters.", "generation.strategy.")
BUILT = ("nn", "kernels", "data", "tasks", "training", "generation")

# Importing these, and `anyformer` itself, imports no torch: `anyformer --help`, completion and configs answer at once.
TORCHLESS = (
    "generation.strategy",
    "kernels.conventions",
    "config",
    "presets",
    "data.datasets",
    "recipe",
    "recipe.ready",
    "cli",
    "nn.inspection.count",
    "nn.inspection.memory",
    "kernels.gpu_table",
    "training.forecast",
    "data.shard_writer",
    "runs.processes",
    "data.readers",
)

# Parallelism is applied from outside these.
SINGLE_PROCESS = ("kernels", "attention", "attention.cache", "nn")


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
CLAIMS = {f"claims.{path.stem}": path for path in sorted((ROOT / "claims" / "anyformer_claims").glob("*.py"))}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((SOURCES | CLAIMS)[module].read_text(encoding="utf-8"))


@cache
def package_imports(module: str) -> frozenset[tuple[str, int]]:
    """Return the imports of a file but those of modules that a part builds inside functions."""
    return frozenset({*imports(tree_of(module), module)} - built_there(tree_of(module), module))


def unit_of(module: str) -> str:
    parts = module.split(".")[1:]
    own = ".".join(parts[:2])
    return own if parts[:1] == ["config"] or own in UNDER else ".".join(parts[:1])


def imports(tree: ast.AST, module: str) -> Iterator[tuple[str, int]]:
    """Yield the modules that a file imports, with the line: at the top, inside functions, or for types only."""
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


def built_there(tree: ast.AST, module: str) -> set[tuple[str, int]]:
    """Return the imports inside functions and for types of a file of parts, of what is built there."""
    if not f"{module.partition('.')[2]}.".startswith(PARTS):
        return set()
    inner = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.If)]
    found = {one for node in inner for one in imports(node, module)}
    return {(name, line) for name, line in found if unit_of(name) in BUILT}


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if SOURCES[module].name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


@cache
def reach(unit: str) -> frozenset[str]:
    """Return all units below a unit."""
    return frozenset(UNDER[unit]).union(*(reach(lower) for lower in UNDER[unit]))


def where(module: str) -> str:
    return SOURCES[module].relative_to(ROOT).as_posix()


def test_every_unit_is_in_the_table() -> None:
    missing = {unit_of(module) for module in SOURCES} - {""} - UNDER.keys()
    assert not missing, (
        f"{', '.join(sorted(missing))}: not in UNDER of tests/test_layers.py; add a line with the units below, "
        "and add the new name to each unit that may import it"
    )


def test_the_table_has_no_circles() -> None:
    for unit, lower in UNDER.items():
        assert set(lower) <= UNDER.keys(), f"UNDER[{unit!r}] names a unit that is not in the table"
    TopologicalSorter(UNDER).prepare()


def test_imports_run_one_way() -> None:
    """Imports inside functions and for types count too: the order is about knowledge, not about loading."""
    wrong = []
    for module in SOURCES:
        unit = unit_of(module)
        if unit not in UNDER:
            continue  # the package's __init__.py collects from everywhere; the test above reports anything else
        for name, line in package_imports(module):
            if name.split(".")[0] != "anyformer":
                continue
            target = unit_of(name)
            if not target:
                wrong.append(f"{where(module)}:{line}: import from the module itself, not from the public names")
            elif target != unit and target not in reach(unit):
                wrong.append(f"{where(module)}:{line}: {unit} may not import {target}")
    assert not wrong, "\n".join(["imports that run the wrong way (the order is UNDER, above):", *dict.fromkeys(wrong)])


def test_no_module_imports_itself_through_others() -> None:
    """Not inside a function and not for types either: what two modules share is a third."""
    graph: dict[str, set[str]] = {}
    for module in SOURCES:
        if unit_of(module):  # the package's __init__.py collects from everywhere
            names = {name for name, _ in package_imports(module)}
            graph[module] = {name for name in names if name in SOURCES and unit_of(name)} - {module}
    TopologicalSorter(graph).prepare()  # names a cycle


def test_importing_costs_no_torch() -> None:
    """Run the imports: this also finds torch imported by other packages. The traceback shows where."""
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


def test_predicting_imports_nothing_of_training() -> None:
    """The imports of `anyformer predict` and `anyformer generate` add to their start-up time."""
    parts = ["cli", "cli.progress", "runs.run", "generation.batch.predictor", "generation.generate"]
    parts += ["generation.strategy"]
    code = f"import sys; {'; '.join(f'import anyformer.{part}' for part in parts)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    slow = {"anyformer.training", "anyformer.explore", "anyformer.lab", "anyformer.interop", "rich", "transformers"}
    slow |= {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy", "pandas", "jinja2"}
    assert not slow & set(done.stdout.split())


def test_configs_load_no_library_beside_torch() -> None:
    """Importing an extension module would wait until torch's library is loaded: see `cli/torch_import.py`."""
    code = """
import sys
from anyformer.cli.torch_import import import_extensions
def extensions():
    return {name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).endswith(".so")}
import_extensions()
before = extensions()
import anyformer.recipe
print(*extensions() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stdout.split()


def test_model_code_has_no_collectives() -> None:
    """Sums over processes are passed in by training (`AuxOutputs.reduce`)."""
    wrong = [
        f"{where(module)}:{line}"
        for module in SOURCES
        if unit_of(module) in SINGLE_PROCESS
        for name, line in imports(tree_of(module), module)
        if name.startswith("torch.distributed")
    ]
    texts = {module: path.read_text("utf-8") for module, path in SOURCES.items() if unit_of(module) in SINGLE_PROCESS}
    text = [where(module) for module, text in texts.items() if "distributed" in text]
    assert not wrong + text, "\n".join(["torch.distributed in model code:", *wrong, *text])


def test_every_folder_names_its_modules() -> None:
    """A folder's __init__.py is its table of contents: one line for each module and folder in it."""
    missing = []
    for init in (*sorted(PACKAGE.rglob("__init__.py")), CLAIMS["claims.__init__"]):
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
from . import heads
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
        "anyformer.config.heads",
        "anyformer.config.norm",
        "anyformer.config.position",
        "anyformer.config.spec",
        "torch",
    ]
