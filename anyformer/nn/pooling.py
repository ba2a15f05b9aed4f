"""Token pooling between the stages of an encoder, and upsampling at its end (Funnel-Transformer, Dai et al. 2020).

A window is all tokens of one segment whose positions have the same quotient by the factor. Windows have a layout by
segment and quotient, so every layer treats them as tokens, padding and packing change nothing, and windows can be
pooled again.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.attention.layout import Layout, real
from anyformer.config import Pooling
from anyformer.kernels.conventions import PADDING


class Windows(NamedTuple):
    """Assignment of tokens to windows, and the layout of the windows."""

    layout: Layout  # of the windows
    inside: Tensor | None  # bool [b, t]: the tokens that are not padding; None: all
    factor: int
    rank: Tensor | None  # int [b, t]: each token's window; for padding, one past the last; None: i // factor

    @classmethod
    def of(cls, tokens: Layout, factor: int, batch: int) -> "Windows":
        inside = None if tokens.segments is None else real(tokens.segments)
        if tokens.is_arange and tokens.marks is None:
            length = -(-tokens.positions.shape[1] // factor)
            segments = None if tokens.segments is None else tokens.segments[:, ::factor]  # all padding is on the right
            layout = tokens._replace(positions=tokens.positions[:, :length], segments=segments, position_bound=length)
            return cls(layout, inside, factor, None)
        tokens = tokens._replace(positions=tokens.positions.expand(batch, -1))
        rank, count = _ranks(tokens, factor)
        length = rank.shape[1] if torch.compiler.is_compiling() else max(int(count.max()), 1)
        at = torch.where(rank < count, rank, length)

        def by_window(values: Tensor, filler: int) -> Tensor:
            """Return the largest value of the tokens of each window."""
            out = values.new_full((at.shape[0], length + 1), filler)
            return out.scatter_reduce(1, at, values.expand_as(at), "amax")[:, :length]

        segments = tokens.segment_ids
        layout = Layout(
            by_window(torch.where(real(segments), tokens.positions // factor, 0), 0),
            by_window(segments, PADDING),
            None if tokens.marks is None else by_window(tokens.marks, 0),
            ordered=True,
            packed=tokens.packed,
            padding="right",
        )
        return cls(layout, inside, factor, at)

    def pool(self, x: Tensor, how: Literal["mean", "max"]) -> Tensor:
        """Pool tokens [b, t, d] to windows [b, n, d]; empty windows are zero."""
        if how == "mean":
            return self._reduce(x, "sum", 0.0) / self._reduce(torch.ones_like(x[..., :1]), "sum", 0.0).clamp(min=1)
        largest = self._reduce(x, "amax", -torch.inf)
        return largest.masked_fill(largest == -torch.inf, 0.0)

    def spread(self, x: Tensor, length: int) -> Tensor:
        """Repeat windows [b, n, d] for their tokens [b, t, d]; padding is zero."""
        if self.rank is None:
            return x.repeat_interleave(self.factor, dim=1)[:, :length]
        return F.pad(x, (0, 0, 0, 1)).gather(1, self._at(x))

    def _reduce(self, x: Tensor, how: Literal["sum", "amax"], neutral: float) -> Tensor:
        if self.inside is not None:
            x = x.masked_fill(~self.inside[..., None], neutral)
        length = self.layout.positions.shape[1]
        if self.rank is None:
            x = F.pad(x, (0, 0, 0, length * self.factor - x.shape[1]), value=neutral).unflatten(1, (length, -1))
            return x.sum(dim=2) if how == "sum" else x.amax(dim=2)
        out = x.new_full((x.shape[0], length + 1, x.shape[2]), neutral)
        return out.scatter_reduce(1, self._at(x), x, how)[:, :length]

    def _at(self, x: Tensor) -> Tensor:
        assert self.rank is not None
        return self.rank[..., None].expand(x.shape[0], -1, x.shape[2])


def _ranks(tokens: Layout, factor: int) -> tuple[Tensor, Tensor]:
    """Return the index of each token's window in its row [b, t], by segment and position, and their number [b, 1].

    Padding has the largest index.
    """
    window = tokens.positions // factor
    segments = tokens.segment_ids
    window = window - window.min()
    name = segments * (window.max() + 1) + window
    name = torch.where(real(segments), name, torch.iinfo(name.dtype).max)
    names, order = name.sort(dim=1)
    new = F.pad(names[:, 1:] != names[:, :-1], (1, 0), value=False)
    ranks = new.cumsum(dim=1)
    rank = torch.empty_like(ranks).scatter(1, order, ranks)
    count = torch.where(real(segments), rank + 1, 0).amax(dim=1, keepdim=True)
    return rank, count


class Funnel:
    """One forward pass through the pooling levels of a stack: their layouts, and x moved between them."""

    def __init__(self, pooling: Pooling | None, tokens: Layout, batch: int):
        self.pooling, self.level = pooling, 0
        self.layouts = [tokens]
        self.windows: list[Windows] = []
        self.skip: Tensor | None = None  # output of the first stage
        if pooling is None:
            return
        for _ in pooling.stages[1:]:
            self.windows.append(Windows.of(self.layouts[-1], pooling.factor, batch))
            self.layouts.append(self.windows[-1].layout)

    def to(self, level: int, x: Tensor) -> Tensor:
        """Pool x to the next level, or upsample it to the tokens (level 0)."""
        if level == self.level:
            return x
        assert self.pooling is not None
        if level:
            self.skip = self.skip if self.level else x
            x = self.windows[self.level].pool(x, self.pooling.how)
        else:
            for windows, tokens in zip(reversed(self.windows), reversed(self.layouts[:-1]), strict=True):
                x = windows.spread(x, tokens.positions.shape[1])
            assert self.skip is not None
            x = self.skip + x
        self.level = level
        return x
