"""Compiled code of a GPU in the user's cache folder."""

from pathlib import Path

from tests.training.test_compiled_start import files, train


def test_kernels_are_stored(tmp_path: Path) -> None:
    """The second process compiles no kernel, and a damaged one is compiled again."""
    home = tmp_path / "cache"
    train(home, tmp_path / "cold")
    kernels = {name: time for name, time in files(home).items() if name.endswith(".cubin")}
    assert kernels
    train(home, tmp_path / "warm")
    assert {name: time for name, time in files(home).items() if name.endswith(".cubin")} == kernels
    damaged = Path(next(iter(kernels)))
    damaged.write_bytes(damaged.read_bytes()[:-8])
    _, printed = train(home, tmp_path / "damaged")
    assert "compiled again" in printed
