"""How steps are compiled."""

import pytest

from anyformer import presets
from anyformer.training.compiler import compile_options

TWO_PASSES = {"triton.mix_order_reduction": False}


@pytest.mark.parametrize(("width", "found"), [(256, None), (512, TWO_PASSES), (768, None)])
def test_short_rows_are_passed_twice(width: int, found: dict[str, bool] | None) -> None:
    config = presets.gpt2(depth=1, width=width, heads=4)
    assert compile_options(config, fp8=False) == found
    assert compile_options(config, fp8=True) == TWO_PASSES
