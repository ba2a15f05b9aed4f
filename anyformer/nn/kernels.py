"""Kernels of our own, in Triton, which a torch with CUDA has: imported where they run."""

import triton
import triton.language as tl


@triton.jit
def descend(logits, labels, losses, stride, v, smoothing, BLOCK: tl.constexpr):
    """Of each row its cross-entropy, and over the logits themselves the gradient of the sum.

    A row is read twice, the second time out of the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    here = logits + row * stride
    most = -float("inf")
    share = 0.0
    total = 0.0
    for start in range(0, v, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(here + at, mask=at < v, other=-float("inf")).to(tl.float32)
        high = tl.maximum(most, tl.max(x, 0))
        share = share * tl.exp(most - high) + tl.sum(tl.exp(x - high), 0)
        total += tl.sum(tl.where(at < v, x, 0.0), 0)
        most = high
    asked = label >= 0
    right = tl.load(here + tl.where(asked, label, 0)).to(tl.float32)
    weight = most + tl.log(share)
    loss = weight - (1 - smoothing) * right - smoothing * total / v
    tl.store(losses + row, tl.where(asked, loss, 0.0))
    for start in range(0, v, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(here + at, mask=at < v, other=-float("inf")).to(tl.float32)
        slope = tl.exp(x - weight) - smoothing / v - tl.where(at == label, 1 - smoothing, 0.0)
        tl.store(here + at, tl.where(asked, slope, 0.0).to(logits.dtype.element_ty), mask=at < v)
