"""Files, signatures and folders stay small."""

import ast
import re
from collections.abc import Iterator

from tests.test_layers import CLAIMS, PACKAGE, ROOT, SOURCES, tree_of

REFERENCE = re.compile(r'(?ms)^ *(Args|Attributes|Returns|Yields|Raises|Example):$.*?(?=""")')  # of docstrings
MAX_LINES = 400  # lines without `REFERENCE`; a file past that is two files
MAX_ATTENTION_LINES = 128  # the file that people read first
MAX_PARAMETERS = 8
MAX_NN_MODULES = 24
# Signatures that may be longer: kernels and presets (whole files), CLI commands and public entry points.
LONG_SIGNATURES = (
    "kernels.",
    "presets.",
    "cli.data.data_prepare",
    "cli.decoding_options._of_a_call",
    "cli.lab.lab",
    "cli.new.new_",
    "cli.plan.plan",
    "cli.predict.predict_",
    "cli.serve.serve",
    "nn.model.Transformer.forward",
    "nn.inspection.memory.training_memory",
    "generation.generate.generate",
    "generation.beam_search.beam_search",
    "generation.contrastive.contrastive_search",
    "generation.speculative.speculate",
)


def test_files_are_small() -> None:
    files = (*SOURCES.values(), *CLAIMS.values(), *sorted((ROOT / "tests").rglob("*.py")))
    texts = {p.relative_to(ROOT).as_posix(): REFERENCE.sub("", p.read_text(encoding="utf-8")) for p in files}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    long = [f"{name}: {n} lines" for name, n in lengths.items() if n > MAX_LINES]
    assert not long, "\n".join([f"past {MAX_LINES} lines; make two files of it:", *long])
    assert lengths["anyformer/nn/attention.py"] <= MAX_ATTENTION_LINES


def functions(tree: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of a file by their qualified name."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield scope + name, node
                yield from functions(node, f"{scope}{name}.")
            case ast.ClassDef(name=name):
                yield from functions(node, f"{scope}{name}.")
            case _:
                yield from functions(node, scope)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters of a function, without self or cls."""
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    own = names[:1] in (["self"], ["cls"])
    return len(names) - own + (args.vararg is not None) + (args.kwarg is not None)


def test_signatures_are_short() -> None:
    long = {}
    for module in SOURCES | CLAIMS:
        for name, node in functions(tree_of(module)):
            full = f"{module.removeprefix('anyformer.')}.{name}"
            if (count := parameters(node)) > MAX_PARAMETERS and not full.startswith(LONG_SIGNATURES):
                long[full] = count
    wrong = [f"{name}: {count} parameters" for name, count in long.items()]
    assert not wrong, "\n".join([f"more than {MAX_PARAMETERS} parameters; make an object of them:", *wrong])


def test_the_model_is_called_with_few_arguments() -> None:
    signatures = functions(tree_of("anyformer.nn.model"))
    assert all(parameters(node) <= 11 for name, node in signatures if name == "Transformer.forward")


def test_nn_has_few_modules() -> None:
    assert len(list((PACKAGE / "nn").glob("*.py"))) - 1 <= MAX_NN_MODULES
