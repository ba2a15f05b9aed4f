"""Weights of 8 and 4 bits: how far they may be off, that a model uses just these, and what it saves."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import anyformer as af
from anyformer.attention.layout import Layout
from anyformer.kernels import dot_product
from anyformer.kernels.cross_entropy import token_loss
from anyformer.nn.experts import StackedLinear
from anyformer.nn.heads import LossTarget
from anyformer.nn.linear import Linear
from anyformer.nn.transforms.arm_kernel import ArmKernelFormat
from anyformer.nn.transforms.dot_product_format import DotProductFormat
from anyformer.nn.transforms.quantise import nbytes, quantise
from anyformer.nn.transforms.rounding import Bits, RoundedFormat, pack_nibbles, round_off, unpack_nibbles

SIZES: dict[str, Any] = {"depth": 2, "width": 48, "heads": 4, "vocab": 61}
MODELS = {
    "llama": lambda: af.presets.llama(**SIZES, kv_heads=2, ff=80),
    "gpt2": lambda: af.presets.gpt2(**SIZES),
    "mixtral": lambda: af.presets.mixtral(**SIZES, ff=40, experts=4),
    "deepseek": lambda: af.presets.deepseek(**SIZES, key_width=24, ff=20, experts=4, top_k=2),
    "t5": lambda: af.presets.t5(**SIZES, key_width=12),
}
HOW: list[tuple[Bits, int | None]] = [(8, None), (4, None), (4, 64)]
ARM = torch.backends.kleidiai.is_available()
ARM_ALONE = pytest.mark.skipif(not ARM, reason="there is no such kernel here")
KERNEL_4BIT = pytest.mark.skipif(not (ARM or dot_product.is_available(4)), reason="there is no such kernel here")
KERNEL_8BIT = pytest.mark.skipif(not (ARM or dot_product.is_available()), reason="there is no such kernel here")


def build(name: str) -> af.Transformer:
    model = af.Transformer(MODELS[name]()).eval()
    with torch.no_grad():  # biases too, and logits that tell tokens apart
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def rounded(model: af.Transformer, bits: Bits, group: int | None) -> af.Transformer:
    """The model with the weights that quantising gives it, as plain numbers."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if isinstance(module, Linear | StackedLinear):
            module.weight.data = round_off(module.weight.data, bits, (group or 32) if bits == 4 else None).dense()
    if (table := getattr(other.head, "table", None)) is not None:
        table.data = round_off(table.data, 8).dense()
    return other


def formats(model: af.Transformer) -> set[type]:
    """Return the formats of all linear layers of the blocks."""
    return {type(m.format) for m in model.modules() if isinstance(m, Linear | StackedLinear)}


def logits(model: af.Transformer) -> torch.Tensor:
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids, ids) if model.encoder else model(ids)


@given(
    bits=st.sampled_from([8, 4]),
    group=st.sampled_from([32, 64, 128]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 150)),
    size=st.sampled_from([1e-12, 1e-3, 1.0, 1e8]),
    seed=st.integers(0, 99),
)
def test_no_weight_moves_by_more_than_half_a_scale(
    bits: Bits, group: int, shape: tuple[int, int], size: float, seed: int
) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) ** 5 * size  # with outliers
    w[0] = 0
    found = round_off(w, bits, group if bits == 4 else None)
    scale = found.scale.float().repeat_interleave(found.q.shape[-1], dim=-1)[:, : shape[1]]
    assert ((found.dense() - w).abs() <= scale * 0.5001).all()
    assert not found.dense()[0].any()
    assert found.q.abs().max() <= (127 if bits == 8 else 7)


def test_two_fit_in_a_byte() -> None:
    q = torch.randint(-8, 8, (3, 4, 32), dtype=torch.int8)
    assert pack_nibbles(q).shape == (3, 4, 16)
    assert unpack_nibbles(pack_nibbles(q)).equal(q)


@pytest.mark.parametrize(("bits", "group"), HOW)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_uses_the_rounded_weights_and_no_others(name: str, bits: Bits, group: int | None) -> None:
    model = build(name)
    before, state = logits(model), copy.deepcopy(model.state_dict())
    small = quantise(model, bits, group=group, way="plain")
    torch.testing.assert_close(logits(small), logits(rounded(model, bits, group)), rtol=1e-5, atol=1e-5)
    assert not logits(small).equal(before)
    assert logits(model).equal(before)
    assert all(state[key].equal(x) for key, x in model.state_dict().items())
    layers = [m for m in small.modules() if isinstance(m, Linear | StackedLinear)]
    assert layers
    assert all(m.weight is None and isinstance(m.format, RoundedFormat) for m in layers)
    assert not any(p.requires_grad for p in small.parameters())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("bits", "way"),
    [
        (8, "plain"),
        (4, "plain"),
        pytest.param(8, "kernel", marks=KERNEL_8BIT),
        pytest.param(4, "kernel", marks=KERNEL_4BIT),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_decoding_with_a_cache_is_that_without(name: str, bits: Bits, way: Any) -> None:
    small = quantise(build(name), bits, way=way)
    ids = torch.randint(61, (2, 5))
    out = af.generate(small, ids, max_new_tokens=8)
    with torch.no_grad():
        again = small(ids, out[:, :-1]) if small.encoder else small(out[:, :-1])
    chosen = again.gather(-1, out[:, 1:, None])[..., 0]
    new = slice(0, None) if small.encoder else slice(ids.shape[1] - 1, None)
    # the kernel may round a token to either side of a half, and so may what the product before it adds up
    near = 1e-4 if way == "plain" else 0.1
    assert (chosen >= again.amax(dim=-1) - near)[:, new].all()


@ARM_ALONE
@pytest.mark.parametrize(("bits", "group"), HOW)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [32, 70, 96, 129])
def test_the_kernel_rounds_tokens_and_nothing_else(bits: Bits, group: int | None, bias: bool, width: int) -> None:
    w, b, x = torch.randn(20, width), torch.randn(20) if bias else None, torch.randn(2, 50, width)
    found = round_off(w, bits, (group or 32) if bits == 4 else None)
    exact = RoundedFormat(found, torch.float32).matmul(x, None, b)
    fast = ArmKernelFormat(found, b).matmul(x, None, b)
    # of a token rounded to 255 steps each number is off by half a step at most: so is no product by more than this
    step = (x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)) / 255
    most = step[..., None] * found.dense().abs().sum(-1)
    assert ((fast - exact).abs() <= most + 1e-4).all()
    assert (fast - exact).norm() < 0.015 * exact.norm()


@KERNEL_4BIT
def test_where_there_is_a_kernel_it_is_used_save_for_weights_that_others_read() -> None:
    found = DotProductFormat if dot_product.is_available(4) else ArmKernelFormat
    assert formats(quantise(build("deepseek"), 4)) == {found, RoundedFormat}
    assert formats(quantise(build("llama"), 4)) == {found}
    with pytest.raises(ValueError, match="a model in fp32"):
        quantise(build("llama").double(), way="kernel")


@KERNEL_8BIT
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", MODELS)
def test_heads_have_rounded_tables_and_inputs_their_own(name: str, bits: Bits) -> None:
    """A tied table is rounded where it is said, not where it is read, and only for the kernel."""
    model = build(name)
    small, plain = quantise(model, bits), quantise(model, bits, way="plain")
    tied = model.config.tie in ("output", "all")
    assert isinstance(small.head.format, DotProductFormat if dot_product.is_available() else ArmKernelFormat)
    assert isinstance(plain.head.format, RoundedFormat) is not tied
    table = model.table(model.target or model.source)
    assert table is not None
    assert small.table(small.target or small.source).equal(table)  # type: ignore[union-attr]
    weight = table if tied else model.head.table
    hidden, found = torch.randn(2, 5, 48), round_off(weight, 8)
    with torch.no_grad():
        said, exact = small.apply_head(hidden, Layout(torch.arange(5)[None])), hidden @ found.dense().T
    bias = model.head.bias
    exact = model.head.scale * exact + (0 if bias is None else bias)
    assert (said - exact).norm() < 0.015 * exact.norm()
    labels = torch.randint(61, (2, 5))
    torch.testing.assert_close(
        small.head.loss(hidden, None, LossTarget(labels)), token_loss(said, labels), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("bits", "group", "times"), [(8, None, 3.9), (4, 32, 7.1), (4, 128, 7.7)])
def test_memory_falls(bits: Bits, group: int | None, times: float) -> None:
    model = af.Transformer(af.presets.llama(depth=1, width=512, heads=4, ff=1024, vocab=8))
    assert nbytes(model) == 4 * model.num_parameters()
    assert model.decoder is not None
    small = quantise(model, bits, group=group, way="plain").decoder
    assert small is not None
    norms = sum(p.nbytes for p in small.parameters())
    assert (nbytes(model.decoder) - norms) / (nbytes(small) - norms) > times
    tied = af.Transformer(MODELS["t5"]())
    assert nbytes(tied) == 4 * tied.num_parameters()


@pytest.mark.parametrize(
    ("name", "bits", "way"),
    [("llama", 4, "plain"), ("mixtral", 8, "plain"), pytest.param("llama", 8, "kernel", marks=KERNEL_8BIT)],
)
def test_it_compiles_without_a_break(name: str, bits: Bits, way: Any) -> None:
    small = quantise(build(name), bits, way=way)
    ids = torch.randint(61, (2, 9))
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(small, backend="eager", fullgraph=True)(ids)
        torch.testing.assert_close(compiled, small(ids), rtol=1e-4, atol=1e-4 if way == "plain" else 0.1)


def test_a_model_keeps_its_precision() -> None:
    small = quantise(build("llama").double(), 4)
    assert logits(small).dtype is torch.float64
    assert small.new_cache(1, 4) is not None


def test_what_is_refused() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="bits = 3: must be 8 or 4"):
        quantise(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with 8 bits a row has one scale"):
        quantise(model, 8, group=32)
    with pytest.raises(ValueError, match="group = 40: must be a multiple of 32"):
        quantise(model, 4, group=40)


@pytest.mark.skipif("ANYFORMER_WEIGHTS" not in os.environ, reason="ANYFORMER_WEIGHTS names no folder of weights")
@pytest.mark.parametrize(("bits", "way", "least"), [(8, "plain", 0.99), (8, "auto", 0.97), (4, "auto", 0.85)])
def test_a_trained_model_says_much_the_same(bits: Bits, way: Any, least: float) -> None:
    from anyformer.interop.llama2c import read

    folder = Path(os.environ["ANYFORMER_WEIGHTS"]) / "stories260K"
    model, _ = read(folder / "stories260K.bin", folder / "tok512.bin")
    told = af.generate(model, torch.tensor([[1]]), max_new_tokens=256)
    with torch.no_grad():
        same = model(told).argmax(-1) == quantise(model, bits, way=way)(told).argmax(-1)
    assert same.float().mean() > least
