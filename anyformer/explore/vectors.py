"""Numbers of the views `stage` and `follow` as plain values."""

from base64 import b64encode

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.nn.norm import OverBatch, RootMeanSquare, ScaledTanh

MAX_MASK_SIDE = 48


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
    """Return a mask [t, s] as bytes in base64, pooled to at most 48 × 48, and its size."""
    size = min(visible.shape[0], MAX_MASK_SIDE), min(visible.shape[1], MAX_MASK_SIDE)
    small = (F.adaptive_avg_pool2d(visible.float()[None], size)[0] * 255).round().to(torch.uint8)
    return b64encode(small.contiguous().numpy().tobytes()).decode(), list(size)
