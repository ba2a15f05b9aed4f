"""The steps around a one-row matmul that its kernels include, one by one."""

from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.matmul import RowFusion


def apart(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: RowFusion) -> Tensor:
    """Return residual + gate(rms_norm(x) Wᵀ + b) in the precision of x."""
    if fusion.norm is not None:
        x = F.rms_norm(x, x.shape[-1:], fusion.norm.to(x.dtype), fusion.eps)
    y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if fusion.gated:
        gate, other = y.chunk(2, dim=-1)
        y = F.silu(gate) * other
    return y if fusion.residual is None else y + fusion.residual.to(x.dtype)
