"""How much of the package a forward pass and a decode step run through: a reader follows every call."""

import ast
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import anyformer as af
from anyformer.nn import attention, block, feedforward, linear, norm
from anyformer.nn.context import Context

ROOT = os.path.dirname(af.__file__)
MAX_FORWARD_LINES = 40  # without the docstring: one screen


class Followed(NamedTuple):
    """The calls of functions of this package."""

    calls: int
    functions: int
    files: int
    depth: int


def follow(work: Callable[[], Any]) -> Followed:
    seen, depths, calls = set[tuple[str, str]](), [0, 0], 0

    def hook(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        if code.co_filename.startswith(ROOT) and event in ("call", "return"):
            depths[0] += 1 if event == "call" else -1
            if event == "call":
                calls += 1
                depths[1] = max(depths)
                seen.add((code.co_filename, code.co_qualname))

    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Followed(calls, len(seen), len({name for name, _ in seen}), depths[1])


@pytest.fixture(scope="module")
def llama() -> af.Transformer:
    return af.Transformer(af.presets.llama(depth=2, width=64, heads=4, kv_heads=2, ff=128, vocab=97)).eval()


@torch.no_grad()
def test_a_forward_pass(llama: af.Transformer) -> None:
    ids = torch.randint(0, 97, (1, 8))
    llama(ids)
    found = follow(lambda: llama(ids))
    assert found.calls <= 123
    assert found.functions <= 58
    assert found.files <= 14
    assert found.depth <= 10


def test_a_further_token(llama: af.Transformer) -> None:
    ids = torch.randint(0, 97, (1, 8))
    for n in (2, 12):  # a kernel is chosen when facts are new
        af.generate(llama, ids, max_new_tokens=n)
    few, many = (follow(lambda n=n: af.generate(llama, ids, max_new_tokens=n)).calls for n in (2, 12))
    assert (many - few) / 10 <= 120


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[op.__name__] += 1
        return op(*args, **(kwargs or {}))


def operations(depth: int, padded: bool, dtype: torch.dtype) -> Counter[str]:
    """Those of the whole model, for a padded row or for a further token."""
    config = af.presets.llama(depth=depth, width=16, heads=2, kv_heads=1, ff=16, vocab=9)
    model, cache, counted = af.Transformer(config).eval().to(dtype), None, Operations()
    ids, options = torch.randint(0, 9, (2, 5)), dict[str, Any]()
    if padded:
        options["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    else:
        options["cache"] = cache = model.new_cache(2, 8)
        model(ids, cache=cache)
    with torch.no_grad(), counted:
        model(ids if cache is None else ids[:, :1], **options)
    return counted.counts


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masks_and_angles_are_computed_once_for_all_layers(padded: bool, dtype: torch.dtype) -> None:
    few, many = operations(1, padded, dtype), operations(3, padded, dtype)
    for op in ("where.self", "where.ScalarSelf", "scalar_tensor.default", "eq.Tensor", "cos.default", "arange.default"):
        assert few[op] == many[op], op
    assert few["cos.default"] == 1
    assert many["mm.default"] > few["mm.default"]


def parsed(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))


def forwards() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """The forward functions of modules, each with its class as it is written; not those of single statements."""
    for path in sorted(Path(ROOT, "nn").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for cls in ast.parse(text).body if path.parent.name not in ("inspection", "transforms") else ():
            for node in cls.body if isinstance(cls, ast.ClassDef) and not cls.name.startswith("_") else ():
                if isinstance(node, ast.FunctionDef) and node.name == "forward" and len(node.body) > 1:
                    code = "\n".join(text.splitlines()[cls.lineno - 1 : cls.end_lineno])
                    yield f"{path.stem}.{cls.name}", code, node


@pytest.mark.parametrize(("name", "code", "node"), [pytest.param(*one, id=one[0]) for one in forwards()])
def test_a_forward_function_fits_on_a_screen_and_says_shapes(name: str, code: str, node: ast.FunctionDef) -> None:
    first = node.body[1] if ast.get_docstring(node) is not None else node.body[0]
    assert node.end_lineno is not None
    assert node.end_lineno - first.lineno + 1 <= MAX_FORWARD_LINES, name
    said = re.findall(r'#[^\n]*|""".*?"""', code, re.DOTALL)
    assert any("[" in part for part in said), f"{name}: no shape, as in [b, t, d]"


def test_a_context_is_small() -> None:
    assert len(Context._fields) <= 9


def test_plain_modules_ask_for_no_kernel() -> None:
    """The skeleton of `nn` holds formulae; what is faster is in `transforms/substitute.py`."""
    allowed = {"at_least_fp32"}  # a precision
    for module in (attention, block, feedforward, linear, norm):
        imports = [node for node in ast.walk(parsed(module)) if isinstance(node, ast.ImportFrom)]
        kernels = [node for node in imports if (node.module or "").startswith("anyformer.kernels")]
        assert {name.name for node in kernels for name in node.names} <= allowed, module.__name__
