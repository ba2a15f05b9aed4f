"""A product with the activation behind it, as a compiled step in half precision has it: here by its reference, and by
Triton's interpreter (TRITON_INTERPRET=1) as the kernel has it; on a GPU by `tests/gpu/test_fused_activation.py`."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from anyformer.config import Activation, Gelu, Relu, Silu
from anyformer.kernels import fp8, fused_activation as activated
from anyformer.kernels.fused_activation import TALL, launch, reference
from anyformer.nn.feedforward import PlainFFN
from anyformer.nn.transforms.fp8 import learn_in_fp8
from anyformer.nn.transforms.substitute import substitute
from tests.narrow import begin, same, slopes

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler, and of CPUs without bf16
INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations that had their own way back."""
    found = list[str]()

    def note(slope: Tensor, made: Tensor, act: str, tall: int = TALL) -> tuple[Tensor, Tensor]:
        found.append(act)
        return reference(slope, made, act, tall)

    torch.compiler.reset()
    monkeypatch.setattr(activated, "reference", note)
    return found


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("spec", "name"), [(Relu(), "relu"), (Gelu(approximate="none"), "gelu"), (Gelu(approximate="tanh"), "gelu_tanh")]
)
def test_values_and_gradients(spec: Activation, name: str, narrow: bool, asked: list[str]) -> None:
    ffn = PlainFFN(32, 48, spec, bias=True, dropout=0.0)
    if narrow:
        learn_in_fp8(ffn)
    substitute(ffn, "training")
    begin(ffn.up, "cpu")
    within = 0.03 if narrow else 0.01  # a value near the middle of two of fp8's is rounded to either
    same(ffn.up, ffn.lift, torch.compile(ffn.lift, backend="aot_eager"), 3, 50, 32, within=within)
    assert asked == [name]  # but not where it is not compiled


@pytest.mark.parametrize("spec", [Relu(), Gelu()])
def test_any_number_of_rows_is_one_program(spec: Activation, asked: list[str]) -> None:
    ffn = PlainFFN(24, 40, spec, bias=True, dropout=0.0)
    substitute(ffn, "training")
    begin(ffn.up, "cpu")
    programs = CompileCounterWithBackend("aot_eager")
    run = torch.compile(ffn.lift, backend=programs, dynamic=True)
    for rows in (50, 70, 90):
        same(ffn.up, ffn.lift, run, 3, rows, 24)
    assert programs.frame_count == 1


def test_what_others_do_with_the_product_is_done(asked: list[str]) -> None:
    ffn = PlainFFN(24, 40, Gelu(), bias=True, dropout=0.0)
    substitute(ffn, "training")
    begin(ffn.up, "cpu")
    ffn.up.register_forward_hook(lambda *given: given[-1] * 0)
    found = slopes(ffn.up, torch.compile(ffn.lift, backend="aot_eager"), 3, 50, 24)
    assert not found[0].any()
    assert asked == []


def test_other_derivatives_are_torch_s_own(asked: list[str]) -> None:
    """By half precision: the second derivative of a sum of GELUs."""
    ffn = PlainFFN(24, 40, Gelu(), bias=True, dropout=0.0)
    substitute(ffn, "training")
    begin(ffn.up, "cpu")
    x = torch.randn(3, 24)

    def curve(y: Tensor) -> Tensor:
        once = torch.func.grad(lambda z: ffn.lift(z).float().square().sum())
        return torch.func.grad(lambda z: once(z).square().sum())(y)

    with torch.autocast("cpu", torch.bfloat16):
        compiled, plain = torch.compile(curve, backend="aot_eager")(x), curve(x)
    assert (compiled - plain).norm() < 0.03 * plain.norm()


@pytest.mark.parametrize(("spec", "bias", "dropout"), [(Silu(), True, 0.0), (Relu(), False, 0.0), (Gelu(), True, 0.5)])
def test_others_are_as_they_were(spec: Activation, bias: bool, dropout: float, asked: list[str]) -> None:
    ffn = PlainFFN(24, 40, spec, bias, dropout)
    substitute(ffn, "training")
    begin(ffn.up, "cpu")
    slopes(ffn.up, torch.compile(ffn.lift, backend="aot_eager"), 3, 50, 24)
    assert asked == []


ways = [reference, pytest.param(launch, marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"))]


@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [TALL, TALL + 7, 5])
@pytest.mark.parametrize("way", ways)
def test_one_pass(way, rows: int, act: str) -> None:
    torch.manual_seed(0)
    read, slope = 3 * torch.randn(rows, 200), torch.randn(rows, 200)
    exact = read.double().requires_grad_()
    out = F.relu(exact) if act == "relu" else F.gelu(exact, approximate=activated.APPROXIMATE[act])
    (due,) = torch.autograd.grad(out, exact, slope.double())
    found, sums = way(slope, F.relu(read) if act == "relu" else read, act)
    torch.testing.assert_close(found.double(), due, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(sums.double().sum(0), due.sum(0), atol=1e-3, rtol=1e-4)
    assert len(sums) == -(-rows // TALL)


narrow_ways = [
    fp8.reference,
    pytest.param(fp8.launch, marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")),
]


@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "columns"), [(fp8.TALL, 256), (fp8.TALL + 7, 200), (5, 384)])
@pytest.mark.parametrize("way", narrow_ways)
def test_one_pass_with_a_cast(way, rows: int, columns: int, act: str) -> None:
    torch.manual_seed(0)
    read, slope = 3 * torch.randn(rows, columns), torch.randn(rows, columns)
    due, due_sums = reference(slope, read, act, fp8.TALL)
    due_narrow, due_scales = fp8.to_fp8(due, fp8.E5M2)
    found, narrow, scales, sums = way(slope, read, act)
    torch.testing.assert_close(found, due, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(sums, due_sums, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(scales, due_scales, atol=0, rtol=1e-4)
    equal = narrow.float() == due_narrow.float()
    assert equal.float().mean() > 0.9  # the interpreter of Triton 3.6 loses the carry of a mantissa
