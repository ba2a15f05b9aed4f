"""Read models in GGUF files, the format of llama.cpp: config, weights, tokenizer and chat template.

Quantised weights become fp32.
"""

from pathlib import Path
from typing import NamedTuple

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import did_you_mean, visible
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop import gguf_file, gguf_tokenizers, public_tokenizers, weight_conversion
from anyformer.interop.config_fields import shown
from anyformer.interop.families import FAMILIES
from anyformer.interop.gguf_architectures import ARCHITECTURES, Architecture
from anyformer.interop.gguf_file import GgufFile
from anyformer.interop.hf_folder import read_config
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask, LanguageModel

ARCHITECTURE, TYPE = "general.architecture", "general.type"


class GgufModel(NamedTuple):
    """A model of a GGUF file with its task and tokenizer."""

    model: Transformer
    spec: AnyTask
    tokenizer: TextTokenizer


def read(path: Path, tokenizer: str | Path | None = None) -> GgufModel:
    """Return the model of a file; `tokenizer` is the file or folder of another tokenizer than its own."""
    file = gguf_file.read(path)
    architecture = _architecture(file)
    data, family = architecture.config(file) | gguf_tokenizers.ids(file), FAMILIES[architecture.family]
    stored = architecture.stored(file, data)
    _, config = read_config(family, data, path, stored, data["architectures"])
    named = Path(tokenizer or path)
    text = public_tokenizers.read(named, family.text, data) if tokenizer else gguf_tokenizers.read(file)
    public_tokenizers.check_size(text, config, named)
    return GgufModel(weight_conversion.build(family, config, stored, path), LanguageModel(framed=True), text)


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
