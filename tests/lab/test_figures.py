"""Loss curves are averaged over seeds at the same steps, and lie inside their panels."""

from pathlib import Path

import numpy as np
import pytest

from anyformer.lab.experiment import find
from anyformer.lab.figures import curves, panels
from docs_site.lab_report import stored

LAB = Path(__file__).parents[2] / "docs" / "lab"


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


def test_panels_that_share_an_axis_show_all_curves() -> None:
    """At 18 layers a model without norms is above all that the panel of 2 layers has."""
    norms = find("norms")
    for axis in norms.draw(stored(norms, LAB)["gpu"]).axes:
        assert axis.get_ylim()[1] > max(max(line.get_ydata()) for line in axis.get_lines())
