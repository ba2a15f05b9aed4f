"""The coordinate check: with muP the exponents are near 0 or below, without it they are large."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config import ConfigError
from anyformer.lab.coordinates import Coordinate, check_coordinates, table

SMALL = [
    "model.width=16,64,256",
    "data.train={kind='text', path='tinyshakespeare/input.txt', stop=0.01}",
    "data.valid=none",
    "model.decoder.depth=1",
    "model.tie=none",
    "model.init={kind='normal', std=0.1}",
    "batches.rows=2",
    "batches.length=16",
    "train.optimizer.lr=1e-2",
]


@pytest.fixture(scope="module")
def found() -> list[Coordinate]:
    return check_coordinates("shakespeare", SMALL, steps=3)


def test_exponents_are_near_zero_with_mup(found: list[Coordinate]) -> None:
    head, *rows = table(found)
    exponents = {(row[0], row[1]): float(row[-1]) for row in rows}
    names = {name for _, name in exponents}
    assert {"decoder.0.mixer.out", "decoder.0.feedforward.out", "decoder.0.out", "logits"} == names
    assert len(head) == 6
    assert all(exponents["mup", name] < 0.25 for name in names)
    assert all(exponents["standard", name] > 0.5 for name in names)


def test_both_scales_are_equal_at_the_base_width(found: list[Coordinate]) -> None:
    base = [[one.size for one in found if (one.scale, one.width) == (scale, 16)] for scale in ("standard", "mup")]
    assert base[0] == base[1]
    assert len(base[0]) == 4 * 4  # before the first step and after each of three


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    words = [word.replace("16,64,256", "16,32") for word in SMALL]
    done = CliRunner().invoke(
        app, ["lab", "coordinates", "shakespeare", *words, "--steps", "1", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    assert "exponent" in done.output
    assert (tmp_path / "coordinates.png").stat().st_size > 10_000


def test_widths_must_be_named() -> None:
    with pytest.raises(ConfigError, match="at least two widths"):
        check_coordinates("shakespeare", ["model.width=64"])
