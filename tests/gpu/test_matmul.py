"""Products of one row on a GPU, by fp64."""

import copy
import random as numbers
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer import presets
from anyformer.generation.generate import generate
from anyformer.kernels.int4 import fits_int4_kernel, int4_linear, interleave
from anyformer.kernels.matmul import MAX_INT8_ROWS, RowFusion, fits_row_kernel, int8_linear, linear, one_row_linear
from anyformer.nn.linear import Linear
from anyformer.nn.model import Transformer
from anyformer.nn.transforms import substitute
from anyformer.nn.transforms.quantise import quantise
from anyformer.nn.transforms.rounding import Rounded, pack_nibbles, round_off
from tests.row_fusion import apart

CUDA = torch.device("cuda")
SHAPES = [(3072, 2048), (2048, 8192), (50257, 768), (1030, 512), (2048, 1536)]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA)


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_as_linear(n: int, k: int, biased: bool, dtype: torch.dtype, measured: Callable[..., None]):
    """Rounded once, at the end: half of 2⁻⁸ or of 2⁻¹¹."""
    x, weight = random(0, 1, 1, k).to(dtype), random(1, n, k).to(dtype)
    bias = random(2, n).to(dtype) if biased else None
    wide = None if bias is None else bias.double()
    rounded = round_off(weight, 8)
    with torch.no_grad():
        assert fits_row_kernel(x, weight)
        plain = error(linear(x, weight, bias), F.linear(x.double(), weight.double(), wide))
        small = one_row_linear(x, rounded.q[:, 0], rounded.scale[:, 0], bias)
    eighth = error(small, F.linear(x.double(), rounded.dense().double(), wide))
    measured(plain=plain, eighth=eighth)
    assert max(plain, eighth) < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 8, 17, MAX_INT8_ROWS])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_few_rows(n: int, k: int, rows: int, dtype: torch.dtype):
    x, rounded, bias = random(0, 1, rows, k).to(dtype), round_off(random(1, n, k).to(dtype), 8), random(2, n).to(dtype)
    with torch.no_grad():
        assert fits_row_kernel(x, rounded.q[:, 0], MAX_INT8_ROWS)
        found = int8_linear(x, rounded.q[:, 0], rounded.scale[:, 0], bias)
    exact = F.linear(x.double(), rounded.dense().double(), bias.double())
    assert error(found, exact) < torch.finfo(dtype).eps


def test_every_number_of_8_bits():
    q = torch.arange(-128, 128, device=CUDA).repeat(1024, 8).to(torch.int8)
    x, scale = torch.zeros(1, 2048, device=CUDA, dtype=torch.bfloat16), torch.ones(1024, device=CUDA)
    for at in (0, 1, 127, 128, 255, 1003, 2047):
        x.zero_()[0, at] = 1
        with torch.no_grad():
            assert torch.equal(one_row_linear(x, q, scale, None)[0], q[:, at].bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_4_bits(n: int, k: int, group: int, dtype: torch.dtype, measured: Callable[..., None]):
    """Rounded once, at the end."""
    x, rounded, bias = random(0, 1, 1, k).to(dtype), round_off(random(1, n, k), 4, group), random(2, n).to(dtype)
    packed = interleave(pack_nibbles(rounded.q))
    with torch.no_grad():
        assert fits_int4_kernel(x, packed)
        found = int4_linear(x, packed, rounded.scale, bias)
    apart = error(found, F.linear(x.double(), rounded.dense().double(), bias.double()))
    measured(fourth=apart)
    assert apart < torch.finfo(dtype).eps


def test_every_number_of_4_bits():
    q = (torch.arange(2048, device=CUDA) * 5 // 3 % 16 - 8).to(torch.int8).repeat(1024, 1).unflatten(1, (-1, 32))
    packed, scale = interleave(pack_nibbles(q)), torch.ones(1024, 64, device=CUDA, dtype=torch.bfloat16)
    x = torch.zeros(1, 2048, device=CUDA, dtype=torch.bfloat16)
    for at in (*range(32), 127, 1003, 2047):
        x.zero_()[0, at] = 1
        with torch.no_grad():
            assert torch.equal(int4_linear(x, packed, scale, None)[0], q.flatten(1)[:, at].bfloat16())


@pytest.mark.parametrize("seed", range(24))
def test_steps_around_a_row(seed: int, measured: Callable[..., None]):
    """Norm, gate and residual sum in the kernels, for random shapes; rounded once, at the end."""
    rng = numbers.Random(seed)
    n, k = rng.choice([513, 1030, 2048, 3072, 8192]), 256 * rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 32])
    dtype, gated = rng.choice([torch.bfloat16, torch.float16]), rng.random() < 0.5
    rows = 2 * n if gated else n
    norm, eps = (random(3, k).to(dtype), 10.0 ** rng.randint(-6, 0)) if rng.random() < 0.7 else (None, 0.0)
    fusion = RowFusion(norm, eps, gated, random(4, 1, 1, n).to(dtype) if rng.random() < 0.5 else None)
    x, weight = random(0, 1, 1, k).to(dtype), (random(1, rows, k) * k**-0.5).to(dtype)
    bias = random(2, rows).to(dtype) if rng.random() < 0.5 else None
    eighth, fourth = round_off(weight, 8), round_off(weight, 4, rng.choice([32, 64, 128]))
    packed = interleave(pack_nibbles(fourth.q))
    with torch.no_grad():
        found = {
            "half": (one_row_linear(x, weight, None, bias, *fusion), weight),
            "int8": (one_row_linear(x, eighth.q[:, 0], eighth.scale[:, 0], bias, *fusion), eighth.dense()),
            "int4": (int4_linear(x, packed, fourth.scale, bias, *fusion), fourth.dense()),
        }
    errors = {name: error(y, apart(x.double(), dense, bias, fusion)) for name, (y, dense) in found.items()}
    measured(**errors)
    assert max(errors.values()) < torch.finfo(dtype).eps


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_fused_rows_one_after_the_other(bits: int):
    """Each kernel prefetches weights before the last has ended, and reads only then what it wrote."""
    norms = [random(i, 1024).bfloat16() for i in range(8)]
    wide = [(random(i, 4096, 1024) / 32, random(i, 1024, 2048) / 45) for i in range(8)]
    layers = [
        [w.bfloat16() if bits == 16 else round_off(w, bits, 32 if bits == 4 else None) for w in ws] for ws in wide
    ]

    def multiply(x: Tensor, weight: Tensor | Rounded, fusion: RowFusion) -> Tensor:
        if isinstance(weight, Tensor):
            return one_row_linear(x, weight, None, None, *fusion)
        if bits == 8:
            return one_row_linear(x, weight.q[:, 0], weight.scale[:, 0], None, *fusion)
        return int4_linear(x, interleave(pack_nibbles(weight.q)), weight.scale, None, *fusion)

    def chain(x: Tensor, multiply: Callable[[Tensor, Tensor | Rounded, RowFusion], Tensor]) -> Tensor:
        for norm, (up, down) in zip(norms, layers, strict=True):
            h = multiply(x, up, RowFusion(norm, 1e-5, gated=True))
            x = multiply(h, down, RowFusion(residual=x))
        return x

    def exactly(x: Tensor, weight: Tensor | Rounded, fusion: RowFusion) -> Tensor:
        return apart(x, weight if isinstance(weight, Tensor) else weight.dense(), None, fusion)

    x = random(0, 1, 1024).bfloat16()
    with torch.no_grad():
        for _ in range(2):
            chain(x, multiply)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x, multiply)
        for seed in range(20):
            x.copy_(random(seed, 1, 1024))
            graph.replay()
            assert error(out, chain(x.double(), exactly)) < 5e-2


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_fused_rows_of_a_model(bits: Literal[8, 4] | None, monkeypatch: pytest.MonkeyPatch):
    """Logits of decode steps with and without fusion, which round at other places."""
    torch.manual_seed(0)
    config = presets.llama(depth=2, width=1024, heads=8, kv_heads=4, ff=2048, vocab=512)
    model = Transformer(config).to(CUDA, torch.bfloat16).eval()
    model = model if bits is None else quantise(model, bits)
    substitute.substitute(model)
    ids = torch.randint(512, (1, 8), generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)

    def logits() -> Tensor:
        cache = model.new_cache(1, 16)
        return torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(8)], dim=1)

    with torch.no_grad():
        fused = logits()
        monkeypatch.setattr(substitute, "is_few_rows", lambda x: False)
        separate = logits()
    assert not torch.equal(fused, separate)
    assert error(fused, separate.double()) < 5e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_one_after_the_other(compiled: bool):
    """Each begins before the last has ended, and reads what it wrote, in a graph, too."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (Linear(512, 2048), nn.SiLU(), Linear(2048, 512), nn.LayerNorm(512))]
    model = nn.Sequential(*layers).to(CUDA, torch.bfloat16).requires_grad_(False)
    exact = copy.deepcopy(model).double()
    run = torch.compile(model) if compiled else model
    x = random(0, 1, 512).bfloat16()
    with torch.no_grad():
        for _ in range(2):
            run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x)
        for seed in range(20):
            x.copy_(random(seed, 1, 512))
            graph.replay()
            assert error(out, exact(x.double())) < 5e-2


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_compiled_decode_step_of_one_row(bits: Literal[8, 4] | None):
    """Inductor fuses the custom operators of a wide Llama into kernels with valid names; the tokens stay the same."""
    config = presets.llama(depth=2, width=1024, heads=8, kv_heads=4, ff=2048, vocab=512)
    torch.manual_seed(0)
    model = Transformer(config).to(CUDA, torch.bfloat16).eval()
    model = model if bits is None else quantise(model, bits)
    substitute.substitute(model)
    ids = torch.randint(512, (1, 8), generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)
    compiled, eager = (generate(model, ids, max_new_tokens=16, compile=flag) for flag in (True, False))
    assert torch.equal(compiled[:, :12], eager[:, :12])  # later tokens may break a near tie differently
