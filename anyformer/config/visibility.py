"""Base of patterns, with the methods that kernels, caches and counts call. Imports no torch.

`sees(q, k)` is the definition of a pattern: positions in, never indices and never a length, so that padding, packing
and caching change nothing. What else is here serves kernels that skip whole blocks of keys: `meets` and `covers` speak
of spans of positions, and a pattern that does not override them is right, only not sparse. They are made of operators
alone, so that `count` can evaluate them with numpy.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from anyformer.config.part import Part
from anyformer.config.spec import ConfigError, Fault, Flag

if TYPE_CHECKING:
    from torch import Tensor

About = Callable[[Any], "Tensor"]
LARGE, SMALL = 128, 64  # blocks of tokens that kernels skip, as large as they are fast, and the smallest that are
EVERYTHING, PAST = (-1, -1), (-1, 0)  # windows of the patterns full and causal
MAX_BLOCKS = 16_384  # along one side of a sparse pattern: counting them takes about a second


class Span(NamedTuple):
    """Lowest and highest position of some tokens: tensors or NumPy arrays."""

    low: Any
    high: Any


class Pattern(Part):
    """Base of patterns: hooks with defaults that are safe for any pattern."""

    @property
    def looks_ahead(self) -> bool:
        """True if any query sees a later key."""
        return True

    @property
    def sees_self(self) -> bool:
        """True if every token sees itself, so that no query of self-attention is fully masked."""
        return True

    @property
    def sparse(self) -> bool:
        """True if the number of keys that a query sees is bounded, whatever the length."""
        return False

    @property
    def limit(self) -> int | None:
        """Maximum number of positions, or None if there is no limit."""
        return None

    @property
    def global_positions(self) -> int:
        """Number of first positions that see all others."""
        return 0

    @property
    def reach(self) -> int | None:
        """Largest distance back that any query sees, if bounded and none looks ahead: the size of a ring cache."""
        return None

    @property
    def as_window(self) -> tuple[int, int] | None:
        """The tokens back and ahead (-1: all) that a query sees, if that says all: kernels may take them for a mask."""
        return None

    @property
    def tile(self) -> int:
        """Block size, in tokens, for kernels that skip blocks; it follows the blocks of the pattern."""
        return LARGE

    def towards(self, ahead: bool) -> Self:
        """Return the pattern with its direction set, if it was left open."""
        return self

    def about(self, positions: "Tensor") -> "Tensor | None":
        """Return per-token features [..., n], computed once rather than for each query–key pair."""
        return None

    @abstractmethod
    def sees(self, q: "Tensor", k: "Tensor", of_q: About | None = None, of_k: About | None = None) -> "Tensor":
        """The definition: whether a query at position q may read a key at position k (broadcast).

        `of_q(i)` and `of_k(i)` return the i-th feature of `about`, if it was computed before.
        """

    def meets(self, q: Span, k: Span) -> "Tensor":
        """Return whether any query of a span may see any key of another. May return True wrongly, never False."""
        return (q.low == q.low) & (k.low == k.low)

    def covers(self, q: Span, k: Span) -> "Tensor":
        """Return whether all queries of a span see all keys of another. May return False wrongly, never True."""
        return (q.low != q.low) & (k.low != k.low)


class Open(Pattern):
    """Base of patterns whose direction may be left open: `ahead = None` sees later keys in an encoder and in
    cross-attention, not in a decoder."""

    ahead: Flag | None = None  # sees later keys; None: in an encoder and in cross-attention, not in a decoder

    @property
    def looks_ahead(self) -> bool:
        return self.ahead is not False

    def towards(self, ahead: bool) -> Self:
        return self.model_copy(update={"ahead": ahead}) if self.ahead is None else self


@cache  # many layers have the same pattern
def pairs(pattern: Pattern, t: int, s: int) -> int:
    """Return the number of (query, key) pairs multiplied; of a sparse pattern, those in blocks with a visible pair."""
    if not pattern.sparse:
        return t * s
    if max(t, s) > MAX_BLOCKS * pattern.tile:
        what = f"= {max(t, s):,}: the blocks of the pattern {pattern.kind} are counted one by one,"
        raise ConfigError([Fault("length", f"{what} for at most {MAX_BLOCKS * pattern.tile:,} tokens")])
    import numpy as np

    rows, columns = _blocks(t, pattern.tile), _blocks(s, pattern.tile)
    wide, total = columns.high - columns.low + 1, 0
    for some in np.array_split(np.arange(len(rows.low)), 1 + len(rows.low) // 64):  # 64 rows at a time bound memory
        low, high = rows.low[some, None], rows.high[some, None]
        met = np.asarray(pattern.meets(Span(low, high), columns))
        total += int(((high - low + 1) * (met @ wide)[:, None]).sum())
    return total


def _blocks(length: int, size: int) -> Span:
    """Return the first and the last position of each block of tokens."""
    import numpy as np

    low = np.arange(0, length, size)
    return Span(low, np.minimum(low + size - 1, length - 1))
