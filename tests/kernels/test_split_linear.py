"""A linear layer that is split, as a compiled half-precision step has it: here by its reference, and by Triton's
interpreter (TRITON_INTERPRET=1) as the kernel has it; on a GPU by `tests/gpu/test_split_linear.py`."""

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from anyformer.kernels import split_linear as module
from anyformer.kernels.fused_activation import TALL
from anyformer.kernels.split_linear import launch, reference
from anyformer.nn.linear import Linear
from anyformer.nn.transforms.substitute import substitute
from tests.narrow import begin, same, slopes

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler, and of CPUs without bf16
INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parts of each joined gradient."""
    found = list[int]()

    def note(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        found.append(len(parts))
        return reference(parts)

    torch.compiler.reset()
    monkeypatch.setattr(module, "reference", note)
    return found


def parts_of(layer: Linear, direct: bool = True) -> Callable[[Tensor], Tensor]:
    """Return a function of the parts, each used differently."""

    def run(x: Tensor) -> Tensor:
        parts = layer.split(x, direct=direct)
        return torch.cat([(i + 1) * part.float().square() for i, part in enumerate(parts)], dim=-1)

    return run


@pytest.mark.parametrize("outputs", [(24, 8, 8), (40, 16)])
def test_values_and_gradients(outputs: tuple[int, ...], joined: list[int]) -> None:
    layer = Linear(32, outputs)
    substitute(layer, "training")
    begin(layer, "cpu")
    run = parts_of(layer)
    same(layer, run, torch.compile(run, backend="aot_eager", fullgraph=True), 3, 50, 32)
    assert joined == [len(outputs)]  # but not where it is not compiled


def test_a_part_that_is_not_used_has_no_gradient(joined: list[int]) -> None:
    layer = Linear(32, (24, 8, 8))
    substitute(layer, "training")
    begin(layer, "cpu")

    def run(x: Tensor) -> Tensor:
        return layer.split(x, direct=True)[1]

    same(layer, run, torch.compile(run, backend="aot_eager", fullgraph=True), 3, 50, 32)
    assert joined == [3]


@pytest.mark.parametrize(
    ("outputs", "bias", "direct"), [((24, 8), True, False), ((24, 8), False, True), (24, True, True)]
)
def test_others_are_as_they_were(outputs: int | tuple[int, ...], bias: bool, direct: bool, joined: list[int]) -> None:
    layer = Linear(32, outputs, bias=bias)
    substitute(layer, "training")
    begin(layer, "cpu")
    slopes(layer, torch.compile(parts_of(layer, direct), backend="aot_eager"), 3, 50, 32)
    assert joined == []


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_the_backward_pass_keep_the_layer_apart(kind: str, joined: list[int]) -> None:
    layer = Linear(32, (24, 8))
    substitute(layer, "training")
    begin(layer, "cpu")
    getattr(layer, kind)(lambda *given: None)
    slopes(layer, torch.compile(parts_of(layer), backend="aot_eager"), 3, 50, 32)
    assert joined == []


def test_hooks_see_the_whole_output(joined: list[int]) -> None:
    layer = Linear(32, (24, 8))
    substitute(layer, "training")
    begin(layer, "cpu")
    layer.register_forward_hook(lambda *given: given[-1] * 0)
    found = slopes(layer, torch.compile(parts_of(layer), backend="aot_eager"), 3, 50, 32)
    assert not found[0].any()
    assert joined == []


ways = [reference, pytest.param(launch, marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"))]


@pytest.mark.parametrize("way", ways)
@given(
    rows=st.integers(1, 2 * TALL + 1),
    widths=st.lists(st.integers(1, 300), min_size=2, max_size=3),
    apart=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_side_by_side_with_sums(
    way: Callable[..., tuple[Tensor, Tensor]], rows: int, widths: list[int], apart: bool
) -> None:
    """The matrices are separate, or parts of one."""
    whole = torch.randn(rows, sum(widths))
    parts = [part.contiguous() if apart else part for part in whole.split(widths, dim=1)]
    joined, sums = way(parts)
    assert torch.equal(joined, torch.cat(parts, dim=1))
    torch.testing.assert_close(sums.double().sum(0), joined.double().sum(0), atol=1e-3, rtol=1e-4)
    assert len(sums) == -(-rows // TALL)
