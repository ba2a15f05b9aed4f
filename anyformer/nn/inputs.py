"""Inputs: from ids to vectors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.config import FactorisedTable, Tokens, factor
from anyformer.nn.norm import build_norm


class TokenInput(nn.Module):
    """Lookup, scale, positions, types, norm, dropout. The table may be another's (tying), so `forward` is given it."""

    def __init__(self, spec: Tokens, width: int, own_table: bool):
        super().__init__()
        e, self.inner_width = spec.table_width(width), spec.inner_width(width)
        self.vocab, self.pad = spec.rows, spec.pad
        self.table = nn.Embedding(spec.rows, e, padding_idx=spec.pad) if own_table else None
        self.types = nn.Embedding(spec.types, self.inner_width) if spec.types else None
        table = spec.table if isinstance(spec.table, FactorisedTable) else None
        self.project = nn.Linear(e, width, table.bias) if table else None
        self.early = table is not None and table.project == "before_position"
        self.norm = build_norm(spec.norm, self.inner_width)
        self.dropout = nn.Dropout(spec.dropout)
        self.scale = factor(spec.scale, width)

    def forward(
        self, ids: Tensor, table: Tensor, embed: Callable[[Tensor], Tensor], types: Tensor | None = None
    ) -> Tensor:
        """[b, t] ids to [b, t, d]; `embed` adds the positions."""
        if types is not None and self.types is None:
            raise ValueError("this model has no token types: leave `types` out")
        x = F.embedding(ids, table, padding_idx=self.pad) * self.scale
        if self.project is not None and self.early:
            x = self.project(x)
        x = embed(x)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        x = self.dropout(self.norm(x))
        return x if self.project is None or self.early else self.project(x)
