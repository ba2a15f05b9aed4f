"""The kernel that an attention layer would run on, without running it."""

import torch

from anyformer.attention.attend import choose
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import Layout, Role, make_layout
from anyformer.attention.lowered import KernelChoice
from anyformer.config import Attention, Pattern, Position
from anyformer.kernels.runtime import Runtime


def explain(
    spec: Attention,
    width: int,
    pattern: Pattern,
    runtime: Runtime,
    batch: int,
    length: int,
    slots: int = 0,
    scheme: Position | None = None,
) -> KernelChoice:
    """Return the kernel of [batch, length] new tokens in eager execution, and the reason.

    With `slots`, they read a KV cache of that size. Training on short rows that is compiled whole uses `short`.

    Gradients are assumed if and only if the runtime is training.
    """
    meta, needs = torch.device("meta"), Requirements.of(spec, width)
    role: Role = "cached" if slots else "self"
    if slots:
        q, k = (Layout(x, x) for x in (torch.empty(batch, n, dtype=torch.long, device=meta) for n in (length, slots)))
        needs = needs.absorbed() if needs.absorbs(length) else needs
    else:
        q = k = make_layout(batch, length, meta)
    with torch.set_grad_enabled(runtime.training):
        return choose("auto", pattern, q, k, role, scheme or Position.none(), needs, runtime)
