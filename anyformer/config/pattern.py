"""Patterns: which keys a query may see, by their positions. Imports no torch.

Each pattern is one class; `visibility.py` says what its methods mean.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from anyformer.config.spec import ConfigError, Count, Fault, Flag
from anyformer.config.visibility import (
    EVERYTHING,
    LARGE as LARGE,
    PAST,
    SMALL as SMALL,
    About,
    Open as Open,
    Pattern as Pattern,
    Span as Span,
    pairs as pairs,
)

if TYPE_CHECKING:
    from torch import Tensor

FARTHEST = 2**31 - 1  # positions: sums and differences of two fit in 64 bits

Distance = Annotated[int, Field(strict=True, ge=0, le=FARTHEST)]
Stride = Annotated[int, Field(strict=True, ge=1, le=FARTHEST)]


class Full(Pattern):
    """Every key."""

    kind: Literal["full"] = "full"
    as_window: ClassVar = EVERYTHING

    def sees(self, q: "Tensor", k: "Tensor", of_q: About | None = None, of_k: About | None = None) -> "Tensor":
        return (q == q) & (k == k)

    def covers(self, q: Span, k: Span) -> "Tensor":
        return self.meets(q, k)


class Causal(Pattern):
    """The past and oneself."""

    kind: Literal["causal"] = "causal"
    as_window: ClassVar = PAST
    looks_ahead: ClassVar = False

    def sees(self, q: "Tensor", k: "Tensor", of_q: About | None = None, of_k: About | None = None) -> "Tensor":
        return k <= q

    def meets(self, q: Span, k: Span) -> "Tensor":
        return k.low <= q.high

    def covers(self, q: Span, k: Span) -> "Tensor":
        return k.high <= q.low


def plain_pattern(ahead: bool) -> Pattern:
    """Return the pattern that sees every key, or without `ahead` the past and oneself."""
    return Full() if ahead else Causal()


class Window(Pattern):
    """At most `before` keys back and `after` keys ahead: causal when `after` is 0.

    The first `globals` positions of a segment are seen by all and see all (Longformer); with `after` = 0 they, too,
    only look back.
    """

    kind: Literal["window"] = "window"
    before: Distance  # largest distance back, in tokens
    after: Distance  # largest distance ahead, in tokens; 0: causal
    globals: Distance = 0  # first positions that are visible to all and see all
    sparse: ClassVar = True

    @property
    def global_positions(self) -> int:
        return self.globals

    @property
    def looks_ahead(self) -> bool:
        return self.after > 0

    @property
    def reach(self) -> int | None:
        return None if self.after or self.globals else self.before

    @property
    def as_window(self) -> tuple[int, int] | None:
        return None if self.globals else (self.before, self.after)

    def sees(self, q: "Tensor", k: "Tensor", of_q: About | None = None, of_k: About | None = None) -> "Tensor":
        seen = (q - k <= self.before) & (k - q <= self.after)
        if self.globals:
            seen = seen | ((q < self.globals) | (k < self.globals)) & ((k <= q) | self.looks_ahead)
        return seen

    def meets(self, q: Span, k: Span) -> "Tensor":
        met = (q.low - k.high <= self.before) & (k.low - q.high <= self.after)
        return met | ((q.low < self.globals) | (k.low < self.globals)) & ((k.low <= q.high) | self.looks_ahead)

    def covers(self, q: Span, k: Span) -> "Tensor":
        covered = (q.high - k.low <= self.before) & (k.high - q.low <= self.after)
        seen = (q.high < self.globals) | (k.high < self.globals)
        return covered | seen & ((k.high <= q.low) | self.looks_ahead)


class Dilated(Pattern):
    """A window with gaps: `before` keys back and `after` keys ahead, `step` apart; causal when `after` is 0."""

    kind: Literal["dilated"] = "dilated"
    before: Distance  # keys back, each `step` apart
    after: Distance  # keys ahead, each `step` apart; 0: causal
    step: Stride  # distance between two visible keys, in tokens
    sparse: ClassVar = True

    @property
    def looks_ahead(self) -> bool:
        return self.after > 0

    @property
    def reach(self) -> int | None:
        return None if self.after else self.before * self.step

    def sees(self, q: "Tensor", k: "Tensor", of_q: About | None = None, of_k: About | None = None) -> "Tensor":
        back = q - k
        near = (back <= self.before * self.step) & (-back <= self.after * self.step)
        return near & (back % self.step == 0)

    def meets(self, q: Span, k: Span) -> "Tensor":
        return (q.low - k.high <= self.before * self.step) & (k.low - q.high <= self.after * self.step)


class BlockLocal(Open):
    """Positions in blocks of `size`; a block sees itself."""

    kind: Literal["block_local"] = "block_local"
    size: Stride  # tokens of a block
    sparse: ClassVar = True

    @property
    def tile(self) -> int:
        return _fitting(self.size)

    @property
    def reach(self) -> int | None:
        return None if self.looks_ahead else self.size - 1

    def sees(self, q: "Tensor", k: "Tensor", of_q: About | None = None, of_k: About | None = None) -> "Tensor":
        return (q // self.size == k // self.size) & ((k <= q) | self.looks_ahead)

    def meets(self, q: Span, k: Span) -> "Tensor":
        one = (q.low // self.size <= k.high // self.size) & (k.low // self.size <= q.high // self.size)
        return one & ((k.low <= q.high) | self.looks_ahead)

    def covers(self, q: Span, k: Span) -> "Tensor":
        block = q.low // self.size
        one = (q.high // self.size == block) & (k.low // self.size == block) & (k.high // self.size == block)
        return one & ((k.high <= q.low) | self.looks_ahead)


class BigBird(Open):
    """Positions in blocks; a block sees its neighbours, global blocks and random blocks (Zaheer et al. 2020).

    `before` and `after` count neighbouring blocks; the first `globals` blocks are seen by all and see all. Block i is
    linked to `randoms` blocks before it, drawn by a hash of `seed`, i and their number: the links belong to the config,
    not to a run or a length. Links are seen from both ends. Without looking ahead, all of this ends at oneself.
    """

    kind: Literal["bigbird"] = "bigbird"
    block: Stride = 64  # tokens of a block
    before: Distance = 1  # neighbouring blocks before a block that it sees
    after: Distance = 1  # neighbouring blocks after a block that it sees
    globals: Distance = 1  # first blocks, which are visible to all and see all
    randoms: Annotated[int, Field(strict=True, ge=0, le=1024)] = 3  # random links of a block to earlier blocks
    seed: Count = 0  # seed of the random links
    sparse: ClassVar = True

    @property
    def global_positions(self) -> int:
        return self.globals * self.block

    @property
    def tile(self) -> int:
        return _fitting(self.block)

    def link(self, block: Any, number: Any) -> Any:
        """Return the earlier block of a block's link number `number` < `randoms`; -1 if no block is earlier."""
        mixed = (block * self.randoms + number) & _MASK
        for salt in (self.seed, 0x9E3779B9, 0x85EBCA6B):
            mixed = _mix(mixed ^ (salt & _MASK))
        return (mixed % (block + (block < 1)) + 1) * (block > 0) - 1

    def about(self, positions: "Tensor") -> "Tensor | None":
        return self.links(positions.long() // self.block) if self.randoms else None

    def sees(self, q: "Tensor", k: "Tensor", of_q: About | None = None, of_k: About | None = None) -> "Tensor":
        a, b = q // self.block, k // self.block
        if of_q is None or of_k is None:
            of_q, of_k = (lambda i: self.link(a.long(), i)), (lambda i: self.link(b.long(), i))
        seen = (a - b <= self.before) & (b - a <= self.after)
        seen = seen | (a < self.globals) | (b < self.globals)
        for i in range(self.randoms):
            seen = seen | (of_q(i) == b) | (of_k(i) == a)
        return seen & ((k <= q) | self.looks_ahead)

    def meets(self, q: Span, k: Span) -> "Tensor":
        a, b = _over(q, self.block), _over(k, self.block)
        met = (a.low - b.high <= self.before) & (b.low - a.high <= self.after)
        met = met | (a.low < self.globals) | (b.low < self.globals)
        if self.randoms:
            met = met | self._linked(a, b) | self._linked(b, a)
        return met & ((k.low <= q.high) | self.looks_ahead)

    def covers(self, q: Span, k: Span) -> "Tensor":
        a, b = _over(q, self.block), _over(k, self.block)
        covered = (a.high - b.low <= self.before) & (b.high - a.low <= self.after)
        covered = covered | (a.high < self.globals) | (b.high < self.globals)
        within = (a.low == a.high) & (b.low == b.high)  # one block of the pattern each: a link joins all of them
        if self.randoms:
            linked = (self.links(a.low) == b.low[..., None]) | (self.links(b.low) == a.low[..., None])
            covered = covered | within & linked.any(-1)
        return covered & ((k.high <= q.low) | self.looks_ahead)

    def links(self, block: Any) -> Any:
        """Return all links of blocks, [..., randoms], vectorised."""
        import numpy as np

        if isinstance(block, np.ndarray):
            return self.link(block[..., None], np.arange(self.randoms))
        import torch

        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return torch.ops.anyformer.links(block, self.randoms, self.seed)  # see `attention/flex.py`
        return self.link(block[..., None], torch.arange(self.randoms, device=block.device))

    def _linked(self, later: Span, earlier: Span) -> "Tensor":
        """Return whether any block of one span is linked to an earlier block of the other; True for long spans."""
        most = (self.tile - 2) // self.block + 2  # blocks that a run of positions of this length can touch
        met = (later.high - later.low >= most) & (earlier.low == earlier.low)
        for step in range(most):
            block = later.low + step
            links = self.links(block)
            joined = (
                (block <= later.high)[..., None]
                & (earlier.low[..., None] <= links)
                & (links <= earlier.high[..., None])
            )
            met = met | joined.any(-1)
        return met


class Graph(Open):
    """Any graph: position q sees position k where (q, k) is among the edges; `loops`: and every position itself."""

    kind: Literal["graph"] = "graph"
    nodes: Annotated[int, Field(strict=True, ge=1, le=65_536)]  # number of positions; memory grows with its square
    edges: tuple[tuple[Count, Count], ...]  # visible pairs, each (query position, key position)
    loops: Flag = True  # every position sees itself

    @model_validator(mode="after")
    def _check(self) -> Self:
        if found := list(self._outside()):
            raise ConfigError(found)
        return self

    def _outside(self) -> Iterator[Fault]:
        for i, (q, k) in enumerate(self.edges):
            if max(q, k) >= self.nodes:
                yield Fault(f"edges.{i}", f"= ({q}, {k}): must join positions below nodes = {self.nodes}")

    @property
    def looks_ahead(self) -> bool:
        return self.ahead is not False and any(k > q for q, k in self.edges)

    @property
    def sees_self(self) -> bool:
        return self.loops or len({q for q, k in self.edges if q == k}) == self.nodes

    @property
    def limit(self) -> int:
        return self.nodes

    def adjacency(self, like: "Tensor") -> "Tensor":
        """bool [nodes, nodes], rows are queries."""
        import torch

        seen = torch.zeros(self.nodes, self.nodes, dtype=torch.bool, device=like.device)
        if self.edges:
            q, k = torch.tensor(self.edges, device=like.device).unbind(dim=1)
            seen = seen.index_put((q, k), torch.tensor(True, device=like.device))
        if self.loops:
            seen = seen | torch.eye(self.nodes, dtype=torch.bool, device=like.device)
        return seen if self.looks_ahead else seen.tril()

    def about(self, positions: "Tensor") -> "Tensor":
        return self.adjacency(positions)[positions]

    def sees(self, q: "Tensor", k: "Tensor", of_q: About | None = None, of_k: About | None = None) -> "Tensor":
        return self.adjacency(q)[q, k] if of_q is None else of_q(k)


_MASK = 0x7FFFFFFF  # hashes stay below 2³¹, so that no multiplication overflows


def _mix(x: "Tensor") -> "Tensor":
    """Mix integers below 2³¹, so that every bit affects all bits."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def _fitting(block: int) -> int:
    """Return a tile size that is aligned with the blocks of a pattern, if there is one."""
    return SMALL if block % LARGE and block % SMALL == 0 else LARGE


def _over(span: Span, size: int) -> Span:
    """Return the span in units of blocks."""
    return Span(span.low // size, span.high // size)
