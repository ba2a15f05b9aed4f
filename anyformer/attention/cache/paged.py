"""Paged KV cache: the tokens of all rows in pages of one pool, found by a table of pages for each row.

Token i of a row is always in slot i % size of page i // size of its table, so key positions are 0, 1, 2, ... and masks,
position schemes and windows need no special case. A page may be in several tables: equal beginnings are stored once.

Page 0 belongs to no row. Padding of a batch is written there, as zeros, and tables are filled up with it. So the values
that a mask hides are finite: 0 · NaN would be NaN.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from anyformer.attention.cache.kv_cache import Cache
from anyformer.attention.cache.layer_cache import LayerCache
from anyformer.attention.cache.ring import FirstTokens, SlotWriter, Step
from anyformer.attention.layout import Layout, Pages, real
from anyformer.config.cost import Sizes
from anyformer.kernels.conventions import PADDING
from anyformer.kernels.paged import write_pages
from anyformer.kernels.runtime import runs_fused


class PagedSlots(NamedTuple):
    """Slots of new tokens in a pool, and the pages that their rows read."""

    at: Tensor  # int [b, t]: slots of the pool; 0 for padding
    is_token: Tensor  # bool [b, t]
    pages: Pages
    gathers: bool = True  # return copies of the rows' pages; otherwise the pool, for a kernel that reads pages

    @classmethod
    def of(cls, pages: Pages, positions: Tensor, is_token: Tensor) -> "PagedSlots":
        positions, size = positions.expand_as(is_token), pages.size
        page = pages.table.gather(1, torch.where(is_token, positions // size, 0))
        return cls(torch.where(is_token, page * size + positions % size, 0), is_token, pages)

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        """Write new [b, g, t, k] into a pool [1, g, slots, k]; return what the rows read [b, g, pages · size, k]."""
        self.store(stored, new)
        return self.read(stored) if self.gathers else stored

    def store(self, stored: Tensor, new: Tensor) -> None:
        new = new.masked_fill(~self.is_token[:, None, :, None], 0)
        stored[0].index_copy_(1, self.at.flatten(), new.transpose(0, 1).flatten(1, 2))

    def read(self, stored: Tensor) -> Tensor:
        pages = stored[0].unflatten(1, (-1, self.pages.size))[:, self.pages.table]  # [g, b, pages, size, k]
        return pages.flatten(2, 3).transpose(0, 1)


class Pool:
    """Pages of all layers, and separate pages for the keys and values of cross-attention."""

    def __init__(
        self,
        sizes: Sequence[Sizes],
        cross_sizes: Sequence[Sizes | None],
        pages: tuple[int, int],  # for tokens, and for sources
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        int8: bool = False,
    ):
        own, source = (count * page_size for count in pages)
        self.pages, self.source_pages, self.page_size, self.int8 = *pages, page_size, int8
        self.layers = [LayerCache(1, own, size, device, dtype, int8) for size in sizes]
        self.cross = [None if size is None else LayerCache(1, source, size, device, dtype) for size in cross_sizes]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, each (from, to): a shared page is copied before one of its rows writes to it."""
        if not pairs:
            return
        for x in _tensors(self.layers):
            by_page = x[0].unflatten(1, (-1, self.page_size))
            index = torch.tensor(pairs, device=x.device)
            by_page.index_copy_(1, index[:, 1], by_page.index_select(1, index[:, 0]))

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that may hold NaN."""
        self._zero(self.layers, pages)

    def clear_source(self, pages: Sequence[int]) -> None:
        """Zero pages of sources that may hold NaN."""
        self._zero(self.cross, pages)

    def _zero(self, layers: Sequence[LayerCache | None], pages: Sequence[int]) -> None:
        for x in _tensors(layers) if pages else ():
            x[0].unflatten(1, (-1, self.page_size)).index_fill_(1, torch.tensor(pages, device=x.device), 0)

    def nbytes(self) -> int:
        return sum(x.nbytes for x in _tensors((*self.layers, *self.cross)))


def _tensors(layers: Sequence[LayerCache | None]) -> list[Tensor]:
    return [x for layer in layers if layer is not None for x in layer.own()]


class SourcePages(NamedTuple):
    """Pages of the rows' sources, and how many tokens each source has."""

    table: Tensor  # int [b, pages]
    lengths: Tensor  # int [b]


class PagedLayer(NamedTuple):
    """One layer of a paged cache, with the interface of a `LayerCache`."""

    own: LayerCache
    across: LayerCache | None
    source: PagedSlots | None

    def append(self, k: Tensor, v: Tensor, writer: SlotWriter) -> tuple[Tensor, Tensor]:
        pools = self.own.keys.numbers, self.own.values.numbers
        if runs_fused(k) and isinstance(writer, FirstTokens) and pools[0].dtype is k.dtype:
            assert isinstance(writer.writer, PagedSlots)
            write_pages(pools, (k, v), writer.writer.at, writer.writer.is_token)
            return k, v
        if isinstance(writer, PagedSlots) and not writer.gathers and runs_fused(k):
            write_pages(pools, (k, v), writer.at, writer.is_token)
            return pools
        return self.own.append(k, v, writer)

    def keep_cross(self, k: Tensor, v: Tensor) -> None:
        assert self.across is not None
        assert self.source is not None
        for store, new in ((self.across.keys, k), (self.across.values, v)):
            self.source.store(store.numbers, new.to(store.numbers.dtype))

    def read_cross(self, in_place: bool = False) -> tuple[Tensor, Tensor]:
        assert self.across is not None
        assert self.source is not None
        pools = self.across.keys.numbers, self.across.values.numbers
        return pools if in_place else (self.source.read(pools[0]), self.source.read(pools[1]))


class PagedCache:
    """Rows of a pool in one call of a model. `lengths` [b] tokens of each are in the pool already.

    A table must have more slots than its row has tokens after the call. `new_source`: the call writes sources, of so
    many tokens. `fresh`: no row has tokens yet, so that new ones read only each other, without a mask.
    """

    states: None = None  # recurrent encoder states are not paged
    recomputes: Literal[False] = False

    def __init__(
        self,
        pool: Pool,
        table: Tensor,
        lengths: Tensor,
        source: SourcePages | None = None,
        new_source: int | None = None,
        fresh: bool = False,
    ):
        self.pool, self.table, self.lengths, self.fresh = pool, table, lengths, fresh
        self.following = lengths
        self.source: Layout | None = None
        slots: PagedSlots | None = None
        if source is not None:
            pages = Pages(source.table, pool.page_size, source.lengths)
            if new_source is None:
                self.source = _keys(pages)
            index = torch.arange(new_source or 1, device=table.device).expand(len(table), -1)
            slots = PagedSlots.of(pages, index, index < source.lengths[:, None])
        self.layers = [PagedLayer(own, across, slots) for own, across in zip(pool.layers, pool.cross, strict=True)]

    def next(self, length: int, is_token: Tensor | None = None, position_bound: int | None = None) -> Layout:
        """Return the layout of `length` new tokens that continue each row; padding is on the right."""
        index = torch.arange(length, device=self.table.device)
        positions = self.lengths[:, None] + index
        segments = torch.zeros_like(positions)
        if is_token is not None:
            positions, segments = positions.where(is_token, 0), segments.masked_fill(~is_token, PADDING)
        if self.fresh:
            return Layout.right_padded(segments)._replace(continues_cache=True)
        return Layout(positions, segments, position_bound=position_bound, continues_cache=True)

    def take(self, new: Layout) -> dict[int | None, Step]:
        """Return what all layers read, and where they write."""
        assert new.segments is not None
        is_token = real(new.segments)
        pages = Pages(self.table, self.pool.page_size, self.lengths + is_token.sum(dim=1))
        slots = PagedSlots.of(pages, new.positions, is_token)
        if self.fresh:
            return {None: Step(new, FirstTokens(slots))}
        keys = _keys(pages)
        return {None: Step(keys._replace(pages=None) if self.pool.int8 else keys, slots)}

    def make_layout(self, batch: int, length: int, *facts: Tensor | None) -> Layout:
        if any(fact is not None for fact in facts):
            raise ValueError("the tokens of a paged cache continue its rows: leave segments, masks and positions out")
        return self.next(length)

    def keep_source(self, source: Layout, states: Tensor | None = None) -> None:
        """The layers write the sources; their lengths are known."""
        if states is not None:
            raise ValueError("recurrent encoder states are not paged: use `new_cache`")


AnyCache = Cache | PagedCache


def _keys(pages: Pages) -> Layout:
    """Return the layout of the tokens in pages; padding is at position 0, as everywhere."""
    index = torch.arange(pages.table.shape[1] * pages.size, device=pages.lengths.device)
    is_token = index < pages.lengths[:, None]
    positions, segments = torch.where(is_token, index, 0), torch.where(is_token, 0, PADDING)
    return Layout(positions, segments, pages=pages)
