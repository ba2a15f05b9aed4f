"""Write runs as GGUF files, for llama.cpp: F32, F16 or Q8_0.

The metadata are those of the config.json of a family, and are read again: a model that llama.cpp would compute in
another way is refused, with the parts that differ. llama.cpp's converter does not replace it: that is a script in no
package, and does not compare what it writes with the model.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anyformer.config import ConfigError, Embedder, Fault, ModelConfig, NoHead
from anyformer.interop import gguf_file, gguf_rope, gguf_vocabulary, sentence_transformers
from anyformer.interop.families import FAMILIES
from anyformer.interop.family import Family, find_family
from anyformer.interop.gguf_architectures import ARCHITECTURES, Architecture
from anyformer.interop.gguf_file import GgufFile, GgufTensor
from anyformer.interop.gguf_import import POOLING, POOLS
from anyformer.interop.hf_folder import read_config
from anyformer.interop.same_model import differences
from anyformer.interop.weight_files import must_be_new
from anyformer.runs.processes import workspace
from anyformer.runs.run import Run, writing

Dtype = Literal["f32", "f16", "q8_0"]
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # llama.cpp's numbers
TOKEN_TYPES = "tokenizer.ggml.token_type_count"
BLOCK = 32  # values of Q8_0 with one scale
PLANNED = Path("the GGUF file")
CHECKED = (gguf_rope.FACTORS, "token_embd.weight", "output.weight")  # tensors whose values are read with the config
ADDED = ("position_embd.weight", "token_types.weight")  # to embeddings: llama.cpp needs them in F32


def to_gguf(run: Run, path: str | Path, *, dtype: Dtype = "f32") -> str:
    """Write a run as a GGUF file, with adapters merged, and return the name of its architecture.

    With f16 and q8_0, vectors and tables of positions stay F32; with q8_0, matrices whose rows are no multiple of 32
    are F16.
    """
    path, run = Path(path), run.merge()
    must_be_new(path, "file")
    gguf_file.require_package()
    by_family = {one.family: one for one in ARCHITECTURES.values()}
    pooling, config = _pooling(run.config)
    family, data = find_family([FAMILIES[name] for name in by_family], config, "GGUF architecture that is written")
    architecture = by_family[family.kind]
    shapes = {name: tuple(x.shape) for name, x in _tensors(architecture, family, data, run, meta=True)}
    about = {"general.type": "model", "general.name": run.folder.name, "general.file_type": FILE_TYPES[dtype]}
    more = {"general.quantization_version": 2} if dtype == "q8_0" else {}
    metadata = architecture.metadata(data)
    if config.shape == "encoder":
        metadata |= {f"{architecture.name}.{POOLING}": pooling, TOKEN_TYPES: data["type_vocab_size"]}
    values = {name: x for name, x in _tensors(architecture, family, data, run) if name in CHECKED}
    _check(architecture, family, config, metadata, {n: _Planned.of(s, values.get(n)) for n, s in shapes.items()})
    metadata |= {**about, **more, **gguf_vocabulary.describe(run)}
    kinds = {name: (_kind(name, shape, dtype), shape) for name, shape in shapes.items()}
    with workspace(path) as temporary, writing(path):
        written = temporary / path.name
        gguf_file.write(written, metadata, kinds, _tensors(architecture, family, data, run))
        os.rename(written, path)
    return architecture.name


def _pooling(config: ModelConfig) -> tuple[int, ModelConfig]:
    """Return the number of a pooling, and the model without it; its vectors are scaled by llama.cpp's own option."""
    if not isinstance(config.head, Embedder) or not sentence_transformers.fits(config):
        return 0, config
    if sentence_transformers.has_layers(config.head):
        raise ConfigError([Fault("head.layers", "or head.projection: are not written to GGUF files")])
    number = next((number for number, pool in POOLS.items() if pool == config.head.pool), None)
    if number is None:
        raise ConfigError([Fault("head.pool", f"= '{config.head.pool}': llama.cpp has {', '.join(POOLS.values())}")])
    return number, config.model_copy(update={"head": NoHead()})


def _tensors(
    architecture: Architecture, family: Family, data: dict[str, Any], run: Run, meta: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under their names in a file, one at a time; with `meta`, without values."""
    if (factors := gguf_rope.factors(data)) is not None:
        yield gguf_rope.FACTORS, factors
    state = {name: x.to("meta") if meta else x for name, x in run.model.state_dict().items()}
    for rule in family.tensor_rules(_pooling(run.config)[1]):
        for public, x in zip(rule.theirs, rule.part(state), strict=True):
            name = architecture.file_name(public)
            (stored,) = architecture.change(name, data).part(x if meta else x.float())
            yield name, stored


def _kind(name: str, shape: tuple[int, ...], dtype: Dtype) -> str:
    if dtype == "f32" or len(shape) == 1 or name in ADDED:
        return "F32"
    return "Q8_0" if dtype == "q8_0" and shape[-1] % BLOCK == 0 else "F16"


@dataclass(frozen=True)
class _Planned(GgufTensor):
    """A tensor that is not written yet."""

    value: Tensor

    @classmethod
    def of(cls, shape: tuple[int, ...], value: Tensor | None) -> "_Planned":
        from gguf import GGMLQuantizationType

        return cls(PLANNED, GGMLQuantizationType.F32, shape, 0, 0, torch.empty(0) if value is None else value)

    def data(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        return gguf_file.encode(self.value, "F32")

    def read(self) -> Tensor:
        return self.value


def _check(
    architecture: Architecture,
    family: Family,
    config: ModelConfig,
    metadata: dict[str, Any],
    tensors: dict[str, GgufTensor],
) -> None:
    """Refuse a model that its file would not describe."""
    file = GgufFile(PLANNED, metadata, tensors)
    data = architecture.config(file)
    _, back = read_config(family, data, PLANNED, architecture.stored(file, data), data["architectures"])
    back = back.model_copy(update={"special": config.special})
    if faults := differences(config, back, f"llama.cpp's {architecture.name}"):
        raise ConfigError(faults)
