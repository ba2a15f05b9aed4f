"""GGUF files written by the package `gguf`, under its own names of tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor, nn

Tensors = Mapping[str, tuple[np.ndarray, Any]]
F32 = gguf.GGMLQuantizationType.F32
KINDS = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
TOKENS = ["<unk>", "<s>", "</s>", "<pad>", "Ġ", *map(chr, range(ord("!"), ord("~") + 1)), "ab", "Ġa", "cab"]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3, 3, *[1] * (len(TOKENS) - 4)],
    "tokenizer.ggml.merges": ["a b", "Ġ a", "c ab"],
    **{f"tokenizer.ggml.{role}_token_id": i for i, role in enumerate(("unknown", "bos", "eos", "padding"))},
}


def write(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    """Write a file; a tensor is its values or bytes, and their type."""
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        kind = KINDS.get(type(value)) or gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def named(model: nn.Module, architecture: str, depth: int) -> dict[str, Tensor]:
    """Return the weights of a model of `transformers` by their names in a GGUF file."""
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, depth)
    found = {names.get_name(name, (".weight", ".bias")): x.detach() for name, x in model.state_dict().items()}
    return {str(name): x for name, x in found.items()}


def as_f32(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: (np.ascontiguousarray(x.float().numpy()), F32) for name, x in tensors.items()}
