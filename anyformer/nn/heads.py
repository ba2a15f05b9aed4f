"""Heads: from hidden states to logits, labels or vectors.

Each is called with the hidden states, their layout, and the embedding table. Only a tied head uses the table; it is
None if the input is not tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.layout import Layout, real
from anyformer.config import Embedder, Input, MultiToken, Pool
from anyformer.kernels.conventions import IGNORE, PADDING
from anyformer.kernels.cross_entropy import token_loss
from anyformer.nn.linear import WeightFormat

MAX_LOGITS = 2**26  # at a time, where no gradient needs all of them


class LossTarget(NamedTuple):
    """Loss targets: labels [b, t], -100 = ignored; with `at` (flat indices [n] into b·t) labels are [1, n]."""

    labels: Tensor
    smoothing: float = 0.0
    at: Tensor | None = None

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the vectors of x [b, t, d] that have a label, [b, t, d] or [1, n, d]."""
        return x if self.at is None else x.flatten(0, 1)[None, self.at]


class DenseTransform(nn.Module):
    """norm(act(x W + b))."""

    def __init__(self, width: int, to: int, act: Callable[[Tensor], Tensor], norm: nn.Module, bias: bool):
        super().__init__()
        self.linear, self.act, self.norm = nn.Linear(width, to, bias=bias), act, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.linear(x)))


class HiddenHead(nn.Module):
    """The hidden states themselves, [b, t, d]."""

    def forward(self, x: Tensor, layout: Layout, table: Tensor | None) -> Tensor:
        return x


class FurtherTokens(nn.ModuleList):
    """Hidden states for the tokens after the next one: h + silu(h W_k) for the k-th of them."""

    def __init__(self, spec: MultiToken, width: int):
        super().__init__(nn.Linear(width, width, bias=False) for _ in range(spec.tokens))
        self.weight = spec.weight

    def hidden(self, x: Tensor, count: int | None = None) -> list[Tensor]:
        """Return the hidden states for the first `count` of these tokens; None: all."""
        return [x + F.silu(layer(x)) for layer in list(self)[:count]]


def labels_after(labels: Tensor, segments: Tensor | None, k: int) -> Tensor:
    """Return the labels [b, t] of the tokens k places later; IGNORE where a text ends before."""
    later = F.pad(labels[:, k:], (0, min(k, labels.shape[1])), value=IGNORE)
    if segments is None:
        return later
    same = F.pad(segments[:, k:], (0, min(k, segments.shape[1])), value=PADDING) == segments
    return torch.where(same, later, IGNORE)


class VocabularyHead(nn.Module):
    """Logits over the vocabulary, [b, t, v], by a separate table, the input's (tied), or that of a weight format."""

    def __init__(
        self,
        transform: nn.Module,
        width: int,
        read: Input,
        *,
        tied: bool,
        bias: bool,
        scale: float = 1.0,
        cap: float | None = None,
        further: FurtherTokens | None = None,
    ):
        super().__init__()
        self.further = further
        self.transform, self.scale, self.cap = transform, scale, cap
        self.pad, self.vocab = read.padding, read.rows
        self.table = None if tied else nn.Parameter(torch.empty(read.rows, width))
        self.bias = nn.Parameter(torch.empty(read.rows)) if bias else None
        self.format: WeightFormat | None = None  # None: plain

    def forward(self, x: Tensor, layout: Layout, table: Tensor | None) -> Tensor:
        return self._logits(self._hidden(x), table)  # [b, t, d] -> [b, t, v]

    def loss(self, x: Tensor, table: Tensor | None, target: LossTarget) -> Tensor:
        """Return the cross-entropy summed over the labels that are not ignored."""
        x = self._hidden(target.rows_of(x))  # [b, t, d] or [1, n, d]
        if torch.is_grad_enabled():
            return token_loss(self._logits(x, table), target.labels, target.smoothing)
        return self._loss_in_chunks(x, table, target)

    def _loss_in_chunks(self, x: Tensor, table: Tensor | None, target: LossTarget) -> Tensor:
        """Return the loss without storing the logits of all tokens: no gradient needs them."""
        rows = max(1, MAX_LOGITS // self.vocab)
        parts = zip(x.flatten(0, 1).split(rows), target.labels.flatten().split(rows), strict=True)
        losses = [token_loss(self._logits(some[None], table), labels[None], target.smoothing) for some, labels in parts]
        return torch.stack(losses).sum()

    def training_loss(self, x: Tensor, table: Tensor | None, target: LossTarget, layout: Layout) -> Tensor:
        """Return the loss, in training with that of further tokens."""
        loss = self.loss(x, table, target)
        if self.further is None or not self.training:
            return loss
        labels, share = _all_labels(target, x), self.further.weight / len(self.further)
        for k, hidden in enumerate(self.further.hidden(x), 1):
            later = LossTarget(labels_after(labels, layout.segments, k), target.smoothing)
            loss = loss + share * self.loss(hidden, table, later)
        return loss

    def further_logits(self, x: Tensor, table: Tensor | None, count: int | None = None) -> Tensor:
        """Return the logits of `count` tokens after the next one [b, k, v], from the hidden states of one [b, 1, d].

        None: of all tokens that the head has layers for.
        """
        assert self.further is not None
        return self._logits(self._hidden(torch.cat(self.further.hidden(x, count), dim=1)), table)

    def _hidden(self, x: Tensor) -> Tensor:
        """Return the hidden states that the table is multiplied with."""
        x = self.transform(x)
        return x * self.scale if self.scale != 1 else x

    def _weight(self, table: Tensor | None) -> Tensor:
        """Return the plain table, of this head or of the input."""
        if self.table is not None:
            return self.table
        assert table is not None
        if self.pad is not None and torch.is_grad_enabled():
            # the pad row of the input's table stays zero, so it has no gradient
            rows = torch.arange(table.shape[0], device=table.device)[:, None]
            table = torch.where(rows == self.pad, table.detach(), table)
        return table

    def _logits(self, x: Tensor, table: Tensor | None) -> Tensor:
        if self.format is None:
            logits = F.linear(x, self._weight(table), self.bias)
        else:
            logits = self.format.matmul(x, None, self.bias)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def _all_labels(target: LossTarget, x: Tensor) -> Tensor:
    """Return the labels of all tokens [b, t] of hidden states [b, t, d]."""
    if target.at is None:
        return target.labels
    b, t = x.shape[:2]
    given = target.labels.flatten()
    labels = given.new_full((b * t + 1,), IGNORE)  # the last one is for positions that fill up `at`
    labels = labels.scatter(0, torch.where(given == IGNORE, b * t, target.at), given)
    return labels[:-1].view(b, t)


class TokenHead(nn.Module):
    """Label logits for each token, [b, t, labels]; with a CRF its potentials, [b, t, labels + 1, labels]."""

    def __init__(self, transform: nn.Module, width: int, labels: int, dropout: float, crf: bool):
        super().__init__()
        self.transform, self.dropout, self.linear = transform, nn.Dropout(dropout), nn.Linear(width, labels)
        self.transitions = nn.Parameter(torch.empty(labels + 1, labels)) if crf else None

    def reset(self) -> None:
        if self.transitions is not None:
            self.transitions.zero_()

    def forward(self, x: Tensor, layout: Layout, table: Tensor | None) -> Tensor:
        logits = self.linear(self.dropout(self.transform(x)))
        if self.transitions is None:
            return logits
        if layout.whole is not None:  # a CRF scores whole rows
            logits = layout.whole.gather(logits, 1)
        return logits[..., None, :] + self.transitions


class SpanHead(nn.Module):
    """Logits of each token as the first and as the last of a span, [b, t, 2]; those of padding are the least number.

    So a softmax over the tokens of a row is one over its real tokens.
    """

    def __init__(self, transform: nn.Module, width: int, dropout: float):
        super().__init__()
        self.transform, self.dropout, self.linear = transform, nn.Dropout(dropout), nn.Linear(width, 2)

    def forward(self, x: Tensor, layout: Layout, table: Tensor | None) -> Tensor:
        logits = self.linear(self.dropout(self.transform(x)))
        if layout.whole is not None:  # the softmax is over whole rows
            logits, layout = layout.whole.gather(logits, 1), layout.whole.layout
        if layout.segments is None:
            return logits
        return logits.masked_fill(~real(layout.segments)[..., None], torch.finfo(logits.dtype).min)


class PooledHead(nn.Module):
    """One vector per row through a transform and a last layer: [b, labels]."""

    def __init__(self, how: Pool, transform: nn.Module, last: nn.Module):
        super().__init__()
        self.how: Pool = how
        self.transform, self.last = transform, last

    def forward(self, x: Tensor, layout: Layout, table: Tensor | None) -> Tensor:
        return self.last(self.transform(pool(x, layout, self.how)))


class EmbeddingHead(PooledHead):
    """A vector [b, d] per row, after further layers and a projection."""

    def __init__(self, spec: Embedder, width: int):
        last = LearnedLength() if spec.learned_scale else UnitLength() if spec.normalize else nn.Identity()
        super().__init__(spec.pool, spec.transform.build(width, width), last)
        widths = [width, *(layer.width for layer in spec.layers)]
        self.layers = nn.Sequential(
            *(
                DenseTransform(d, layer.width, layer.activation.function(), nn.Identity(), layer.bias)
                for d, layer in zip(widths, spec.layers, strict=False)
            )
        )
        self.project = nn.Linear(widths[-1], spec.projection, bias=False) if spec.projection else nn.Identity()

    def forward(self, x: Tensor, layout: Layout, table: Tensor | None) -> Tensor:
        return self.last(self.project(self.layers(self.transform(pool(x, layout, self.how)))))


class UnitLength(nn.Module):
    """x / |x|."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class LearnedLength(nn.Module):
    """exp(s / 2) x / |x|, so that x · y = exp(s) cos(x, y). In training exp(s) is at most 100, as in CLIP."""

    MAX, START = math.log(100), math.log(1 / 0.07)

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.empty(()))

    def reset(self) -> None:
        self.log_scale.fill_(self.START)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.log_scale.clamp(max=self.MAX) if self.training else self.log_scale
        return F.normalize(x, dim=-1) * (scale / 2).exp()  # [b, d]


def pool(x: Tensor, layout: Layout, how: Pool) -> Tensor:
    """Pool [b, t, d] to [b, d] over all tokens of a row that are not padding; a row of padding only gives zeros."""
    if layout.whole is not None:
        x, layout = layout.whole.gather(x, 1), layout.whole.layout
    b, t = x.shape[:2]
    segments = torch.zeros(b, t, dtype=torch.long, device=x.device) if layout.segments is None else layout.segments
    is_real = real(segments)
    index = torch.arange(t, device=x.device)
    match how:
        case "mean":
            real_x = x.masked_fill(~is_real[..., None], 0)
            return real_x.sum(dim=1) / is_real.to(x.dtype).sum(dim=1, keepdim=True).clamp(min=1)
        case "max":
            pooled = x.masked_fill(~is_real[..., None], -torch.inf).amax(dim=1)
        case "first":
            first = torch.where(is_real, index, t).amin(dim=1)
            pooled = x[torch.arange(b, device=x.device), first.clamp(max=t - 1)]
        case "last":
            pooled = x[torch.arange(b, device=x.device), (is_real * index).amax(dim=1)]
        case _:
            assert_never(how)
    return pooled.masked_fill(~is_real.any(dim=1, keepdim=True), 0)
