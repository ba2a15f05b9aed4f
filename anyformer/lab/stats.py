"""Statistics for verdicts: Welch's t-test and interval, Holm's correction, effect size, power-law fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyformer.config import ConfigError, Fault

MAX_DECIMALS = 6  # smaller values are written with a power of 10


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (NaN for one value) and number of values."""

    mean: float
    deviation: float
    count: int

    def __str__(self) -> str:
        """Return the mean with as many decimals as two significant digits of the deviation have."""
        if self.count < 2 or not math.isfinite(self.deviation):
            return f"{self.mean:.4g}"
        if self.deviation == 0:
            return f"{self.mean:.4g} ± 0"
        decimals = max(0, 1 - math.floor(math.log10(self.deviation)))
        if decimals > MAX_DECIMALS:
            return f"{self.mean:.4g} ± {self.deviation:.2g}"
        return f"{self.mean:.{decimals}f} ± {self.deviation:.{decimals}f}"


def summary(values: Sequence[float]) -> Summary:
    """Return mean, standard deviation and number of values."""
    x = np.asarray(values, dtype=np.float64)
    deviation = float(x.std(ddof=1)) if len(x) > 1 else math.nan
    return Summary(float(x.mean()) if len(x) else math.nan, deviation, len(x))


def is_constant(values: Sequence[float]) -> bool:
    """Test whether there are several values, and all are equal. Their computed deviation may be a rounding error."""
    return len(values) > 1 and len(set(values)) == 1


def written_test(a: Sequence[float], b: Sequence[float]) -> str:
    """Return the p value of Welch's test for a sentence; "no variation" if neither side varies."""
    if is_constant(a) and is_constant(b):
        return "no variation"
    p = welch(a, b)
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def tabled_test(a: Sequence[float], b: Sequence[float]) -> str:
    """Return `written_test` for a column of p values; empty if a side has fewer than two values."""
    if min(len(a), len(b)) < 2:
        return ""
    return written_test(a, b).removeprefix("p ").removeprefix("= ")


def welch(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p value of Welch's t-test (Welch 1947); NaN if a side has fewer than two values."""
    x, y = summary(a), summary(b)
    if x.count < 2 or y.count < 2:
        return math.nan
    error, freedom = _welch(x, y)
    if error == 0:
        return 1.0 if x.mean == y.mean else 0.0
    return float(2 * student_t().stdtr(freedom, -abs(x.mean - y.mean) / error))


@dataclass(frozen=True)
class MeanDifference:
    """A difference of two means with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


def difference(a: Sequence[float], b: Sequence[float]) -> MeanDifference:
    """Return mean(a) - mean(b) with Welch's 95 % interval; NaN ends if a side has fewer than two values."""
    x, y = summary(a), summary(b)
    if x.count < 2 or y.count < 2:
        return MeanDifference(x.mean - y.mean, math.nan, math.nan)
    error, freedom = _welch(x, y)
    half = student_t().stdtrit(freedom, 0.975) * error
    return MeanDifference(x.mean - y.mean, float(x.mean - y.mean - half), float(x.mean - y.mean + half))


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number by the method of Holm (1979); NaN stays NaN and is not counted."""
    order = sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=lambda i: ps[i])
    adjusted, highest = list(ps), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted


def hedges(a: Sequence[float], b: Sequence[float] | float) -> float:
    """Return Hedges' g: mean(a) - mean(b) in standard deviations, corrected for few values (Hedges 1981).

    The deviation is pooled over both sides; if `b` is a known number, it is that of `a`. NaN if nothing varies, or for
    fewer than two values on a side, three beside a known number.
    """
    x = summary(a)
    if isinstance(b, float | int):
        y, fixed = Summary(b, 0.0, 1), is_constant(a)
    else:
        y, fixed = summary(b), is_constant(a) and is_constant(b)
    freedom = x.count + y.count - 2
    if fixed or freedom < 2:
        return math.nan
    pooled = math.sqrt(((x.count - 1) * x.deviation**2 + (y.count - 1) * y.deviation**2) / freedom)
    return (1 - 3 / (4 * freedom - 1)) * (x.mean - y.mean) / pooled


def _welch(x: Summary, y: Summary) -> tuple[float, float]:
    """Return the standard error of a difference of means, and its degrees of freedom."""
    u, v = x.deviation**2 / x.count, y.deviation**2 / y.count
    if u + v == 0:
        return 0.0, 1.0
    return math.sqrt(u + v), (u + v) ** 2 / (u**2 / (x.count - 1) + v**2 / (y.count - 1))


def student_t() -> Any:
    """Return SciPy's functions with the distribution of Student's t. `scipy.stats` has them too: 2 s to import."""
    try:
        from scipy import special
    except ImportError:
        raise ConfigError([Fault("lab", "its tests need the package SciPy: pip install 'anyformer[lab]'")]) from None
    return special


@dataclass(frozen=True)
class Power:
    """y = factor · x^exponent, by least squares on logarithms; `error` is the exponent's standard error."""

    exponent: float
    factor: float
    error: float

    def __str__(self) -> str:
        return f"{self.exponent:.2f} ± {self.error:.2f}"

    def __call__(self, x: float) -> float:
        return self.factor * float(x) ** self.exponent


def power(x: Sequence[float], y: Sequence[float]) -> Power:
    """Fit a power law; needs at least two different x."""
    u, v = np.log(np.asarray(x, dtype=np.float64)), np.log(np.asarray(y, dtype=np.float64))
    centred = u - u.mean()
    slope = float((centred * v).sum() / (centred**2).sum())
    rest = v - v.mean() - slope * centred
    error = math.sqrt(float((rest**2).sum()) / max(1, len(u) - 2) / float((centred**2).sum()))
    return Power(slope, math.exp(float(v.mean() - slope * u.mean())), error)
