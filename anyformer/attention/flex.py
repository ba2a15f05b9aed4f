"""FlexAttention: kernels that skip whole blocks of keys, from the same definition as the dense mask (`layout.sees`).

The lowest and highest position and segment of each block of tokens decide which blocks may hold a visible pair; at most
blocks × blocks values are stored. The pattern determines the block size. Inside a listed block the predicate decides
pair by pair, from facts looked up by index; blocks that are certainly visible as a whole skip it. A block of padding
only is never listed, so padding tokens may see less here than in the dense form; real tokens see the same.
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
from anyformer.attention.lowered import Blocks, Dense, Index
from anyformer.attention.scores import Scoring, soft_cap
from anyformer.config import BigBird, Pattern, Position, Span
from anyformer.config.pattern import LARGE, SMALL
from anyformer.kernels.conventions import PADDING, PLAIN, SEEN, SEER

NO_POSITION = 2**31 - 1  # above every position: the lowest one of a block without real tokens
MAX_TUNED_WIDTH = 64  # heads up to this width use tile sizes that were timed on an H200


def lower_blocks(
    pattern: Pattern,
    q: Layout,
    k: Layout,
    densify: Callable[[], Dense],
    scheme: Position | None = None,
    levels: Tensor | None = None,
) -> Blocks:
    """Return the blocks of a pattern between two layouts, and the score function of a scheme with its levels."""
    cacheable = not torch.compiler.is_compiling() and type(q.positions) is type(k.positions) is Tensor
    if cacheable and all(x.is_arange and x.segments is None and x.marks is None for x in (q, k)):
        lengths = q.positions.shape[1], k.positions.shape[1]
        mask = _arange_mask(pattern, *lengths, q is k, q.positions.device, torch.is_inference_mode_enabled())
    else:
        mask = _block_mask(pattern, q, k)
    if scheme is None or levels is None:
        return Blocks(mask, None, (pattern, None), pattern.tile, densify)
    q_at, k_at = _positions(q), _positions(k)

    def bias(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return scheme.score(levels, h, q_at(b, i), k_at(b, j))

    return Blocks(mask, bias, (pattern, scheme), pattern.tile, densify)


def _block_mask(pattern: Pattern, q: Layout, k: Layout) -> BlockMask:
    listed, full = find_blocks(pattern, q, k)
    some, all_ = _listed_first(listed & ~full), _listed_first(full)
    lengths = q.positions.shape[1], k.positions.shape[1]
    # LARGE for all: torch checks this size against its own tiles before it reads ours; `_tiles` passes the real size
    return BlockMask.from_kv_blocks(*some, *all_, LARGE, _predicate(pattern, q, k), lengths)


@lru_cache(maxsize=16)
def _arange_mask(pattern: Pattern, t: int, s: int, same: bool, device: torch.device, inference: bool) -> BlockMask:
    """Return the mask of rows at positions 0, 1, 2, ...: it depends on lengths only, so steps and layers share it.

    Tensors made in inference mode cannot take part in autograd, hence `inference` in the key.
    """
    q = make_layout(1, t, device)
    return _block_mask(pattern, q, q if same else make_layout(1, s, device))


def _predicate(pattern: Pattern, q: Layout, k: Layout) -> Callable[[Index, Index, Index, Index], Tensor]:
    """Return `layout.sees` for one pair of tokens, by their indices."""
    q_at, k_at = _positions(q), _positions(k)
    q_facts = pattern.about(q.positions)
    k_facts = q_facts if k is q else pattern.about(k.positions)
    q_about = None if q_facts is None else _look_up(q_facts)
    k_about = None if k_facts is None else _look_up(k_facts)
    segmented = q.segments is not None or k.segments is not None
    q_segment, k_segment = _look_up(q.segment_ids), _look_up(k.segment_ids)
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
        if q_mark is not None and k_mark is not None:
            seen = seen | ((q_mark(b, i) == k_mark(b, j)) & (k_mark(b, j) < PLAIN))
        if segmented:
            seen = seen & (q_segment(b, i) == k_segment(b, j))
        return seen

    return predicate


def _positions(layout: Layout) -> Callable[..., Tensor]:
    """Return a function from row and index to position; for 0, 1, 2, ... it is the index itself."""
    return (lambda b, i: i) if layout.is_arange else _look_up(layout.positions)


def _look_up(facts: Tensor) -> Callable[..., Tensor]:
    """Return a function from row and index to facts [b or 1, t, ...]."""
    facts = facts if facts.dtype is torch.bool else facts.int()
    if facts.shape[0] > 1:
        return lambda b, *at: facts[(b, *at)]
    one = facts[0]
    return lambda b, *at: one[at]


# -- which blocks are computed ----------------------------------------------------------------------------------------


def find_blocks(pattern: Pattern, q: Layout, k: Layout) -> tuple[Tensor, Tensor]:
    """Return the blocks that may hold a visible pair of real tokens, and those in which every pair is visible.

    Both are bool [b or 1, query blocks, key blocks]; the second is a subset of the first.
    """
    a, b = _Summary.of(q, pattern.tile, dim=-1), _Summary.of(k, pattern.tile, dim=-2)
    met, covered = pattern.meets(a.positions, b.positions), pattern.covers(a.positions, b.positions)
    met = met | b.any_seen | a.any_seer | ((a.groups.low <= b.groups.high) & (b.groups.low <= a.groups.high))
    covered = covered | b.all_seen | a.all_seer
    met = met & (a.segments.low <= b.segments.high) & (b.segments.low <= a.segments.high)
    one = (a.segments.low == a.segments.high) & (b.segments.low == b.segments.high)
    covered = covered & one & (a.segments.low == b.segments.low) & a.all_real & b.all_real
    return met & a.any_real & b.any_real, covered & met


class _Summary(NamedTuple):
    """Facts about each block of tokens: [b or 1, blocks], with an axis of size 1 for the blocks of the other side."""

    positions: Span  # of the real tokens
    segments: Span
    groups: Span  # of the negative marks, as positive numbers
    any_real: Tensor
    all_real: Tensor
    any_seen: Tensor
    all_seen: Tensor
    any_seer: Tensor
    all_seer: Tensor

    @classmethod
    def of(cls, layout: Layout, size: int, dim: int) -> "_Summary":
        positions = layout.positions
        marks = torch.zeros_like(positions) if layout.marks is None else layout.marks
        positions, marks = _split_blocks(positions, size, 0), _split_blocks(marks, size, 0)
        segments = _split_blocks(layout.segment_ids, size, PADDING)
        is_real = real(segments)

        def span(x: Tensor, among: Tensor = is_real) -> Span:
            low, high = torch.where(among, x, NO_POSITION).amin(-1), torch.where(among, x, -1).amax(-1)
            return Span(low.unsqueeze(dim), high.unsqueeze(dim))

        seen, seer = marks >= SEEN, marks >= SEER
        facts = is_real.any(-1), is_real.all(-1), seen.any(-1), seen.all(-1), seer.any(-1), seer.all(-1)
        groups = span(-marks, is_real & (marks < PLAIN))
        return cls(span(positions), span(segments), groups, *(x.unsqueeze(dim) for x in facts))


@torch.library.custom_op("anyformer::links", mutates_args=())
def _links(block: Tensor, randoms: int, seed: int) -> Tensor:
    """Opaque to the compiler: each step of the hash reads the last one twice, and inlining them takes minutes."""
    return BigBird(randoms=randoms, seed=seed).links(block)


@_links.register_fake
def _like_links(block: Tensor, randoms: int, seed: int) -> Tensor:
    return block.new_empty(*block.shape, randoms)


def _split_blocks(x: Tensor, size: int, filler: int) -> Tensor:
    """[b, t] -> [b, blocks, size], the last block padded."""
    return F.pad(x, (0, -x.shape[1] % size), value=filler).unflatten(1, (-1, size))


def _listed_first(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of blocks lists [b, 1, n], and their indices, listed ones first [b, 1, n, m]."""
    which = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1).int()[:, None], which.int()[:, None]


# -- the kernel -------------------------------------------------------------------------------------------------------


def flex(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scoring: Scoring) -> Tensor:
    """Return attention over the listed blocks, [b, h, t, k_v]; queries without a visible key return zeros."""
    bias, cap, sinks = blocks.bias, scoring.cap, scoring.sinks

    def change(score: Tensor, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        score = score if cap is None else soft_cap(score, cap)
        return score if bias is None else score + bias(b, h, i, j)

    changed = None if cap is None and bias is None else change
    run = _run if torch.compiler.is_compiling() or not q.is_cuda else _compiled(blocks.kind, cap, sinks is not None)
    tiles = _tiles(q, v, blocks.size)
    if sinks is None:
        return run(q, k, v, changed, blocks.mask, scoring.scale, tiles, None)
    out, aux = run(q, k, v, changed, blocks.mask, scoring.scale, tiles, AuxRequest(lse=True))
    # softmax over keys and sink = softmax over keys, times the keys' share of the weight
    return out * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(out.dtype)


def _tiles(q: Tensor, v: Tensor, size: int) -> dict[str, Any]:
    """Return kernel options: tuned tile sizes for narrow heads, otherwise torch's own or the size of the blocks."""
    widest = max(q.shape[-1], v.shape[-1])
    single = q.dtype is torch.float32
    if size == LARGE:
        tuned = not single and widest <= MAX_TUNED_WIDTH
        return {**_forward_tiles(LARGE, SMALL), **_backward_tiles(SMALL, SMALL)} if tuned else {}
    sizes = {"SPARSE_Q_BLOCK_SIZE": size, "SPARSE_KV_BLOCK_SIZE": size}
    sizes |= _forward_tiles(size, size // 2 if single or widest > LARGE else size)
    if single:
        return sizes  # torch's backward tiles for fp32 are small already
    return {**sizes, **_backward_tiles(size, size // 2 if widest <= MAX_TUNED_WIDTH else size)}


def _forward_tiles(queries: int, keys: int) -> dict[str, int]:
    return {"fwd_BLOCK_M": queries, "fwd_BLOCK_N": keys, "fwd_num_warps": 4, "fwd_num_stages": 3}


def _backward_tiles(outer: int, inner: int) -> dict[str, int]:
    """Tiles for the gradients of keys and values, then of queries: the outer tile is accumulated over inner ones."""
    keys = {"bwd_BLOCK_N1": outer, "bwd_BLOCK_M1": inner}
    return {**keys, "bwd_BLOCK_M2": outer, "bwd_BLOCK_N2": inner, "bwd_num_warps": 4, "bwd_num_stages": 3}


def _run(
    q: Tensor, k: Tensor, v: Tensor, score: Any, mask: BlockMask, scale: float, tiles: Any, aux: AuxRequest | None
) -> Any:
    grouped = q.shape[1] != k.shape[1]
    return flex_attention(q, k, v, score, mask, scale, grouped, kernel_options=tiles, return_aux=aux)


@cache
def _compiled(kind: tuple[Pattern, Position | None], cap: float | None, sinks: bool) -> Any:
    """Compile one kernel per kind: torch counts recompilations by code object and falls back to eager past a limit."""
    code = _run.__code__.replace(co_name=f"flex_{_compiled.cache_info().currsize}")
    return torch.compile(FunctionType(code, globals()), fullgraph=True)
