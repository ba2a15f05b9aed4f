"""The peak of a training step on a GPU is what `training_memory` foretells."""

from collections.abc import Callable

import pytest

from benchmarks.memory import Case, compare


@pytest.mark.parametrize("case", [Case("gpt2"), Case("base", "fp32"), Case("llama", recompute=True)], ids=str)
def test_the_peak_is_as_foretold(case: Case, measured: Callable[..., None]):
    told, peak = compare(case)
    measured(told=told / 2**30, peak=peak / 2**30)
    assert peak == pytest.approx(told, rel=0.1)
