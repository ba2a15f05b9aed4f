"""Cross-entropy of hidden states and an output table: the reference, and a fused version for GPUs.

The reference stores logits [n, v] and reads them several times: most of the memory of a step, and much of its time. The
fused version computes logits for some rows at a time. One kernel writes the loss of each row and replaces the logits by
their gradient, and both matmuls that need the gradient follow at once. Only tensors as large as the inputs are kept.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.conventions import IGNORE
from anyformer.kernels.runtime import HALF, HAS_TRITON, Runtime

MAX_LOGIT_BYTES = 2**33  # bytes of logits at a time


def token_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of logits [b, t, v] summed over labels [b, t] that are not ignored, in fp32."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )


def can_fuse_loss(x: Tensor) -> bool:
    """Return whether `fused_head_loss` can run: on CUDA, in half precision, with gradients."""
    at = Runtime.of(x, training=True)
    return at.device == "cuda" and at.dtype in HALF and torch.is_grad_enabled() and HAS_TRITON


def fused_head_loss(x: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float) -> Tensor:
    """`token_loss(x tableᵀ + bias, labels)` of x [n, d], table [v, d], bias [v] and labels [n]."""
    dtype = Runtime.of(x, training=True).dtype
    loss: Tensor = _fused_head_loss(
        x.to(dtype), table.to(dtype), None if bias is None else bias.to(dtype), labels, smoothing
    )[0]
    return loss


@torch.library.custom_op("anyformer::fused_head_loss", mutates_args=())
def _fused_head_loss(
    x: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss and its gradients with respect to x, table and bias."""
    n, v = len(x), len(table)
    parts = max(1, -(-n * v * x.element_size() // MAX_LOGIT_BYTES))
    losses = torch.empty(n, dtype=torch.float32, device=x.device)
    dx, slopes = torch.empty_like(x), list[Tensor]()
    db = torch.zeros(v, dtype=torch.float32, device=x.device)
    for xs, wanted, found, dxs in zip(*(a.chunk(parts) for a in (x, labels, losses, dx)), strict=True):
        logits = F.linear(xs, table, bias)
        _descend(logits, wanted, found, smoothing)  # logits are their gradient from here on
        torch.mm(logits, table, out=dxs)
        slopes.append(logits.T @ xs)
        if bias is not None:
            db += logits.sum(0, dtype=torch.float32)
        del logits  # or they would stay until the next are made
    dw = slopes[0] if parts == 1 else torch.stack([slope.float() for slope in slopes]).sum(0).to(table.dtype)
    return losses.sum(), dx, dw, db


@_fused_head_loss.register_fake
def _(x: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float) -> tuple[Tensor, ...]:
    loss, slopes = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in ((), (len(table),)))
    return loss, torch.empty_like(x), torch.empty_like(table), slopes


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.biased = inputs[2] is not None
    ctx.dtype = inputs[0].dtype


def _back(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw, db = ctx.saved_tensors
    return dx * slope, dw * slope, (db * slope).to(ctx.dtype) if ctx.biased else None, None, None


_fused_head_loss.register_autograd(_back, setup_context=_keep)


def _descend(logits: Tensor, labels: Tensor, losses: Tensor, smoothing: float) -> None:
    """Write the loss of each row, and replace the logits [n, v] by the gradient of the summed loss."""
    from anyformer.kernels.triton_kernels import descend

    descend[(len(logits),)](
        logits, labels, losses, logits.stride(0), logits.shape[1], smoothing,
        SMOOTH=smoothing > 0, DEEP=4, WIDE=2048, num_warps=8,
    )  # fmt: skip
