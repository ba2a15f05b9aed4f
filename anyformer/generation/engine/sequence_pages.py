"""Pages of the requests of one model: its pool, and pages taken, shared, kept for reuse and returned."""

import torch

from anyformer.attention.cache.paged import Pool
from anyformer.config.cost import Sizes
from anyformer.generation.engine.interface import Limits
from anyformer.generation.engine.pages import PagePool, count_pages_for
from anyformer.generation.engine.sequence import Sequence
from anyformer.kernels.runtime import Runtime
from anyformer.nn.model import Transformer

CPU_POOL_TOKENS = 65536  # of a model on the CPU, where free memory is not measured


class SequencePages:
    """The pool of a model, and the tables of pages of its requests."""

    def __init__(self, body: Transformer, limits: Limits):
        self.limits, self.size = limits, limits.page_size
        self._counts = count_pages(body, limits)
        self.pool: Pool = new_pool(body, self._counts, self.size, limits.int8)
        self.forget()

    def forget(self) -> None:
        """Forget all pages and the beginnings of texts in them; no request may have any."""
        self.own, self.source = (PagePool(count, self.size) for count in self._counts)
        self._promised: dict[Sequence, int] = {}  # pages that the other beams of a request may need

    def admit(self, sequence: Sequence, used: int) -> bool:
        """Take pages for a waiting request, as far as its prompt needs them. `used`: rows that other requests have."""
        known = self._find(sequence)
        self.own.share(known)
        tokens, margin = sequence.length + 1, used  # each row that decodes soon needs a page
        if self.limits.reproducible:  # never preempted: read again, its tokens would be rounded differently
            tokens = len(sequence.prompt) + sequence.budget
            beams = (sequence.rows - 1) * count_pages_for(tokens, self.size)
            margin = sum(self._promised.values()) + beams
        needed = count_pages_for(tokens, self.size) - len(known)
        new = self.own.take(needed) if needed + margin <= self.own.available else None
        source = self.source.take(count_pages_for(len(sequence.source), self.size))
        if new is None or source is None:
            self.own.release([*known, *(new or ())])
            self.source.release(source or ())
            return False
        if self.limits.reproducible:
            self._promised[sequence] = beams
        sequence.tables, sequence.source_pages = [[*known, *new]], source
        sequence.read = len(known) * self.size
        if not sequence.answer:
            sequence.cached = min(sequence.read, len(sequence.prompt))
        return True

    def _find(self, sequence: Sequence) -> list[int]:
        """Return the pages of its beginning that are in the cache. The last token is always read, for its logits."""
        if not self.limits.reuse or sequence.source or sequence.request.prompt_logprobs:
            return []
        most = (sequence.length - 1) // self.size
        known = self.own.find(key for key, _ in zip(sequence.keys(self.size), range(most), strict=False))
        if self.limits.reproducible:  # chunks begin where they would without reuse
            whole = len(known) * self.size // self.limits.chunk * self.limits.chunk
            known = known[: whole // self.size]
        return known

    def extend(self, sequence: Sequence, read: int) -> bool:
        """Make the page of token `read` of each row writable: present, and used by no other row."""
        at = read // self.size
        copies: list[tuple[int, int]] = []
        for table in sequence.tables:
            if at < len(table) and not self.own.is_shared(table[at]):
                continue
            new = self.own.take(1)
            if new is None:
                self.pool.copy(copies)
                return False
            if at < len(table):
                copies.append((table[at], new[0]))
                self.own.release([table[at]])
                table[at] = new[0]
            else:
                table += new
        self.pool.copy(copies)
        return True

    def continue_rows(self, sequence: Sequence, parents: list[int]) -> None:
        """Let row i share the pages of row `parents[i]`, which it continues."""
        old = sequence.tables
        sequence.tables = [list(old[min(parent, len(old) - 1)]) for parent in parents]
        for table in sequence.tables:
            self.own.share(table)
        for table in old:
            self.own.release(table)

    def release(self, sequence: Sequence, clean: bool) -> None:
        """Return the pages of a request; those that may hold NaN are not `clean`."""
        pages = [page for table in sequence.tables for page in self.own.release(table, clean)]
        self.pool.clear(pages)
        self.pool.clear_source(self.source.release(sequence.source_pages, clean))
        self._promised.pop(sequence, None)
        sequence.tables, sequence.source_pages = [], []

    def remember(self, sequence: Sequence) -> None:
        """Keep the full pages of a request for others that begin alike."""
        if not self.limits.reuse or sequence.source:
            return
        tokens = min(sequence.read, len(sequence.prompt)) if self.limits.reproducible else sequence.read
        full = tokens // self.size
        keys = [key for key, _ in zip(sequence.keys(self.size), range(full), strict=False)]
        self.own.remember(sequence.tables[0][:full], keys)


def is_paged(model: Transformer) -> bool:
    """Return whether the state of a model is keys and values of tokens, in pages."""
    decoder = model.config.decoder
    if decoder is None or decoder.memory:
        return False
    blocks = decoder.unrolled()
    stored = all(block.mixer.stores(model.config.width) is not None for block in blocks)
    return stored and all(block.attention or block.mixer.is_none for block in blocks)


def new_pool(model: Transformer, pages: tuple[int, int], page_size: int, int8: bool = False) -> Pool:
    """Return an empty pool of pages for tokens and for sources, page 0 of each included."""
    assert model.decoder is not None
    weight = next(model.parameters())
    dtype = Runtime.of(weight, training=False).dtype
    return Pool(_own_sizes(model), _cross_sizes(model), pages, page_size, weight.device, dtype, int8)


def count_pages(model: Transformer, limits: Limits) -> tuple[int, int]:
    """Return the number of pages for tokens and for sources by limits; 0 for sources without an encoder."""
    assert model.decoder is not None
    sides = (_own_sizes(model), [size for size in _cross_sizes(model) if size is not None])
    weight = next(model.parameters())
    wide = Runtime.of(weight, training=False).dtype.itemsize
    own, cross = (
        sum(size.groups * (size.key_width + size.value_width) for size in side) * wide * limits.page_size
        for side in sides
    )
    own = own // (2 if limits.int8 and wide == 2 else 1)
    if limits.pages is not None:
        pages = limits.pages
    elif weight.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(weight.device)
        pages = int(free * limits.memory) // max(own + cross, 1)
    else:
        pages = CPU_POOL_TOKENS // limits.page_size
    return pages + 1, pages + 1 if cross else 0


def _own_sizes(model: Transformer) -> list[Sizes]:
    assert model.decoder is not None
    return [size for size in model.decoder.sizes if isinstance(size, Sizes)]  # all of a model that is paged


def _cross_sizes(model: Transformer) -> list[Sizes | None]:
    decoder, width = model.config.decoder, model.config.width
    assert decoder is not None
    crosses = (block.cross for block in decoder.unrolled())
    return [None if spec is None else Sizes(spec.groups, *spec.widths(width)) for spec in crosses]
