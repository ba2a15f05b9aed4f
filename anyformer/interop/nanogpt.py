"""ImportedModels of nanoGPT and minGPT (Karpathy 2020–2023): GPT-2's architecture with plain linear layers.

nanoGPT's ckpt.pt holds `model_args` beside the weights and the settings of training; its GELU is exact, and its head is
tied. minGPT's model.pt is a state dict; a config.json beside it holds the number of heads. Its GELU is the tanh
approximation, and its head has its own weights.

A vocabulary of characters is in nanoGPT's meta.pkl; minGPT stores none. Both number the sorted characters of the
training text, so that the text, a .txt file, replaces the vocabulary.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from anyformer import config as spec
from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.spec import is_file_name
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop import public_tokenizers, weight_conversion, weight_files
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import gpt2
from anyformer.interop.family import PLAIN, WeightNames
from anyformer.interop.plain_pickle import read_plain
from anyformer.interop.weight_conversion import ImportedModel
from anyformer.interop.weight_files import StoredTensor, wrong
from anyformer.interop.weight_rules import AnyRule, Rule

FILE, META = "ckpt.pt", "meta.pkl"
PREFIXES = re.compile(r"^(_orig_mod\.|module\.)+")  # of torch.compile and of data parallelism
TABLE, POSITIONS, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
FIRST_BLOCK = re.compile(r"transformer\.h\.(\d{1,4})\.")
CHARACTER = re.compile(r"[^\ud800-\udfff]", re.DOTALL)  # not half of one, a surrogate
# minGPT stores the name of a size in place of its numbers. These are the names in its code, and their heads.
MINGPT_HEADS = {
    "openai-gpt": 12,
    "gpt2": 12,
    "gpt2-medium": 16,
    "gpt2-large": 20,
    "gpt2-xl": 25,
    "gopher-44m": 16,
    "gpt-mini": 6,
    "gpt-micro": 4,
    "gpt-nano": 3,
}


def is_nanogpt(content: Any) -> bool:
    """Return whether the content of a .pt file has the layout of nanoGPT's train.py."""
    return isinstance(content, dict) and isinstance(content.get("model_args"), dict) and "model" in content


def is_mingpt(content: Any) -> bool:
    """Return whether the content of a .pt file is a state dict of minGPT."""
    return isinstance(content, dict) and {TABLE, POSITIONS, HEAD} <= content.keys()


def read_nanogpt(path: Path, content: Mapping[str, Any], tokenizer: str | Path | None) -> ImportedModel:
    """Return the model of a ckpt.pt; without a `tokenizer`, by the meta.pkl beside it or in the data folder."""
    fields = Fields(dict(content["model_args"]), f"{path}: model_args")
    with fields.named():
        config = _nanogpt_config(fields)
    fields.finish()
    file = Path(tokenizer) if tokenizer is not None else _find_meta(path, content.get("config"))
    if file is None:
        what = f"is missing, and there is no {META} near {path.name}: give {META}, the training text (.txt), "
        raise ConfigError([Fault("--tokenizer", what + "or a folder with GPT-2's vocab.json and merges.txt")])
    return _build(config, tensors(path, content["model"]), path, file)


def read_mingpt(path: Path, content: Mapping[str, Any], tokenizer: str | Path | None) -> ImportedModel:
    """Return the model of a state dict of minGPT, with the number of heads of the config.json beside it."""
    stored = tensors(path, content)
    if tokenizer is None:
        what = "is missing: minGPT stores no vocabulary: give the training text (.txt) for characters, or a folder "
        raise ConfigError([Fault("--tokenizer", what + "with GPT-2's vocab.json and merges.txt")])
    for name in (TABLE, POSITIONS):
        if len(stored[name].shape) != 2:
            raise wrong(path, f"{name} has shape {list(stored[name].shape)}: it must be a matrix")
    (vocab, width), (length, _) = stored[TABLE].shape, stored[POSITIONS].shape
    depth = 1 + max((int(found[1]) for name in stored if (found := FIRST_BLOCK.match(name))), default=0)
    heads = _mingpt_heads(path.with_name("config.json"))
    config = _config(GPTSize(depth, width, heads, vocab, length), spec.Gelu(approximate="tanh"))
    return _build(config.model_copy(update={"tie": "none"}), stored, path, Path(tokenizer))


# -- the model --------------------------------------------------------------------------------------------------------


class GPTSize(NamedTuple):
    """The numbers of a GPT-2."""

    depth: int
    width: int
    heads: int
    vocab: int
    length: int


def _nanogpt_config(fields: Fields) -> ModelConfig:
    size = GPTSize(
        depth=fields.depth("n_layer", 12),
        width=fields("n_embd", 768),
        heads=fields("n_head", 12),
        vocab=fields("vocab_size", 50_304),
        length=fields("block_size", 1024),
    )
    bias = fields.maybe("bias", bool)
    # checkpoints without the field are older than the exact GELU
    activation = spec.Gelu(approximate="tanh") if bias is None else spec.Gelu()
    return _config(size, activation, bias is not False, fields("dropout", 0.0))


def _config(size: GPTSize, activation: spec.Gelu, bias: bool = True, dropout: float = 0.0) -> ModelConfig:
    norm = spec.LayerNorm(eps=1e-5, bias=bias)
    mixer = spec.Attention(heads=size.heads, bias=bias, output=spec.Projected(bias=bias), dropout=dropout)
    block = spec.Block(
        mixer=mixer, feedforward=spec.Plain(activation=activation, bias=bias), norm=norm, dropout=dropout
    )
    return ModelConfig(
        width=size.width,
        target=spec.Tokens(vocab=size.vocab, dropout=dropout),
        decoder=spec.Stack(
            depth=size.depth, blocks=(block,), position=spec.Learned(length=size.length), final_norm=norm
        ),
        head=spec.LM(),
        tie="output",
        init=spec.Normal(residual=True),
    )


def _mingpt_heads(path: Path) -> int:
    if not path.is_file():
        raise wrong(path, "is missing: minGPT writes it beside model.pt, and the number of heads is only there")
    model = weight_files.read_json(path).get("model")
    fields = Fields(model if isinstance(model, dict) else {}, f"{path}: model")
    heads, name = fields.maybe("n_head", int), fields.maybe("model_type", str)
    if heads is None and name is None:
        raise ConfigError([fields.fault("n_head", "is missing, and so is model_type")])
    return fields.one_of("model_type", MINGPT_HEADS, "gpt2") if heads is None else heads


def _rules(config: ModelConfig) -> Iterator[AnyRule]:
    """Yield GPT-2's rules without its transposed matrices."""
    for rule in gpt2.rules(config):
        yield Rule(rule.ours, *rule.theirs) if isinstance(rule, Rule) else rule


NAMES = WeightNames(kind="GPT", rules=_rules, buffers=gpt2.GPT2.buffers)


def tensors(path: Path, content: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict by name, without the prefixes of torch.compile and data parallelism."""
    found = weight_files.pickled(path, content)
    return {PREFIXES.sub("", name): tensor for name, tensor in found.items()}


def _build(config: ModelConfig, stored: dict[str, StoredTensor], path: Path, file: Path) -> ImportedModel:
    text = read_vocabulary(file)
    public_tokenizers.check_size(text, config, file)
    config = config.model_copy(update={"special": spec.Special(bos=text.bos, eos=text.eos)})
    weight_conversion.check_excess(config, stored, path)
    return ImportedModel(weight_conversion.build(NAMES, config, stored, path), text)


# -- the vocabulary ---------------------------------------------------------------------------------------------------


def _find_meta(path: Path, settings: Any) -> Path | None:
    """Return nanoGPT's meta.pkl: beside the checkpoint, or in data/DATASET beside the checkpoint's folder."""
    places = [path.parent / META]
    dataset = settings.get("dataset") if isinstance(settings, dict) else None
    if is_file_name(dataset):
        places.append(path.resolve().parent.parent / "data" / str(dataset) / META)
    return next((place for place in places if place.is_file()), None)


def read_vocabulary(file: Path) -> TextTokenizer:
    """Read a vocabulary: meta.pkl, the characters of a .txt file, or the tokenizer of a public folder."""
    if file.suffix == ".pkl":
        return _characters(_stored_characters(file), file)
    if file.suffix == ".txt" and file.name != public_tokenizers.WORDPIECE:
        try:
            found = sorted(set(file.read_bytes().decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")))
        except (OSError, UnicodeDecodeError) as error:
            raise wrong(file, f"cannot be read: {error}") from None
        return _characters({character: i for i, character in enumerate(found)}, file)
    return public_tokenizers.read(file, PLAIN, {"model_type": "gpt2"})


def _stored_characters(file: Path) -> dict[str, int]:
    """Return the id of each character in a meta.pkl."""
    content = read_plain(file)
    found = content.get("stoi") if isinstance(content, dict) else None
    if (
        not isinstance(found, dict)
        or not all(isinstance(c, str) and CHARACTER.fullmatch(c) and type(i) is int for c, i in found.items())
        or sorted(found.values()) != list(range(len(found)))
    ):
        raise wrong(file, "has no `stoi` that numbers single characters from 0")
    return found


def _characters(vocab: dict[str, int], file: Path) -> TextTokenizer:
    """Return a tokenizer whose tokens are single characters. There is no unknown token, as in these programs."""
    if not vocab:
        raise wrong(file, "holds no character")
    inner = Tokenizer(models.WordLevel(vocab, unk_token=""))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    return TextTokenizer(inner, roles={})
