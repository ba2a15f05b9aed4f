"""Vocabularies split among processes: embedding, output table and loss. No process has the logits of all tokens."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from anyformer.kernels.conventions import IGNORE
from anyformer.nn.heads import LossTarget, VocabularyHead
from anyformer.nn.inputs import TokenInput
from anyformer.training.ranks.collectives import enter, gather, largest, leave, local, span


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
