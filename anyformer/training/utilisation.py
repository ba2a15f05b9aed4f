"""How fast training could be: what a token costs, against what the hardware could do."""

import torch

from anyformer.config import ModelConfig
from anyformer.data.batch import Batch
from anyformer.hardware import peak
from anyformer.inspection.count import count


def flops_per_token(config: ModelConfig, batch: Batch) -> float:
    """Of a training step, in rows as long as a batch's: a forward pass, and twice that for the backward pass."""
    length, source_length = batch.ids.shape[1], None if batch.source is None else batch.source.shape[1]
    return 3 * count(config, length, source_length=source_length).flops / (length + (source_length or 0))


def ceiling(config: ModelConfig, batch: Batch, device: torch.device, precision: str) -> float | None:
    """Tokens a second if a GPU did nothing but the products that the model is made of; None where it is not known. With
    fp8, if all were in bf16, as some are."""
    precision = "bf16" if precision == "fp8" else precision
    most = peak(torch.cuda.get_device_name(device), str(device), precision)
    return None if most is None else most / flops_per_token(config, batch)
