"""Int8 weights by dot products: the kernel in C equals its reference, and a build that fails is no error."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.kernels import int8_dot
from anyformer.transforms.int8_dot_format import Int8DotFormat
from anyformer.transforms.rounding import round_off

built = pytest.mark.skipif(not int8_dot.is_available(), reason="needs an Arm CPU with dot products and a C compiler")


@built
@given(
    m=st.integers(0, 21),
    n=st.integers(1, 150),
    k=st.integers(1, 70),
    bias=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_the_kernel_is_the_reference(m: int, n: int, k: int, bias: bool, threads: int, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    w, b, x = (torch.randn(*shape, generator=numbers) for shape in ((n, k), (n,), (m, k)))
    rounded, offset = round_off(w, 8), b if bias else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = Int8DotFormat(rounded, offset).matmul(x, None, None)
    finally:
        torch.set_num_threads(before)
    exact = int8_dot.reference(x, rounded.q.flatten(1), rounded.scale[:, 0], offset)
    step = x.abs().amax(dim=-1, keepdim=True) / 127  # a value halfway between two integers may go to either
    assert ((found - exact).abs() <= step * w.abs().amax(dim=-1) + 1e-5).all()
    # tokens are rounded, by half a step at most, and nothing else
    assert ((found - (x @ rounded.dense().T + (b if bias else 0))).abs() <= step * w.abs().sum(-1) + 1e-4).all()


@built
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_finite_results(value: float) -> None:
    x = torch.randn(10, 40)
    x[[2, 9], 7] = value
    y = Int8DotFormat(round_off(torch.randn(30, 40), 8), torch.randn(30)).matmul(x, None, None)
    finite = y.isfinite()
    assert not finite[[2, 9]].any()
    assert finite[[0, 1, 3, 4, 5, 6, 7, 8]].all()


@built
def test_rows_of_zeros_return_the_bias() -> None:
    bias = torch.randn(24)
    y = Int8DotFormat(round_off(torch.randn(24, 32), 8), bias).matmul(torch.zeros(2, 5, 32), None, None)
    assert y.equal(bias.expand(2, 5, 24))


@built
def test_the_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = int8_dot._library.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "cc -w")
    assert build() is not None
    (library,) = (tmp_path / "anyformer" / "kernels").iterdir()
    time = library.stat().st_mtime_ns
    assert build() is not None
    assert library.stat().st_mtime_ns == time


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false", ""])
def test_without_a_compiler_there_is_no_kernel(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    assert int8_dot._library.__wrapped__() is None
