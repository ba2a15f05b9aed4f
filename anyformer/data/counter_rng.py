"""A counter-based random generator: each value is a hash of what it is for. Imports no torch.

All values of a batch are computed at once, and those of one text depend on no other text.
"""

import numpy as np

INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # 2^64 ÷ golden ratio
SEQUENCE_BITS = 24  # bits for the number of a sequence; 40 remain for a random key, so equal keys are very rare


class CounterRNG:
    """Random values for texts with given numbers: SplitMix64 (Steele et al. 2014), a stream per seed, text and use."""

    def __init__(self, numbers: np.ndarray, *seed: int):
        key = 0
        for part in seed:
            key = (key + part + 1) * int(INCREMENT) % 2**64
        self._keys = _mix(np.uint64(key) + numbers.astype(np.uint64))

    def draw(self, use: int, sizes: np.ndarray) -> np.ndarray:
        """Return `sizes` 64-bit values for each text, concatenated; each `use` has different ones."""
        ends = sizes.cumsum()
        start = _mix(self._keys + INCREMENT + np.uint64(use)) - (ends - sizes).astype(np.uint64) * INCREMENT
        return _mix(np.repeat(start, sizes) + np.arange(1, sizes.sum() + 1, dtype=np.uint64) * INCREMENT)


def _mix(x: np.ndarray) -> np.ndarray:
    """Return the SplitMix64 finaliser of x: a bijection in which each bit depends on all bits."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def unit(drawn: np.ndarray) -> np.ndarray:
    """Return uniform values in [0, 1)."""
    values: np.ndarray = (drawn >> np.uint64(11)) * 2.0**-53
    return values


def below(drawn: np.ndarray, ends: np.ndarray | int) -> np.ndarray:
    """Return uniform integers in [0, ends)."""
    return (unit(drawn) * ends).astype(np.int64)


def lowest(drawn: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the indices of the `counts` lowest values of each sequence, in ascending order of values.

    Every subset of that size is equally likely.
    """
    assert len(sizes) <= 1 << SEQUENCE_BITS
    starts = np.concatenate(([0], sizes.cumsum()))
    # sorting is the slowest part: only values below a bound are sorted, which are seldom fewer than `counts`
    share = (counts + 3 * np.sqrt(counts) + 1) / np.maximum(sizes, 1)
    low = drawn < np.repeat((np.minimum(share, 1 - 2.0**-53) * 2.0**64).astype(np.uint64), sizes)
    at = np.flatnonzero(low)
    candidates = np.diff(at.searchsorted(starts))
    if (candidates < counts).any():
        at = np.flatnonzero(low | np.repeat(candidates < counts, sizes))
        candidates = np.diff(at.searchsorted(starts))
    sequence = np.arange(len(sizes), dtype=np.uint64) << np.uint64(64 - SEQUENCE_BITS)
    order = (np.repeat(sequence, candidates) | (drawn[at] >> np.uint64(SEQUENCE_BITS))).argsort()
    others = candidates - counts
    return at[order[np.arange(counts.sum()) + np.repeat(others.cumsum() - others, counts)]]
