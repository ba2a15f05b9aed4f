"""The modules of a model, split among the processes of a group: each class replaces that of a built module.

Attention has whole heads, a feed-forward a part of its hidden layer, a mixture some of the experts (Shoeybi et al.
2019), and an embedding or output table a part of the vocabulary: no process has the logits of all tokens. Everything
else computes the same values in all processes. A subclass reads its part of the parameters (`local`), and exchanges
activations where a region of split weights begins and ends (`collectives.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from anyformer.attention.lowered import Lowered
from anyformer.attention.position_module import Positions
from anyformer.attention.scores import Scoring
from anyformer.config import Position
from anyformer.kernels.conventions import IGNORE
from anyformer.kernels.dropout import Dropout
from anyformer.kernels.expert_matmul import ExpertRows, expert_matmul
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.attention_variants.cross import CrossAttention
from anyformer.nn.attention_variants.disentangled import DisentangledAttention
from anyformer.nn.attention_variants.global_tokens import GlobalTokenAttention
from anyformer.nn.attention_variants.latent import LatentAttention
from anyformer.nn.experts import ExpertMixture, StackedLinear
from anyformer.nn.heads import LossTarget, VocabularyHead
from anyformer.nn.inputs import TokenInput
from anyformer.nn.linear import Linear
from anyformer.nn.lora import LowRank
from anyformer.training.ranks.collectives import enter, gather, largest, leave, local, own_generator, span

# -- linear layers ----------------------------------------------------------------------------------------------------


class SplitLinear(Linear):
    """A linear layer of which each process has a part."""

    mesh: DeviceMesh

    @property
    def own(self) -> tuple[Tensor, Tensor | None]:
        """This process's weight and bias."""
        assert self.weight is not None
        return local(self.weight), None if self.bias is None else local(self.bias)


class ColumnLinear(SplitLinear):
    """A part of the outputs from the whole input; of several parts of a fused layer, a piece of each."""

    enters: bool  # False: the input has entered the region already
    order: Tensor | None  # row i of the split weight is row order[i] of the weight; None: of one part, row i

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.mesh) if self.enters else x
        y = F.linear(x, *self.own)
        return y if self.lora is None else y + self.lora(x)


class RowLinear(SplitLinear):
    """All outputs, as a sum over the processes, each of which has a part of the input."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.own
        y = leave(F.linear(x, weight), self.mesh)
        y = y if bias is None else y + bias
        return y if self.lora is None else y + self.lora(x)


class ColumnLowRank(LowRank):
    """The adapter of a `ColumnLinear`: all of A, and its rows of B."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(self.dropout(x), self.a) * self.scale, local(self.b))


class RowLowRank(LowRank):
    """The adapter of a `RowLinear`: its columns of A, and all of B."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(leave(F.linear(self.dropout(x), local(self.a)), self.mesh) * self.scale, self.b)


class LatentDown(Linear):
    """The compression of latent attention, computed by all processes: where the region of split heads begins."""

    mesh: DeviceMesh
    queries: int | None  # width of the queries of all heads, if the first part is these; None: it is compressed

    def split(self, x: Tensor, direct: bool = False) -> tuple[Tensor, ...]:
        first, *rest = enter(self(x), self.mesh).split(self.parts, dim=-1)
        return (first if self.queries is None else first[..., span(self.queries, self.mesh)], *rest)


class SplitDropout(Dropout):
    """Dropout of activations of which each process has a part."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x
        with own_generator(x, self.mesh):
            return super().forward(x)


# -- attention --------------------------------------------------------------------------------------------------------


class SplitAttention(MultiHeadAttention):
    """Some of the heads, with the key/value heads that serve them."""

    mesh: DeviceMesh

    @property
    def scoring(self) -> Scoring:
        # not by `super()`: torch.compile cannot trace a property of a base class
        sinks, dropout = None if self.sinks is None else local(self.sinks), self.dropout if self.training else 0.0
        return Scoring(self.scale, self.normalizer, self.cap, sinks, dropout)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lowered: Lowered, scoring: Scoring) -> Tensor:
        if not (self.training and self.dropout):
            return super().attend(q, k, v, lowered, scoring)
        with own_generator(q, self.mesh):
            return super().attend(q, k, v, lowered, scoring)


class SplitCrossAttention(SplitAttention, CrossAttention):
    """Some of the heads that read the encoder's output."""


class SplitLatentAttention(SplitAttention, LatentAttention):
    """Some of the heads that read compressed vectors."""


class SplitDisentangledAttention(SplitAttention, DisentangledAttention):
    """Some of the heads, with their scores between content and distance. The vectors of distances are whole."""


class SplitGlobalTokenAttention(SplitAttention, GlobalTokenAttention):
    """Some of the heads, with both of their projections."""


class GatherHeads(nn.Module):
    """The outputs of all heads, for attention without an output projection."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return gather(x, self.mesh)


class SplitPositions(Positions):
    """A scheme whose biases are those of this process's heads. Its tables are whole."""

    mesh: DeviceMesh

    def levels(self, causal: bool, device: torch.device) -> Tensor | None:
        levels = super().levels(causal, device)  # [..., h]
        return None if levels is None else levels[..., span(self.heads, self.mesh)]

    def bias(self, q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
        if type(self.scheme).bias is not Position.bias:
            bias = super().bias(q, k, causal)
            return None if bias is None else bias[:, span(self.heads, self.mesh)]
        levels = self.levels(causal, q.device)
        if levels is None:
            return None
        head = torch.arange(levels.shape[-1], device=q.device)[:, None, None]
        return self.scheme.score(levels, head, q[:, None, :, None], k[:, None, None, :])


# -- experts ----------------------------------------------------------------------------------------------------------


class SplitStackedLinear(StackedLinear):
    """The linear layers of some experts."""

    def forward(self, x: Tensor, rows: ExpertRows) -> tuple[Tensor, ...]:
        x = self.cast(x)
        y = expert_matmul(x, local(self.rows()).to(x.dtype), rows)
        if self.bias is not None:
            y = y + local(self.bias)[rows.experts].to(y.dtype)
        return y.split(self.parts, dim=-1)


class SplitMixture(ExpertMixture):
    """Some of the experts. All processes route all tokens, and each computes what its experts read."""

    mesh: DeviceMesh

    def combine(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        own = super().combine(enter(rows, self.mesh), experts, enter(weights, self.mesh))
        return leave(own, self.mesh)

    def read(self, rows: Tensor, experts: Tensor) -> Tensor:
        number = experts - span(self.up.count * self.mesh.size(), self.mesh).start
        at = ((number >= 0) & (number < self.up.count)).nonzero()[:, 0]
        y = super().read(rows.index_select(0, at), number[at])
        return y.new_zeros(len(rows), y.shape[1]).index_copy(0, at, y)


class SplitTokenInput(TokenInput):
    """The embedding of a part of the vocabulary: a token of another part is zero here, and the sum is its vector."""

    mesh: DeviceMesh

    def look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        rows = span(self.vocab, self.mesh)
        own = (ids >= rows.start) & (ids < rows.stop)
        pad = None if self.pad is None or not rows.start <= self.pad < rows.stop else self.pad - rows.start
        x = F.embedding(torch.where(own, ids - rows.start, 0), local(table), padding_idx=pad)
        return leave(x.masked_fill(~own[..., None], 0), self.mesh)


class SplitVocabularyHead(VocabularyHead):
    """Logits and loss over a part of the vocabulary."""

    mesh: DeviceMesh
    vocab: int

    def loss(self, x: Tensor, table: Tensor | None, target: LossTarget) -> Tensor:
        x = self._hidden(target.rows_of(x))
        logits, labels = self._own_logits(x, table).flatten(0, 1).float(), target.labels.flatten()
        return split_token_loss(logits, labels, target.smoothing, self.vocab, self.mesh)

    def _logits(self, x: Tensor, table: Tensor | None) -> Tensor:
        return gather(self._own_logits(x, table), self.mesh)

    def _own_logits(self, x: Tensor, table: Tensor | None) -> Tensor:
        """Return the logits of this process's part of the vocabulary, [b, t, v/n]."""
        bias = None if self.bias is None else local(self.bias)
        logits = F.linear(enter(x, self.mesh), self._weight(table), bias)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def _weight(self, table: Tensor | None) -> Tensor:
        if self.table is not None:
            return local(self.table)
        assert table is not None
        own = local(table)
        if self.pad is None or not torch.is_grad_enabled():
            return own
        rows = torch.arange(self.vocab, device=own.device)[span(self.vocab, self.mesh), None]
        return torch.where(rows == self.pad, own.detach(), own)


def split_token_loss(logits: Tensor, labels: Tensor, smoothing: float, vocab: int, mesh: DeviceMesh) -> Tensor:
    """Return `token_loss` of logits [n, v] of which each process of a group has [n, v/group].

    log Σ exp z, the logit of the label, and for label smoothing the sum of all logits are sums over the group.
    """
    rows = span(vocab, mesh)
    counted = labels != IGNORE
    own = (labels >= rows.start) & (labels < rows.stop)
    top = largest(logits.amax(dim=-1), mesh)
    exponentials = (logits - top[:, None]).exp().sum(dim=-1)
    at_label = logits.gather(1, torch.where(own, labels - rows.start, 0)[:, None])[:, 0] * own
    parts = [exponentials, at_label, logits.sum(dim=-1)] if smoothing else [exponentials, at_label]
    total, at_label, *sums = leave(torch.stack(parts), mesh)
    log_total = total.log() + top
    loss = log_total - at_label
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (log_total - sums[0] / vocab)
    return torch.where(counted, loss, 0).sum()


def become(module: nn.Module, cls: type[nn.Module], **attributes: Any) -> None:
    """Give a built module a subclass of its class, as FSDP2 does; names and parameters stay."""
    assert issubclass(cls, type(module)), f"{cls.__name__} is no {type(module).__name__}"
    module.__class__ = cls
    for name, value in attributes.items():
        setattr(module, name, value)
