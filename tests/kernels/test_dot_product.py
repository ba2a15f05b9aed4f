"""Integer weights by dot products: the kernel in C equals its reference, and a build that fails is no error."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

from anyformer.kernels import dot_product
from anyformer.nn.transforms.dot_product_format import DotProductFormat
from anyformer.nn.transforms.rounding import Bits, Rounded, round_off

HOW: list[tuple[Bits, int | None]] = [(8, None)]
if dot_product.is_available(4):
    HOW += [(4, 32), (4, 96), (4, 128)]
built = pytest.mark.skipif(not dot_product.is_available(), reason="needs a CPU with dot products and a C compiler")


def reference(x: torch.Tensor, rounded: Rounded, bias: torch.Tensor | None) -> torch.Tensor:
    more = rounded.q[0].numel() - rounded.width
    return dot_product.reference(F.pad(x, (0, more)), rounded.q, rounded.scale, bias)


@built
@given(
    m=st.integers(0, 21),
    n=st.integers(1, 150),
    k=st.integers(1, 200),
    how=st.sampled_from(HOW),
    bias=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_the_kernel_is_the_reference(
    m: int, n: int, k: int, how: tuple[Bits, int | None], bias: bool, threads: int, seed: int
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    w, b, x = (torch.randn(*shape, generator=numbers) for shape in ((n, k), (n,), (m, k)))
    rounded, offset = round_off(w, *how), b if bias else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = DotProductFormat(rounded, offset).matmul(x, None, None)
    finally:
        torch.set_num_threads(before)
    exact = reference(x, rounded, offset)
    step = x.abs().amax(dim=-1, keepdim=True) / 127  # a value halfway between two integers may go to either
    assert ((found - exact).abs() <= step * w.abs().amax(dim=-1) + 1e-5).all()
    # tokens are rounded, by half a step at most, and nothing else
    assert ((found - (x @ rounded.dense().T + (b if bias else 0))).abs() <= step * w.abs().sum(-1) + 1e-4).all()


@built
@given(m=st.integers(1, 21), n=st.integers(1, 400), k=st.integers(1, 70), bias=st.booleans(), seed=st.integers(0, 99))
def test_sums_of_integers_are_exact(m: int, n: int, k: int, bias: bool, seed: int) -> None:
    """Rows of integers with a maximum of 127 are not changed by rounding."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (m, k), generator=numbers).float()
    x[:, 0] = 127
    q = torch.randint(-127, 128, (n, 1, k), generator=numbers, dtype=torch.int8)
    scale, offset = torch.rand(n, 1, generator=numbers), torch.randn(n, generator=numbers) if bias else None
    found = DotProductFormat(Rounded(q, scale, k, 8), offset).matmul(x, None, None)
    assert found.equal(dot_product.reference(x, q, scale, offset))


@built
def test_extreme_integers_are_exact() -> None:
    """The largest sums of a row of 65,536 values, of either sign."""
    k = 1 << 16
    q = torch.tensor([127, -127], dtype=torch.int8)[:, None, None].expand(2, 1, k)
    x = torch.tensor([[127.0], [-127.0]]).expand(2, k)
    found = DotProductFormat(Rounded(q, torch.ones(2, 1), k, 8), None).matmul(x, None, None)
    assert found.equal(k * 127.0**2 * torch.tensor([[1.0, -1], [-1, 1]]))


@pytest.mark.skipif(not dot_product.is_available(4), reason="there is no such kernel here")
@given(m=st.integers(1, 21), n=st.integers(1, 400), groups=st.integers(1, 5), seed=st.integers(0, 99))
def test_sums_of_groups_are_exact(m: int, n: int, groups: int, seed: int) -> None:
    """Weights of 4 bits, with powers of 2 as scales, and rows of integers with a maximum of 127."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (m, groups * 32), generator=numbers).float()
    x[:, 0] = 127
    q = torch.randint(-8, 8, (n, groups, 32), generator=numbers, dtype=torch.int8)
    scale = torch.exp2(torch.randint(-3, 4, (n, groups), generator=numbers)).bfloat16()
    found = DotProductFormat(Rounded(q, scale, groups * 32, 4), None).matmul(x, None, None)
    assert found.equal(dot_product.reference(x, q, scale, None))


@built
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_finite_results(value: float, how: tuple[Bits, int | None]) -> None:
    x = torch.randn(10, 40)
    x[[2, 9], 7] = value
    y = DotProductFormat(round_off(torch.randn(30, 40), *how), torch.randn(30)).matmul(x, None, None)
    finite = y.isfinite()
    assert not finite[[2, 9]].any()
    assert finite[[0, 1, 3, 4, 5, 6, 7, 8]].all()


@built
@pytest.mark.parametrize("how", HOW)
def test_rows_of_zeros_return_the_bias(how: tuple[Bits, int | None]) -> None:
    bias = torch.randn(24)
    y = DotProductFormat(round_off(torch.randn(24, 32), *how), bias).matmul(torch.zeros(2, 5, 32), None, None)
    assert y.equal(bias.expand(2, 5, 24))


@built
def test_the_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = dot_product._library.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "cc -w")
    assert build() is not None
    (library,) = (tmp_path / "anyformer" / "kernels").iterdir()
    time = library.stat().st_mtime_ns
    assert build() is not None
    assert library.stat().st_mtime_ns == time


def test_another_cpu_does_not_use_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of instructions has a library, and a CPU without dot products has none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if dot_product.is_available():
        build, features = dot_product._library.__wrapped__, dot_product._features()
        assert build() is not None
        monkeypatch.setattr(dot_product, "_features", lambda: features | {"another"})
        assert build() is not None
        assert len(list((tmp_path / "anyformer" / "kernels").iterdir())) == 2
    monkeypatch.setattr(dot_product, "_features", lambda: frozenset({"fpu", "avx2"}))
    assert not dot_product.is_available.__wrapped__()


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false", ""])
def test_without_a_compiler_there_is_no_kernel(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    assert dot_product._library.__wrapped__() is None
