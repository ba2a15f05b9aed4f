"""Peak training speed: FLOPs per token, and tokens per second at the peak of the hardware."""

import torch

from anyformer.config import ModelConfig
from anyformer.data.batch import Batch
from anyformer.kernels.hardware import peak_flops
from anyformer.nn.inspection.count import count


def flops_per_token(config: ModelConfig, batch: Batch) -> float:
    """Return the FLOPs of a training step per token, for rows as long as a batch's: 3 × those of a forward pass."""
    length, source_length = batch.ids.shape[1], None if batch.source is None else batch.source.shape[1]
    return 3 * count(config, length, source_length=source_length).flops / (length + (source_length or 0))


def peak_tokens_per_second(config: ModelConfig, batch: Batch, device: torch.device, precision: str) -> float | None:
    """Return the tokens per second at which the MFU would be 1; None if the peak of the GPU is unknown.

    With fp8 it is the peak of bf16, in which some matmuls remain.
    """
    precision = "bf16" if precision == "fp8" else precision
    peak = peak_flops(torch.cuda.get_device_name(device), str(device), precision)
    return None if peak is None else peak / flops_per_token(config, batch)
