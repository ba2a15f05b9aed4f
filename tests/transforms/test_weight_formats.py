"""Linear layers as a product: every shape times every weight format, with and without a low-rank adapter."""

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import LoRA
from anyformer.kernels.expert_matmul import ExpertRows
from anyformer.nn.experts import StackedLinear
from anyformer.nn.linear import Linear
from anyformer.nn.lora import LowRank
from anyformer.nn.transforms.arm_kernel import ArmKernelFormat
from anyformer.nn.transforms.fp8 import Float8Format, learn_in_fp8
from anyformer.nn.transforms.rounding import Bits, RoundedFormat, round_off
from anyformer.nn.transforms.substitute import FastLinear, substitute
from tests.strategies import seeds

Format = Literal["plain", "fp8", "int8 rows", "int8", "int4"]
FORMATS: list[Format] = ["plain", "fp8", "int8 rows", "int8", "int4"]
# largest error of an output, as a share of the largest one: rounding of fp32, or of operands in fp8
TOLERANCE = {"plain": 1e-5, "fp8": 0.1, "int8 rows": 1e-5, "int8": 1e-5, "int4": 1e-5}
shapes = st.sampled_from([(16, 16), (48, (16, 32)), (32, (16, 16, 48)), (80, 16)])


def build(shape: Any, format: Format, *, lora: bool = False, bias: bool = True, seed: int = 0) -> tuple[Linear, Tensor]:
    """Return a layer in training mode, and the dense weight of its format."""
    torch.manual_seed(seed)
    layer = Linear(*shape, bias=bias)
    weight = layer.rows().detach().clone()
    if lora:
        layer.lora = LowRank(layer.in_features, layer.out_features, LoRA(rank=3, alpha=5.0))
        torch.nn.init.normal_(layer.lora.a)
        torch.nn.init.normal_(layer.lora.b)
    match format:
        case "plain":
            return layer, weight
        case "fp8":
            learn_in_fp8(layer)
            return layer, weight
        case _:
            bits: Bits = 4 if format == "int4" else 8
            rounded = round_off(weight, bits, None if format == "int8 rows" else 32)
            layer.weight, layer.format = None, RoundedFormat(rounded, torch.float32)
            return layer, rounded.dense()


def near(ours: Tensor, exact: Tensor, format: Format) -> None:
    ours, exact = ours.detach(), exact.detach()
    assert float((ours - exact).abs().max()) <= TOLERANCE[format] * float(exact.abs().max().clamp(min=1))


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None)  # the first matmul of a process takes long
@given(shape=shapes, bias=st.booleans(), lora=st.booleans(), seed=seeds)
def test_each_format_equals_its_dense_weight(format: Format, shape: Any, bias: bool, lora: bool, seed: int) -> None:
    """The whole output, its parts, and the weights of the parts with and without the adapter."""
    layer, weight = build(shape, format, lora=lora, bias=bias, seed=seed)
    x = torch.randn(2, 3, layer.in_features)
    effective = weight if layer.lora is None else weight + 5 / 3 * layer.lora.b @ layer.lora.a
    for training in (True, False):
        y = layer.train(training)(x)
        near(y, F.linear(x, effective, layer.bias), format)
        assert torch.equal(torch.cat(layer.split(x), dim=-1), y)
    for i, (rows, dense) in enumerate(zip(weight.split(layer.parts), effective.split(layer.parts), strict=True)):
        torch.testing.assert_close(layer.rows(i), rows, rtol=0, atol=0)
        torch.testing.assert_close(layer.dense(i), dense)
    substitute(layer)
    assert isinstance(layer, FastLinear)
    assert layer.fuses_activation == (format in ("plain", "fp8") and bias and not lora)


@pytest.mark.parametrize("format", FORMATS)
@given(shape=shapes, bias=st.booleans(), seed=seeds)
def test_an_adapter_adds_its_output_to_any_format(format: Format, shape: Any, bias: bool, seed: int) -> None:
    layer, _ = build(shape, format, lora=True, bias=bias, seed=seed)
    x, adapter = torch.randn(2, 3, layer.in_features), layer.lora
    y = layer(x)
    layer.lora = None
    assert adapter is not None
    assert torch.equal(y, layer(x) + adapter(x))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@given(shape=shapes, bias=st.booleans(), seed=seeds)
def test_gradients_of_adapters_are_those_over_the_dense_weight(
    format: Format, autocast: bool, shape: Any, bias: bool, seed: int
) -> None:
    """The base is frozen; gradients of the input, A and B. Groups of integers give the bits of the dense weight."""
    layer, weight = build(shape, format, lora=True, bias=bias, seed=seed)
    reference, _ = build(shape, "plain", lora=True, bias=bias, seed=seed)
    reference.rows().data.copy_(weight)
    x, results = torch.randn(2, 3, layer.in_features), []
    for each in (layer, reference):
        assert each.lora is not None
        each.requires_grad_(False)
        each.lora.requires_grad_(True)
        read = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = each(read)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), (read, each.lora.a, each.lora.b))])
    for ours, exact in zip(*results, strict=True):
        if format in ("int8", "int4") and not autocast:
            assert torch.equal(ours, exact)
        elif autocast or format == "fp8":
            assert float((ours - exact).detach().norm()) <= 0.15 * float(exact.detach().norm())
        else:
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@given(seed=seeds, group=st.sampled_from([None, 32]))
def test_rounded_experts_equal_dense_ones(bits: Bits, seed: int, group: int | None) -> None:
    torch.manual_seed(seed)
    plain, stack = StackedLinear(3, 40, (8, 16), bias=True), StackedLinear(3, 40, (8, 16), bias=True)
    rounded = round_off(torch.randn(3, 24, 40), bits, group)
    for each in (plain, stack):
        torch.nn.init.zeros_(each.bias)
    plain.rows().data.copy_(rounded.dense())
    stack.weight, stack.format = None, RoundedFormat(rounded, torch.float32)
    experts = torch.randint(0, 3, (7,)).sort().values
    rows = ExpertRows(experts, experts.bincount(minlength=3))
    x, results = torch.randn(7, 40), []
    for each in (plain, stack):
        read = x.clone().requires_grad_()
        y = torch.cat(each(read, rows), dim=-1)
        results.append((y, *torch.autograd.grad(y.square().sum(), read)))
        with torch.no_grad():
            torch.testing.assert_close(torch.cat(each(x, rows), dim=-1), y)
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact)


@given(
    bits=st.sampled_from([8, 4]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 150)),
    power=st.floats(-30, 30),
    seed=st.integers(0, 999),
)
def test_rounding_twice_is_rounding_once(bits: Bits, shape: tuple[int, int], power: float, seed: int) -> None:
    """Bit for bit with scales of groups: this is what a resumed training with rounded weights relies on."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10**power
    weight[0] = 0
    once = round_off(weight, bits, 32)
    twice = round_off(once.dense(), bits, 32)
    assert torch.equal(once.q, twice.q)
    assert torch.equal(once.scale, twice.scale)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracing
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_compiles_in_one_graph(format: Format) -> None:
    layer, _ = build((32, (16, 16)), format, lora=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 32, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    torch.testing.assert_close(y, layer(x))
    torch._dynamo.reset()


def test_formats_without_a_weight_say_so() -> None:
    with pytest.raises(NotImplementedError, match="Float8Format cannot return its weight"):
        Float8Format().dense()
    packed = ArmKernelFormat.__new__(ArmKernelFormat)
    with pytest.raises(NotImplementedError, match="ArmKernelFormat cannot"):
        packed.dense()
