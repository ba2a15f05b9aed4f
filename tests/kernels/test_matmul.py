"""Products of one row: who they are for, and by Triton's interpreter (TRITON_INTERPRET=1) that they are products; on a
GPU `tests/gpu/test_matmul.py` says so."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels import matmul as products
from anyformer.kernels.int4 import fits_int4_kernel, int4_linear, interleave
from anyformer.kernels.matmul import RowFusion, TileShape, fits_row_kernel, int8_linear, linear, one_row_linear
from anyformer.nn.transforms.rounding import RoundedFormat, pack_nibbles, round_off
from tests.row_fusion import apart

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


class Elsewhere(Tensor):
    """As if on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def there(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype).as_subclass(Elsewhere)


def test_who_it_is_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "HAS_TRITON", True)
    row, matrix = there(1, 1, 512), there(1024, 512)
    assert not fits_row_kernel(row, matrix)  # it has no backward pass
    with torch.no_grad():
        assert fits_row_kernel(row, matrix)
        assert fits_row_kernel(row[0, 0], matrix)
        assert fits_row_kernel(row, there(1024, 512, dtype=torch.int8))
        assert not fits_row_kernel(torch.zeros(1, 1, 512, dtype=torch.bfloat16), matrix)  # not on a GPU
        assert not fits_row_kernel(there(2, 1, 512), matrix)  # two rows
        assert fits_row_kernel(there(2, 1, 512), matrix, most=2)
        assert not fits_row_kernel(there(0, 1, 512), matrix)
        assert not fits_row_kernel(there(1, 512, dtype=torch.float32), there(1024, 512, dtype=torch.float32))
        assert not fits_row_kernel(there(1, 512, dtype=torch.float16), matrix)
        assert not fits_row_kernel(there(1, 500), there(1024, 500))  # no whole blocks
        assert not fits_row_kernel(row, there(100, 512))  # not worth it
        assert not fits_row_kernel(row, there(512, 1024).T)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert not fits_row_kernel(row, matrix)


def test_who_4_bits_are_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "HAS_TRITON", True)
    row, packed = there(1, 1, 512), torch.zeros(1024, 16, 16, dtype=torch.uint8)
    assert not fits_int4_kernel(row, packed)  # it has no backward pass
    with torch.no_grad():
        assert fits_int4_kernel(row, packed)
        assert not fits_int4_kernel(torch.zeros(1, 512, dtype=torch.bfloat16), packed)  # not on a GPU
        assert not fits_int4_kernel(there(2, 512), packed)  # two rows
        assert not fits_int4_kernel(there(1, 512, dtype=torch.float32), packed)
        assert not fits_int4_kernel(row, torch.zeros(1024, 3, 96, dtype=torch.uint8))  # padded groups
        assert not fits_int4_kernel(row, packed[:256])  # not worth it
        assert not fits_int4_kernel(there(1, 640), torch.zeros(1024, 20, 16, dtype=torch.uint8))  # no whole blocks


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("biased", [False, True])
def test_elsewhere_as_linear(biased: bool):
    x, weight, bias = random(1, 1, 512), random(1024, 512), random(1024) if biased else None
    with torch.no_grad():
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [(2,), (9,), (3, 5), (32, 1), (33, 1)])
def test_few_rows_on_a_cpu(rows: tuple[int, ...], biased: bool):
    x, weight, bias = random(*rows, 96), random(200, 96), random(200) if biased else None
    with torch.no_grad():
        assert products.transposed_is_faster(x) == (9 * 96 <= x.numel() <= 32 * 96)
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    assert not products.transposed_is_faster(x)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k"), [(64, 512), (37, 768), (9, 2048), (3, 6144)])
def test_as_linear(n: int, k: int, biased: bool):
    """Rows and columns that fill blocks or do not, in 32 and in 8 bits."""
    x, weight, bias = random(1, 1, k), random(n, k), random(n) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(one_row_linear(x, weight, None, bias).double(), exact, atol=1e-4, rtol=1e-4)
    rounded = round_off(weight, 8)
    small = one_row_linear(x, rounded.q[:, 0], rounded.scale[:, 0], bias)
    same = F.linear(x, rounded.dense(), bias)
    torch.testing.assert_close(small, same, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), [((1, 8), 48, 512), ((3, 1), 37, 256), ((64,), 16, 768)])
def test_few_rows_of_8_bits(rows: tuple[int, ...], n: int, k: int, biased: bool):
    x, rounded, bias = random(*rows, k), round_off(random(n, k), 8), random(n) if biased else None
    found = int8_linear(x, rounded.q[:, 0], rounded.scale[:, 0], bias)
    torch.testing.assert_close(found, F.linear(x, rounded.dense(), bias), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k", "group"), [(48, 512, 32), (37, 768, 96), (9, 2048, 128), (3, 6144, 32)])
def test_4_bits(n: int, k: int, group: int, biased: bool, dtype: torch.dtype):
    """Rows and columns that fill blocks or do not, and groups of several sizes; rounded once, at the end."""
    x, bias = random(1, 1, k).to(dtype), random(n).to(dtype) if biased else None
    rounded = round_off(random(n, k), 4, group)
    found = int4_linear(x, interleave(pack_nibbles(rounded.q)), rounded.scale, bias)
    exact = F.linear(x.double(), rounded.dense().double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def fusion_of(seed: int, n: int, k: int, dtype: torch.dtype) -> RowFusion:
    """All, some or none of the steps."""
    norm, gated, residual = seed % 2 == 0, seed // 2 % 2 == 0, seed // 4 % 2 == 0
    given = random(1, 1, n).to(dtype) if residual else None
    return RowFusion(random(k).to(dtype) if norm else None, 0.1 if norm else 0.0, gated, given)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("n", "k"), [(64, 512), (37, 768), (9, 2048)])
@pytest.mark.parametrize(
    "shape", [TileShape(4, 512, 2, flat=True, ahead=4), TileShape(2, 1024, 2), TileShape(8, 256, 1, ahead=2)]
)
def test_steps_around_a_row(seed: int, n: int, k: int, shape: TileShape, monkeypatch: pytest.MonkeyPatch):
    """Norm, gate and residual sum in the kernels; rounded once, at the end."""
    monkeypatch.setattr(products, "shape_of", lambda weight: shape)
    dtype = torch.bfloat16 if seed % 3 else torch.float16
    fusion = fusion_of(seed, n, k, dtype)
    rows = 2 * n if fusion.gated else n
    x, weight, bias = random(1, 1, k).to(dtype), (random(rows, k) / 8).to(dtype), random(rows).to(dtype)
    eighth, fourth = round_off(weight, 8), round_off(weight, 4, 32)
    packed = interleave(pack_nibbles(fourth.q))
    found = {
        "half": (one_row_linear(x, weight, None, bias, *fusion), weight),
        "int8": (one_row_linear(x, eighth.q[:, 0], eighth.scale[:, 0], bias, *fusion), eighth.dense()),
        "int4": (int4_linear(x, packed, fourth.scale, bias, *fusion), fourth.dense()),
    }
    for name, (y, dense) in found.items():
        exact = apart(x.double(), dense, bias, fusion)
        assert y.shape == exact.shape
        assert (y.double() - exact).abs().max() < torch.finfo(dtype).eps * exact.abs().max(), name


@pytest.mark.parametrize("group", [32, 96])
def test_the_order_of_4_bits_is_undone(group: int):
    packed = pack_nibbles(round_off(random(5, 192), 4, group).q)
    assert interleave(interleave(packed)).equal(packed)
    assert not interleave(packed).equal(packed)
    rounded = round_off(random(5, 192), 4, group)
    assert RoundedFormat(rounded, torch.float32).dense().equal(rounded.dense())
