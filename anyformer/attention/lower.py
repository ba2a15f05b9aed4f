"""Lowering: from a pattern and two layouts to the mask that the chosen kernel takes, once per forward pass."""

from typing import assert_never

import torch
from torch import Tensor

from anyformer.attention.choose import Requirements, choose, sees_whole_rows, without_mask
from anyformer.attention.flex import lower_blocks
from anyformer.attention.layout import Layout, Role, sees
from anyformer.attention.lowered import Dense, FewQueries, Lowered, Relation
from anyformer.attention.position_module import Positions
from anyformer.attention.short_rows import lower_short_rows
from anyformer.attention.varlen import lower_documents
from anyformer.config import Pattern
from anyformer.kernels.runtime import Runtime


def lower(
    pattern: Pattern,
    q: Layout,
    k: Layout,
    role: Role,
    positions: Positions,
    needs: Requirements,
    runtime: Runtime,
    backend: str,
) -> Relation:
    """Choose a kernel and lower a pattern between two layouts for it."""
    choice = choose(backend, pattern, q, k, role, positions.scheme, needs, runtime)

    def bias() -> Tensor | None:
        return positions.bias(q.positions, k.positions, not pattern.looks_ahead) if positions.biases else None

    def dense() -> Dense:
        form = lower_dense(pattern, q, k, role, bias())
        # torch would convert a boolean mask in every layer; a part of a row would also save each large copy
        if form.mask is None or not (role == "part" or (choice.kernel == "sdpa" and runtime.device == "cpu")):
            return form
        return form._replace(mask=None, bias=torch.where(form.mask, 0.0, -torch.inf).to(runtime.dtype))

    lowered: Lowered
    match choice.kernel:
        case "flex":
            levels = positions.levels(not pattern.looks_ahead, q.positions.device)
            lowered = lower_blocks(pattern, q, k, dense, positions.scheme, levels)
        case "short":
            lowered = lower_short_rows(pattern, q, k, dense)
        case "varlen":
            lowered = lower_documents(pattern, q, k, dense)
        case "decode":
            pages = k.pages if needs.latent is None else None
            if pages is not None and sees_whole_rows(pattern, q, k, positions.scheme):
                lowered = FewQueries(pages=pages)
            else:
                origins = k.origins if needs.latent is None else None
                lowered = lower_few(pattern, q, k, role, bias())._replace(pages=pages, origins=origins)
        case "eager":
            lowered = dense()._replace(kernel="eager")
        case "sdpa":
            lowered = dense()
        case _:
            assert_never(choice.kernel)
    few = isinstance(lowered, FewQueries) and (lowered.pages is not None or lowered.origins is not None)
    relative = positions.relative(q.positions, k.positions) if positions.relates else None
    return Relation(lowered, choice, positions.scheme, relative=relative, reads_in_place=few)


def lower_dense(pattern: Pattern, q: Layout, k: Layout, role: Role, bias: Tensor | None = None) -> Dense:
    """Lower a pattern between two layouts to a mask, to a bias, or to neither if no mask is needed."""
    if bias is None and (maskless := without_mask(pattern, q, k, role)) is not None:
        return maskless
    mask, has_key = sees(pattern, q, k)[:, None], None
    if role == "cross" or not pattern.sees_self:  # a query may be fully masked: let it see all keys, zero it afterwards
        has_key = mask.any(dim=-1, keepdim=True)
        mask = mask | ~has_key
    if bias is not None:
        return Dense(bias=bias.masked_fill(~mask, -torch.inf), has_key=has_key)
    return Dense(mask=mask, has_key=has_key)


def lower_few(pattern: Pattern, q: Layout, k: Layout, role: Role, bias: Tensor | None = None) -> FewQueries:
    """Do the same for the kernel of few queries, which needs no care for fully masked ones."""
    if bias is None and without_mask(pattern, q, k, role) is not None:
        return FewQueries()
    mask = sees(pattern, q, k)[:, None]
    return FewQueries(mask) if bias is None else FewQueries(bias=bias.masked_fill(~mask, -torch.inf))
