"""Loss curves of seeds that were recorded at different steps are averaged at the same steps."""

import numpy as np
import pytest

from anyformer.lab.figures import curves, panels


def test_a_curve_that_ends_early_counts_up_to_its_end() -> None:
    whole, diverged = [[step, 2.0] for step in range(5, 51, 5)], [[step, 4.0] for step in range(3, 31, 3)]
    _, (axis,) = panels(1)
    curves(axis, {"both": [diverged, whole, []], "diverged at once": [[]]})
    (line,) = axis.get_lines()
    assert list(line.get_xdata()) == [step for step, _ in whole]
    assert list(line.get_ydata()) == [3.0] * 6 + [2.0] * 4


def test_curves_at_the_same_steps_are_averaged_exactly() -> None:
    losses = np.random.default_rng(0).random((3, 20))
    _, (axis,) = panels(1)
    curves(axis, {"all": [[[step, loss] for step, loss in enumerate(some.tolist())] for some in losses]})
    (line,) = axis.get_lines()
    assert line.get_ydata() == pytest.approx(losses.mean(axis=0), rel=1e-12)
