"""KERPLE, logarithmic form (Chi et al. 2022): scores minus r₁ log(1 + r₂ |q - k|), two learned numbers per head."""

from typing import Literal

import torch

from anyformer.config import Position


class Kerple(Position):
    """Scores minus r₁ log(1 + r₂ |q - k|), with learned r₁ and r₂ for each head (KERPLE, Chi et al. 2022)."""

    kind: Literal["kerple"] = "kerple"

    def tables(self, width, heads):
        return {"logs": (2, heads)}  # r = exp(log) stays positive

    def fill(self, name, table, std):
        table.zero_()

    def levels(self, heads, causal, tables, device):
        return tables["logs"].exp()

    def score(self, levels, head, q, k):
        return -levels[0, head] * torch.log1p(levels[1, head] * (q - k).abs())
