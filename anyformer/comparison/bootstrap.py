"""Paired bootstrap: is the difference of two metrics larger than the choice of test rows explains?

Both runs are measured on the same resampled rows, many times (Koehn 2004; Berg-Kirkpatrick et al. 2012).
"""

from dataclasses import dataclass

import numpy as np

from anyformer.comparison.measures import Floats, Measure

SAMPLES = 2000


@dataclass(frozen=True)
class Difference:
    """The difference of a metric, second minus first, with its 95 % interval and two-sided p value."""

    value: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        return self.p < 0.05


def resample(rows: int, samples: int = SAMPLES, seed: int = 0) -> Floats:
    """Return how often each row occurs in each sample [samples, rows]."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(rows, np.full(rows, 1 / rows), size=samples).astype(np.float64)


def paired(first: Measure, second: Measure, weights: Floats) -> Difference:
    """Return the difference of two runs on the same rows."""
    a, b = (one.value(weights @ one.statistics) for one in (first, second))
    gap = b - a
    low, high = np.quantile(gap, (0.025, 0.975))
    share = min(float((gap <= 0).mean()), float((gap >= 0).mean()))
    p = min(1.0, 2 * (share * len(gap) + 1) / (len(gap) + 1))
    return Difference(second.total - first.total, float(low), float(high), p)
