"""Random numbers by counting: each is a hash of what it is for, so all that a batch needs are found at once, and what
one text is given depends on no other. Imports no torch.
"""

import numpy as np

STEP = np.uint64(0x9E3779B97F4A7C15)  # 2^64 by the golden ratio
TEXTS = 24  # bits for the number of a sequence, beside 40 of a random number: as good as never twice the same


class CounterRNG:
    """Random numbers for some texts, known by theirs: SplitMix64 (Steele et al. 2014), which begins at a place of its
    own for every seed, text and use."""

    def __init__(self, numbers: np.ndarray, *seed: int):
        key = 0
        for part in seed:
            key = (key + part + 1) * int(STEP) % 2**64
        self._keys = _mixed(np.uint64(key) + numbers.astype(np.uint64))

    def draw(self, use: int, sizes: np.ndarray) -> np.ndarray:
        """So many numbers of 64 bits for each text, end to end; others for another use."""
        ends = sizes.cumsum()
        begun = _mixed(self._keys + STEP + np.uint64(use)) - (ends - sizes).astype(np.uint64) * STEP
        return _mixed(np.repeat(begun, sizes) + np.arange(1, sizes.sum() + 1, dtype=np.uint64) * STEP)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Each bit depends on all, and no two become one."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def unit(drawn: np.ndarray) -> np.ndarray:
    """Random numbers as those from 0 to 1, which is not among them."""
    shares: np.ndarray = (drawn >> np.uint64(11)) * 2.0**-53
    return shares


def below(drawn: np.ndarray, ends: np.ndarray | int) -> np.ndarray:
    """Random numbers as whole ones, from 0 to before an end."""
    return (unit(drawn) * ends).astype(np.int64)


def lowest(drawn: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Where the lowest of each sequence stand, so many of each, from the lowest on: every choice of places is as likely
    as another."""
    assert len(sizes) <= 1 << TEXTS
    starts = np.concatenate(([0], sizes.cumsum()))
    # sorting takes longest: it is for those that may be among them, in a share where there are seldom too few
    share = (counts + 3 * np.sqrt(counts) + 1) / np.maximum(sizes, 1)
    low = drawn < np.repeat((np.minimum(share, 1 - 2.0**-53) * 2.0**64).astype(np.uint64), sizes)
    at = np.flatnonzero(low)
    many = np.diff(at.searchsorted(starts))
    if (many < counts).any():
        at = np.flatnonzero(low | np.repeat(many < counts, sizes))
        many = np.diff(at.searchsorted(starts))
    whose = np.arange(len(sizes), dtype=np.uint64) << np.uint64(64 - TEXTS)
    order = (np.repeat(whose, many) | (drawn[at] >> np.uint64(TEXTS))).argsort()
    others = many - counts
    return at[order[np.arange(counts.sum()) + np.repeat(others.cumsum() - others, counts)]]
