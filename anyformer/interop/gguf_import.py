"""Read models in GGUF files, the format of llama.cpp: config, weights, tokenizer and chat template.

Quantised weights become fp32.
"""

from pathlib import Path
from typing import Any

from anyformer.config import ConfigError, Embedder, Fault, ModelConfig, Pool
from anyformer.config.spec import did_you_mean, visible
from anyformer.interop import gguf_file, gguf_tokenizers, public_tokenizers, weight_conversion
from anyformer.interop.config_fields import shown
from anyformer.interop.families import FAMILIES
from anyformer.interop.gguf_architectures import ARCHITECTURES, Architecture
from anyformer.interop.gguf_file import GgufFile
from anyformer.interop.hf_folder import read_config
from anyformer.interop.weight_conversion import ImportedModel
from anyformer.recipe import AnyTask, Encoder, LanguageModel

ARCHITECTURE, TYPE, POOLING = "general.architecture", "general.type", "pooling_type"
POOLS: dict[int, Pool] = {1: "mean", 2: "first", 3: "last"}


def read(path: Path, tokenizer: str | Path | None = None) -> ImportedModel:
    """Return the model of a file; `tokenizer` is the file or folder of another tokenizer than its own."""
    file = gguf_file.read(path)
    architecture = _architecture(file)
    data, family = architecture.config(file) | gguf_tokenizers.ids(file), FAMILIES[architecture.family]
    stored = architecture.stored(file, data)
    _, config = read_config(family, data, path, stored, data["architectures"])
    config, spec = _with_task(config, file.metadata.get(f"{architecture.name}.{POOLING}", 0), file)
    named = Path(tokenizer or path)
    text = public_tokenizers.read(named, family.text, data) if tokenizer else gguf_tokenizers.read(file)
    public_tokenizers.check_size(text, config, named)
    return ImportedModel(weight_conversion.build(family, config, stored, path), text, spec)


def _with_task(config: ModelConfig, pooling: Any, file: GgufFile) -> tuple[ModelConfig, AnyTask]:
    """Return the config with the head that a pooling means, and the task; llama.cpp scales vectors to length 1."""
    if config.shape != "encoder":
        return config, LanguageModel(framed=True)
    if pooling not in (0, *POOLS):
        raise ConfigError(
            [_fault(file, POOLING, f"= {shown(pooling)}: must be 0 (none), 1 (mean), 2 (first) or 3 (last)")]
        )
    limits = [stack.limit for stack in config.stacks.values() if stack.limit is not None]
    head = Embedder(pool=POOLS[pooling], normalize=True) if pooling else config.head
    return config.model_copy(update={"head": head}), Encoder(max_length=min(limits, default=None))


def _architecture(file: GgufFile) -> Architecture:
    kind, name = file.metadata.get(TYPE, "model"), file.metadata.get(ARCHITECTURE)
    if kind != "model":
        raise ConfigError([_fault(file, TYPE, f"= {shown(kind)}: only files of models are read")])
    if not isinstance(name, str) or name not in ARCHITECTURES:
        what = did_you_mean(name, ARCHITECTURES) if isinstance(name, str) else f"one of {', '.join(ARCHITECTURES)}"
        raise ConfigError([_fault(file, ARCHITECTURE, f"= {shown(name)}: {what}")])
    return ARCHITECTURES[name]


def _fault(file: GgufFile, key: str, message: str) -> Fault:
    return Fault(f"{visible(str(file.path))}: {key}", visible(message))
