"""The numbers of a regression: ASCII decimals within bounds, and nothing else that Python would read."""

import pytest

from anyformer.config import ConfigError
from anyformer.recipe import Regress
from anyformer.tasks.regress import parse_number


@pytest.mark.parametrize("label", ["12", "-3.5", "+.5", "4.", " 2 ", "1e-3", "1E5", "0", "-0.0", "1e18", "007"])
def test_a_decimal_is_a_number(label: str) -> None:
    assert parse_number(label) == float(label)


@pytest.mark.parametrize("label", ["１２", "1_000", "٣", "0x10", "nan", "-Infinity", "", " ", "1,5", "1 2", "e5", "½"])
def test_other_spellings_are_refused(label: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        parse_number(label)


@pytest.mark.parametrize("label", ["-1e38", "1e400", "1.1e18", "9" * 30])
def test_numbers_whose_squares_are_no_fp32_are_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"is beyond ±1e\+18"):
        parse_number(label)


@pytest.mark.parametrize("field", [{"mean": 1e38}, {"mean": -1e19}, {"deviation": 1e38}, {"deviation": 1e-30}])
def test_the_scale_of_a_task_has_the_same_bounds(field: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must be at (most|least)"):
        Regress(**field)  # type: ignore[arg-type]
