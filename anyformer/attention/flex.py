"""FlexAttention: kernels that skip whole blocks of keys, from the same definition as the dense mask (`mask.sees`).

Which blocks hold a visible pair follows from the least and greatest position and segment in each block of tokens, of
which the pattern knows the size that fits it; blocks × blocks numbers are the most that is ever stored. Within a listed
block the predicate itself decides, pair by pair, from facts looked up by index; blocks that surely are visible as a
whole skip that. A block of nothing but padding is never listed, so a pad may see less here than in the dense form; real
tokens see the same.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from anyformer.attention.layout import Layout, make_layout, real
from anyformer.config import BigBird, Pattern, Scheme, Span
from anyformer.config.pattern import LARGE, SMALL
from anyformer.conventions import PADDING, SEEN, SEER

FAR = 2**31 - 1
MEASURED = 64  # the width of heads for which tiles were timed, on an H200

Index = Tensor  # one number: flex calls its functions for one row, head, query and key at a time
Added = Callable[[Index, Index, Index, Index], Tensor]


class Blocks(NamedTuple):
    """A relation as FlexAttention takes it."""

    mask: BlockMask
    added: Added | None  # to the score, by row, head, query and key
    kind: tuple[Pattern, Scheme | None]  # what its functions are made of: the same kind shares a compiled kernel
    size: int  # tokens in a block


def lower(pattern: Pattern, q: Layout, k: Layout, scheme: Scheme | None = None, levels: Tensor | None = None) -> Blocks:
    """The blocks of a pattern between two layouts, and the score function of a scheme with its levels."""
    here = not torch.compiler.is_compiling() and type(q.positions) is type(k.positions) is Tensor
    if here and all(x.is_arange and x.segments is None and x.marks is None for x in (q, k)):
        lengths = q.positions.shape[1], k.positions.shape[1]
        mask = _counted(pattern, *lengths, q is k, q.positions.device, torch.is_inference_mode_enabled())
    else:
        mask = _mask(pattern, q, k)
    if scheme is None or levels is None:
        return Blocks(mask, None, (pattern, None), pattern.tile)
    q_at, k_at = _positions(q), _positions(k)

    def added(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return scheme.score(levels, h, q_at(b, i), k_at(b, j))

    return Blocks(mask, added, (pattern, scheme), pattern.tile)


def _mask(pattern: Pattern, q: Layout, k: Layout) -> BlockMask:
    listed, full = find(pattern, q, k)
    some, all_ = _ordered(listed & ~full), _ordered(full)
    lengths = q.positions.shape[1], k.positions.shape[1]
    # torch refuses blocks that its own choice of tiles does not divide, before it asks for ours: `_tiles` has the size
    return BlockMask.from_kv_blocks(*some, *all_, LARGE, _predicate(pattern, q, k), lengths)


@lru_cache(maxsize=16)
def _counted(pattern: Pattern, t: int, s: int, same: bool, device: torch.device, inference: bool) -> BlockMask:
    """Of whole rows from position 0 on: nothing but their lengths tells, so that steps share it, as layers do.

    What is made in inference mode serves no gradients.
    """
    q = make_layout(1, t, device)
    return _mask(pattern, q, q if same else make_layout(1, s, device))


def _predicate(pattern: Pattern, q: Layout, k: Layout) -> Callable[[Index, Index, Index, Index], Tensor]:
    """`mask.sees` for one pair of tokens, by their indices."""
    q_at, k_at = _positions(q), _positions(k)
    q_facts = pattern.about(q.positions)
    k_facts = q_facts if k is q else pattern.about(k.positions)
    q_about = None if q_facts is None else _look_up(q_facts)
    k_about = None if k_facts is None else _look_up(k_facts)
    apart = q.segments is not None or k.segments is not None
    q_segment, k_segment = (
        _look_up(torch.zeros_like(x.positions) if x.segments is None else x.segments) for x in (q, k)
    )
    q_mark = None if q.marks is None else _look_up(q.marks)
    k_mark = None if k.marks is None else _look_up(k.marks)

    def predicate(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        if q_about is None or k_about is None:
            seen = pattern.sees(q_at(b, i), k_at(b, j))
        else:
            seen = pattern.sees(q_at(b, i), k_at(b, j), lambda n: q_about(b, i, n), lambda n: k_about(b, j, n))
        if k_mark is not None:
            seen = seen | (k_mark(b, j) >= SEEN)
        if q_mark is not None:
            seen = seen | (q_mark(b, i) >= SEER)
        if apart:
            seen = seen & (q_segment(b, i) == k_segment(b, j))
        return seen

    return predicate


def _positions(layout: Layout) -> Callable[..., Tensor]:
    """Positions by row and index: where they are the index, nothing is looked up."""
    return (lambda b, i: i) if layout.is_arange else _look_up(layout.positions)


def _look_up(facts: Tensor) -> Callable[..., Tensor]:
    """Facts [b or 1, t, ...] by row and index."""
    facts = facts if facts.dtype is torch.bool else facts.int()
    if facts.shape[0] > 1:
        return lambda b, *at: facts[(b, *at)]
    one = facts[0]
    return lambda b, *at: one[at]


# -- which blocks -----------------------------------------------------------------------------------------------------


def find(pattern: Pattern, q: Layout, k: Layout) -> tuple[Tensor, Tensor]:
    """Blocks that may hold a visible pair of real tokens, and those in which surely every pair is one.

    bool [b or 1, query blocks, key blocks]; the second within the first.
    """
    a, b = _Summary.of(q, pattern.tile, dim=-1), _Summary.of(k, pattern.tile, dim=-2)
    met, covered = pattern.meets(a.positions, b.positions), pattern.covers(a.positions, b.positions)
    met = met | b.any_seen | a.any_seer
    covered = covered | b.all_seen | a.all_seer
    met = met & (a.segments.low <= b.segments.high) & (b.segments.low <= a.segments.high)
    one = (a.segments.low == a.segments.high) & (b.segments.low == b.segments.high)
    covered = covered & one & (a.segments.low == b.segments.low) & a.whole & b.whole
    return met & a.some & b.some, covered & met


class _Summary(NamedTuple):
    """What is known of each block of tokens: [b or 1, blocks], with room for the other side's blocks."""

    positions: Span  # of the real tokens
    segments: Span
    some: Tensor  # any token is real
    whole: Tensor  # all are
    any_seen: Tensor
    all_seen: Tensor
    any_seer: Tensor
    all_seer: Tensor

    @classmethod
    def of(cls, layout: Layout, size: int, dim: int) -> "_Summary":
        positions = layout.positions
        segments = torch.zeros_like(positions) if layout.segments is None else layout.segments
        marks = torch.zeros_like(positions) if layout.marks is None else layout.marks
        positions, segments, marks = _cut(positions, size, 0), _cut(segments, size, PADDING), _cut(marks, size, 0)
        there = real(segments)

        def span(x: Tensor) -> Span:
            return Span(
                torch.where(there, x, FAR).amin(-1).unsqueeze(dim), torch.where(there, x, -1).amax(-1).unsqueeze(dim)
            )

        seen, seer = marks >= SEEN, marks >= SEER
        facts = there.any(-1), there.all(-1), seen.any(-1), seen.all(-1), seer.any(-1), seer.all(-1)
        return cls(span(positions), span(segments), *(x.unsqueeze(dim) for x in facts))


@torch.library.custom_op("anyformer::links", mutates_args=())
def _links(block: Tensor, randoms: int, seed: int) -> Tensor:
    """A hash reads each of its steps twice, and a compiler that writes them into one another takes minutes for it."""
    return BigBird(randoms=randoms, seed=seed).links(block)


@_links.register_fake
def _like_links(block: Tensor, randoms: int, seed: int) -> Tensor:
    return block.new_empty(*block.shape, randoms)


def _cut(x: Tensor, size: int, filler: int) -> Tensor:
    """[b, t] -> [b, blocks, size], the last block filled up."""
    return F.pad(x, (0, -x.shape[1] % size), value=filler).unflatten(1, (-1, size))


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of blocks has, and which come first: [b, 1, n] and [b, 1, n, m]."""
    which = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1).int()[:, None], which.int()[:, None]


# -- running ----------------------------------------------------------------------------------------------------------


def flex(
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float, cap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Attention over the listed blocks, [b, h, t, k_v]; a row that sees nothing is zero."""
    added = blocks.added

    def score(score: Tensor, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if added is None else score + added(b, h, i, j)

    changes = None if cap is None and added is None else score
    run = _run if torch.compiler.is_compiling() or not q.is_cuda else _compiled(blocks.kind, cap, sinks is not None)
    tiles = _tiles(q, v, blocks.size)
    if sinks is None:
        return run(q, k, v, changes, blocks.mask, scale, tiles, None)
    out, aux = run(q, k, v, changes, blocks.mask, scale, tiles, AuxRequest(lse=True))
    # softmax over keys and sink = softmax over keys, times the keys' share
    return out * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(out.dtype)


def _tiles(q: Tensor, v: Tensor, size: int) -> dict[str, Any]:
    """What torch's own choice of tiles is told: what was measured for small heads, else no more than the blocks ask."""
    widest = max(q.shape[-1], v.shape[-1])
    single = q.dtype is torch.float32
    if size == LARGE:
        return {} if single or widest > MEASURED else {**_ahead(LARGE, SMALL), **_back(SMALL, SMALL)}
    sizes = {"SPARSE_Q_BLOCK_SIZE": size, "SPARSE_KV_BLOCK_SIZE": size}
    sizes |= _ahead(size, size // 2 if single or widest > LARGE else size)
    if single:
        return sizes  # backwards in small tiles anyway
    return {**sizes, **_back(size, size // 2 if widest <= MEASURED else size)}


def _ahead(queries: int, keys: int) -> dict[str, int]:
    return {"fwd_BLOCK_M": queries, "fwd_BLOCK_N": keys, "fwd_num_warps": 4, "fwd_num_stages": 3}


def _back(kept: int, passing: int) -> dict[str, int]:
    """Tiles whose gradients are summed, keys first and then queries, and of those that pass by them."""
    keys = {"bwd_BLOCK_N1": kept, "bwd_BLOCK_M1": passing}
    return {**keys, "bwd_BLOCK_M2": kept, "bwd_BLOCK_N2": passing, "bwd_num_warps": 4, "bwd_num_stages": 3}


def _run(
    q: Tensor, k: Tensor, v: Tensor, score: Any, mask: BlockMask, scale: float, tiles: Any, more: AuxRequest | None
) -> Any:
    grouped = q.shape[1] != k.shape[1]
    return flex_attention(q, k, v, score, mask, scale, grouped, kernel_options=tiles, return_aux=more)


@cache
def _compiled(kind: tuple[Pattern, Scheme | None], cap: float | None, sinks: bool) -> Any:
    """A kernel of its own for each kind: torch counts recompilations by code, and past a few would fall to eager."""
    code = _run.__code__.replace(co_name=f"flex_{_compiled.cache_info().currsize}")
    return torch.compile(FunctionType(code, globals()), fullgraph=True)
