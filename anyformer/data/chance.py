"""Random numbers by counting: each is a hash of what it is for, so all that a batch needs are found at once, and what
one text is given depends on no other. Imports no torch.
"""

import numpy as np

STEP = np.uint64(0x9E3779B97F4A7C15)  # 2^64 by the golden ratio
TEXTS = 24  # bits for the number of a sequence, beside 40 of a random number


class Chance:
    """Random numbers for some texts, known by theirs: SplitMix64 (Steele et al. 2014), which begins at a place of its
    own for every seed, text and use."""

    def __init__(self, numbers: np.ndarray, *seed: int):
        key = np.zeros(1, dtype=np.uint64)
        for part in seed:
            key = _mixed(key + STEP + np.uint64(part))
        self._keys = _mixed(key + STEP + numbers.astype(np.uint64))

    def draw(self, use: int, sizes: np.ndarray) -> np.ndarray:
        """So many numbers of 64 bits for each text, end to end; others for another use."""
        ends = sizes.cumsum()
        begun = _mixed(self._keys + STEP + np.uint64(use)) - (ends - sizes).astype(np.uint64) * STEP
        return _mixed(np.repeat(begun, sizes) + np.arange(1, ends[-1] + 1, dtype=np.uint64) * STEP)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Each bit depends on all, and no two become one."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def unit(drawn: np.ndarray) -> np.ndarray:
    """Random numbers as those from 0 to 1, which is not among them."""
    shares: np.ndarray = (drawn >> np.uint64(11)) * 2.0**-53
    return shares


def below(drawn: np.ndarray, ends: np.ndarray | int) -> np.ndarray:
    """Random numbers as whole ones, from 0 to before an end."""
    return (unit(drawn) * ends).astype(np.int64)


def lowest(drawn: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Where the lowest of each sequence stand, so many of each: every choice of places is as likely as another."""
    assert len(sizes) <= 1 << TEXTS
    whose = np.arange(len(sizes), dtype=np.uint64) << np.uint64(64 - TEXTS)
    order = (np.repeat(whose, sizes) | (drawn >> np.uint64(TEXTS))).argsort()
    among = np.arange(len(drawn)) < np.repeat(sizes.cumsum() - sizes + counts, sizes)
    found = np.zeros(len(drawn), dtype=np.bool_)
    found[order[among]] = True
    return found
