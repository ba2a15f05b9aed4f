"""Rotary positions of GGUF files: metadata `rope.*`, and Llama 3's factors, which are a tensor."""

import math
from typing import Any

import torch
from torch import Tensor

from anyformer.config import ConfigError
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.gguf_file import GgufFile
from anyformer.interop.weight_files import wrong

FACTORS = "rope_freqs.weight"  # k/2 divisors of the frequencies
TENSORS = (FACTORS,)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # as published


def read(fields: Fields, config: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json about rotary positions and the width of heads."""
    heads = config.get("num_attention_heads", 1)
    width = config.get("head_dim") or config.get("hidden_size", heads) // heads
    if not width:
        what = f"= {heads}: must be at most embedding_length = {config.get('hidden_size')}"
        raise ConfigError([fields.fault("attention.head_count", what)])
    fields.must("attention.value_length", width)
    theta, rotated = fields("rope.freq_base", 10_000.0), fields("rope.dimension_count", width)
    found = {"rope_theta": theta, **_scaling(fields)}
    if rotated != width:  # a family that rotates whole heads refuses it
        found["partial_rotary_factor"] = rotated / width
    if (factors := file.tensors.get(FACTORS)) is not None:
        found |= _llama3(factors.read(), theta, width, file)
    return {"head_dim": width, "rope_parameters": found}


def write(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata about rotary positions and the width of heads; Llama 3's factors are in `factors`."""
    width, rope = config["head_dim"], config["rope_parameters"]
    rotated = int(width * rope.get("partial_rotary_factor", 1.0))
    found = {"attention.value_length": width, "rope.dimension_count": rotated, "rope.freq_base": rope["rope_theta"]}
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def factors(config: dict[str, Any]) -> Tensor | None:
    """Return Llama 3's factors, if a config.json has its scaling."""
    rope = config.get("rope_parameters", {})
    return llama3_factors(rope, rope["rope_theta"], config["head_dim"]) if rope.get("rope_type") == "llama3" else None


def _scaling(fields: Fields) -> dict[str, Any]:
    kind, old = fields("rope.scaling.type", "linear"), fields("rope.scale_linear", 0.0)
    factor = fields("rope.scaling.factor", old) or 1.0  # 0 means none
    fields.silent("rope.scaling.finetuned")
    if kind == "none" or (kind == "linear" and factor == 1):
        fields.silent("rope.scaling.original_context_length")
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = fields.maybe("rope.scaling.original_context_length", int)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    fields.refuse("rope.scaling.type", f"= {shown(kind)}: must be none, linear or yarn")
    return {}


def _llama3(factors: Tensor, theta: float, width: int, file: GgufFile) -> dict[str, Any]:
    """Return the scaling that has these factors, if it is one of the published ones."""
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 3), **LLAMA3}
    fits = factors.shape == (-(-width // 2),)
    if not fits or not torch.allclose(factors.float(), llama3_factors(scaling, theta, width), rtol=1e-4):
        raise wrong(file.path, f"{FACTORS}: these factors are not those of a published Llama 3 model")
    return scaling


def llama3_factors(scaling: dict[str, Any], theta: float, width: int) -> Tensor:
    """Return the divisors of the frequencies, [k/2]: 1 for fast waves, `factor` for slow ones, between them both."""
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / (keep + (1 - keep) / scaling["factor"])).float()
