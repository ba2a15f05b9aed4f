"""Private functions of torch are named in one file, and each fallback gives the same result."""

import ast
import math
import pickle
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import sympy
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.decomposition import decompositions
from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

import anyformer
from anyformer.kernels import private
from anyformer.kernels.private import repair_inductor

PACKAGE = Path(anyformer.__file__).parent
NAMES = {
    "_C",
    "_addmm_activation",
    "_are_functorch_transforms_active",
    "_dyn_quant_matmul_4bit",
    "_dyn_quant_pack_4bit_weight",
    "_dynamo",
    "_foreach_add_",
    "_foreach_mul",
    "_foreach_sub",
    "_foreach_zero_",
    "_functorch",
    "_handle_pdl_before_access",
    "_inductor",
    "_is_mkldnn_acl_supported",
    "_linear_pointwise",
    "_mkl_linear",
    "_mkl_reorder_linear_weight",
    "_reorder_linear_weight",
    "_scaled_mm",
}


def private_names(source: str) -> set[str]:
    """Return the private names of torch that a file reads: attributes, imports, and strings that `getattr` takes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        path = ""
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            path = node.module or ""
        if re.fullmatch(r"torch(\.\w+)+", path):
            found |= {part for part in path.split(".") if part.startswith("_") and not part.startswith("__")}
    return found


def test_no_other_file_names_one() -> None:
    wrong = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "private.py" and (names := private_names(path.read_text(encoding="utf-8")))
    }
    assert not wrong, f"private functions of torch belong into kernels/private.py: {wrong}"


def test_the_file_names_these() -> None:
    """A further name is a decision: add it here, with a fallback and its test below."""
    source = Path(private.__file__).read_text(encoding="utf-8")
    strings = {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    looked_up = {text for text in strings if text.startswith("_") and text.rstrip("_").lstrip("_").isidentifier()}
    foreach = {f"_foreach_{name}" for name in ("add_", "mul", "sub")}
    assert private_names(source) | (looked_up - {"_foreach_"}) | foreach == NAMES


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has lost every private function that `getattr` looks up."""
    for name in ("_foreach_zero_", "_foreach_add_", "_foreach_mul", "_foreach_sub", "_addmm_activation", "_scaled_mm"):
        monkeypatch.delattr(torch, name)
    monkeypatch.delattr(torch._C, "_are_functorch_transforms_active")
    monkeypatch.delattr(torch._dynamo, "maybe_mark_dynamic")


def results() -> list[torch.Tensor]:
    zeros, averages = [numbers(3), numbers(2, 2)], [numbers(4), numbers(2, 3, seed=1)]
    private.zero_all(zeros)
    private.move_towards(averages, [numbers(4, seed=2), numbers(2, 3, seed=3)], torch.tensor(0.3))
    x, y = (numbers(4, 16, seed=n).to(torch.float8_e4m3fn) for n in (4, 5))
    scaled = private.scaled_matmul(x, y, numbers(4, 1).abs(), numbers(4, 1).abs(), numbers(4), torch.bfloat16)
    private.allow_dynamic_size(zeros[0], 0)
    return [*zeros, *averages, private.linear_relu(numbers(5, 4), numbers(3, 4), numbers(3)), scaled]


def test_fallbacks_give_the_same(request: pytest.FixtureRequest) -> None:
    usual = results()
    request.getfixturevalue("without")
    for one, other in zip(usual, results(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("without")
def test_without_the_question_custom_ops_stay_off() -> None:
    assert private.functorch_is_active()


def test_transforms_are_noticed() -> None:
    assert not private.functorch_is_active()
    seen = []
    torch.func.vmap(lambda x: seen.append(private.functorch_is_active()) or x)(numbers(2))
    assert seen == [True]


def test_without_inductor_pdl_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.codegen", None)
    repair_inductor.cache_clear()
    try:
        assert not repair_inductor()
    finally:
        repair_inductor.cache_clear()


def test_custom_gradients_are_cached_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config

    name = "autograd_cache_allow_custom_autograd_functions"
    with private.caching_custom_gradients():
        assert getattr(config, name)
    assert not getattr(config, name)
    monkeypatch.setattr(torch._functorch, "config", object())  # a torch without this setting
    with private.caching_custom_gradients():
        pass


def test_triton_is_hashed_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, triton = threading.Event(), "torch._inductor.runtime.triton_compat"
    monkeypatch.setitem(sys.modules, triton, SimpleNamespace(HAS_TRITON=False, triton_key=hashed.set))
    private.start_hashing_triton()
    assert not hashed.wait(0.1)
    monkeypatch.setitem(sys.modules, triton, SimpleNamespace(HAS_TRITON=True, triton_key=hashed.set))
    private.start_hashing_triton()
    assert hashed.wait(10)
    monkeypatch.setitem(sys.modules, triton, None)  # importing it fails
    private.start_hashing_triton()


def test_without_operators_cpu_kernels_stay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_operator", lambda library, name: None)
    assert not private.has_reordered_linear()
    assert not private.has_mkl_linear()
    assert not private.has_4bit_matmul()


class Reduction(NamedTuple):
    """The facts that Inductor passes to its heuristics about a kernel that reduces rows."""

    width: int
    hint: ReductionHint

    @property
    def reduction_numel(self) -> sympy.Integer:
        return sympy.Integer(self.width)

    def get_reduction_hint(self) -> ReductionHint:
        return self.hint


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(
    ("kernel", "usual", "due"),
    [
        (Reduction(768, ReductionHint.INNER), True, True),
        (Reduction(3072, ReductionHint.INNER), False, True),
        (Reduction(2304, ReductionHint.DEFAULT), False, True),
        (Reduction(private.LONG_ROW + 1, ReductionHint.INNER), False, False),
        (Reduction(2048, ReductionHint.OUTER), False, False),
    ],
)
def test_long_rows_are_reduced_at_once_by_option(kernel: Reduction, usual: bool, due: bool, on: bool) -> None:
    known = SimpleNamespace(statically_known_leq=lambda a, b: a <= b)
    heuristics = private.long_row_choices()
    option = private.long_row_choices if on else None
    with V.set_graph_handler(SimpleNamespace(sizevars=known)), config.patch(inductor_choices_class=option):
        assert heuristics.should_use_persistent_reduction(kernel, False) == (due if on else usual)


class Node(NamedTuple):
    """The facts about a kernel that Inductor compares before it fuses two."""

    reads: tuple[MemoryDep | StarDep, ...]
    writes: tuple[MemoryDep | StarDep, ...]
    reduces: bool

    @property
    def read_writes(self) -> "Node":
        return self

    def is_reduction(self) -> bool:
        return self.reduces

    def get_nodes(self) -> list["Node"]:
        return [self]

    def is_foreach(self) -> bool:
        return False


def axes(name: str, *sizes: int) -> MemoryDep:
    """Return an access to all elements of a contiguous buffer by some axes."""
    variables = tuple(sympy.Symbol(f"d{i}", integer=True) for i in range(len(sizes)))
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    index = sum(x * stride for x, stride in zip(variables, strides, strict=True))
    return MemoryDep(name, index, variables, tuple(map(sympy.Integer, sizes)))


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(
    ("read", "shared"),
    [
        (axes("grad", 8, 6), True),  # by other axes, in the same order
        (axes("other", 8, 6), False),
        (axes("grad", 6, 8), True),
        (MemoryDep("grad", 8 * sympy.Symbol("d0") + sympy.Symbol("d1"), sympy.symbols("d0 d1"), (6, 8)), True),
        (MemoryDep("grad", 6 * sympy.Symbol("d1") + sympy.Symbol("d0"), sympy.symbols("d0 d1"), (6, 8)), False),
        (StarDep("grad"), False),
    ],
)
def test_gradients_of_norms_are_cast_by_the_kernel_that_adds_them(
    read: MemoryDep | StarDep, shared: bool, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()
    monkeypatch.setattr(
        InductorChoices, "can_fuse", staticmethod(lambda *given: seen.append(given[-1]) or given[-1] > 0)
    )
    norm = Node((), (axes("grad", 2, 4, 6), StarDep("sums")), reduces=True)
    cast = Node((read,), (axes("cast", 48),), reduces=False)
    graph = SimpleNamespace(sizevars=SizeVarAllocator())
    scheduler = SimpleNamespace(dep_size_hint=lambda x: 48)
    option = private.fused_cast_choices if on else None
    with V.set_graph_handler(graph), config.patch(inductor_choices_class=option):
        heuristics = private.fused_cast_choices()
        assert heuristics.can_fuse(scheduler, norm, cast, 0) == (on and shared)
        assert not heuristics.can_fuse(scheduler, cast, norm, 0)  # only the results of the gradient
        assert heuristics.can_fuse(scheduler, norm, cast, 7)
    assert seen == [48 if on and shared else 0, 0, 7]


def heads(x: Tensor, *order: int) -> Tensor:
    """Return the parts of x in some order, each seen as heads on the way, concatenated."""
    parts = [part.unflatten(2, (-1, 4)).transpose(1, 2) for part in x.split([8, 4, 4], dim=2)]
    return torch.cat([parts[i].transpose(1, 2).flatten(2) for i in order], dim=2)


def rejoined(x: Tensor) -> Tensor:
    return torch.cat(x.split([8, 4, 4], dim=2), dim=2)


JOINED = {
    "whole": (lambda x: heads(x, 0, 1, 2), True),
    "without heads": (rejoined, True),
    "along rows": (lambda x: torch.cat(x.split([2, 1], dim=0), dim=0), True),
    "in another order": (lambda x: heads(x, 0, 2, 1), False),
    "without the last": (lambda x: heads(x, 0, 1), False),
    "with one twice": (lambda x: heads(x, 0, 1, 1), False),
    "along another axis": (lambda x: torch.cat(x.split([8, 8], dim=2), dim=1), False),
    "of two tensors": (lambda x: torch.cat([x.split([8, 8], dim=2)[0], (x + 1).split([8, 8], dim=2)[1]], dim=2), False),
    "changed": (lambda x: torch.cat([2 * part for part in x.split([8, 8], dim=2)], dim=2), False),
    "rearranged": (lambda x: torch.cat([y.reshape(3, 4, 5).mT.reshape(3, 5, 4) for y in x.split(4, 2)], dim=2), False),
    "of an input": (lambda x: torch.cat([x, x + 1], dim=2), False),
    "of another layout": (lambda x: heads(x.mT.contiguous().mT, 0, 1, 2), False),
}


@pytest.mark.parametrize(("function", "due"), JOINED.values(), ids=JOINED)
def test_a_tensor_takes_the_place_of_its_parts_joined_again(function: Callable[[Tensor], Tensor], due: bool) -> None:
    x = torch.randn(3, 5, 16)

    def run(x: Tensor) -> Tensor:
        return function(x.sin()).cos()

    traced = make_fx(run, decompositions, tracing_mode="fake")(x)
    (use_whole,) = private.whole_pass_options().values()
    joint_graph.early_patterns.apply(traced.graph)  # as the compiler does before
    use_whole(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    kept = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert bool(kept) != due
    assert torch.equal(traced(x), run(x))


@pytest.mark.parametrize(
    ("run", "due"),
    [
        (lambda x: rejoined(x.sin()).cos(), True),
        (lambda x: rejoined(x).cos(), False),
        (lambda x: rejoined(x.sin()), False),
    ],
)
def test_inputs_and_outputs_stay_separate_tensors(run: Callable[[Tensor], Tensor], due: bool) -> None:
    traced = make_fx(run, decompositions, tracing_mode="fake")(torch.randn(3, 5, 16))
    (cat,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert (private.joined_again(cat) is not None) == due


def test_the_pass_over_parts_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, use_whole),) = private.whole_pass_options().items()
    assert hasattr(config, name)
    assert use_whole.uuid() == private.whole_pass_options()[name].uuid()  # compiled code is cached by it
    monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", None)
    assert private.whole_pass_options() == {}


@pytest.mark.parametrize("choices", [private.long_row_choices, private.fused_cast_choices])
def test_options_that_select_heuristics(choices: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (option,) = private.choice_options(choices).items()
    assert hasattr(config, option[0])
    assert pickle.loads(pickle.dumps(option[1])) is choices  # compiled code is cached by its options
    monkeypatch.setitem(sys.modules, "torch._inductor.choices", None)
    assert private.choice_options(choices) == {}


def test_compiled_code_is_not_shared_by_both_heuristics() -> None:
    assert private.long_row_choices().uuid() != private.fused_cast_choices().uuid()
