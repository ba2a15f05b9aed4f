"""Numbers of views as plain values."""

import math
from base64 import b64encode

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.nn.norm import OverBatch, RootMeanSquare, ScaledTanh

MAX_MAP_SIDE = 48  # queries and keys of a small map


def rounded(x: Tensor) -> list[float]:
    """Return a vector to seven significant digits; -inf as -1e30."""
    return [float(f"{value:.7g}") for value in x.double().clamp(min=-1e30).cpu().tolist()]


def gap(x: Tensor, model: Tensor) -> float:
    """Return the largest difference between recomputed numbers and the model's."""
    return float((x.double().cpu() - model.double().cpu()).abs().max())


def kind_of(norm: nn.Module) -> str | None:
    """Return the kind of a norm; None for no norm."""
    match norm:
        case nn.LayerNorm():
            return "layer"
        case RootMeanSquare():
            return "rms"
        case OverBatch():
            return "batch"
        case ScaledTanh():
            return "tanh"
        case _:
            return None


def pixels(visible: Tensor) -> tuple[str, list[int]]:
    """Return a mask [t, s] as bytes in base64, pooled to a small one, and its size."""
    size = small_size(visible)
    return as_base64((F.adaptive_avg_pool2d(visible.float()[None], size)[0] * 255).round().to(torch.uint8)), list(size)


def small_size(map: Tensor) -> tuple[int, int]:
    """Return the size of a map [..., t, s] that is pooled to at most 48 × 48."""
    return min(map.shape[-2], MAX_MAP_SIDE), min(map.shape[-1], MAX_MAP_SIDE)


def finite(x: Tensor) -> float | None:
    """Return a number, or None for NaN and infinity, which JSON does not have."""
    return float(x) if math.isfinite(float(x)) else None


def as_base64(x: Tensor) -> str:
    """Return the bytes of a tensor, of float32 or of bytes."""
    return b64encode(x.contiguous().numpy().astype("<f4" if x.is_floating_point() else "u1").tobytes()).decode()
