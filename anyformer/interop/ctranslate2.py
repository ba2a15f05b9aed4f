"""Read Whisper models in CTranslate2's format: a folder with model.bin, config.json and tokenizer.json.

model.bin, little-endian: version of the format, name and revision of the model's specification, number of variables;
for each variable its name, rank, sizes, type, number of bytes, and values; then aliases, second names of variables.
A name is its length with a zero byte at the end (2 bytes), and the characters. Quantised matrices are divided by a
variable `NAME_scale`, one number for each row, or one for all.
"""

import math
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from anyformer.config import ModelConfig
from anyformer.data.tokenizer import FILE
from anyformer.interop import public_tokenizers, speech
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.whisper import WHISPER, waves
from anyformer.interop.family import PLAIN
from anyformer.interop.weight_conversion import ImportedModel
from anyformer.interop.weight_files import read_json, wrong
from anyformer.nn.model import Transformer

MODEL = "model.bin"
SPEC = "WhisperSpec"
VERSIONS = range(5, 7)  # of the format
DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)  # by number
MAX_VARIABLES, MAX_RANK = 100_000, 8
START, END = "<|startoftranscript|>", "<|endoftext|>"
LAYER = {
    "mixer.norm_in": "self_attention/layer_norm",
    "mixer.inner.qkv": "self_attention/linear_0",
    "mixer.inner.out": "self_attention/linear_1",
    "cross.norm_in": "attention/layer_norm",
    "cross.inner.q": "attention/linear_0",
    "cross.inner.kv": "attention/linear_1",
    "cross.inner.out": "attention/linear_2",
    "feedforward.norm_in": "ffn/layer_norm",
    "feedforward.inner.up": "ffn/linear_0",
    "feedforward.inner.down": "ffn/linear_1",
}


def is_folder(folder: Path) -> bool:
    """Return whether a folder is in CTranslate2's format."""
    return (folder / MODEL).is_file()


def read(folder: Path, tokenizer: str | Path | None = None) -> ImportedModel:
    """Return the model of a folder, with weights in fp32."""
    path, settings = folder / MODEL, read_json(folder / "config.json")
    weights = read_variables(path)
    named = Path(tokenizer or folder)
    if tokenizer is None and not (folder / FILE).is_file():
        raise wrong(folder, f"has no {FILE}: give it with --tokenizer")
    text = public_tokenizers.read(named, PLAIN, {"eos_token_id": None})
    ids = {name: id for name in (START, END) if (id := text.inner.token_to_id(name)) is not None}
    if missing := [name for name in (START, END) if name not in ids]:
        raise wrong(named, f"its tokenizer has no {missing[0]}: it is not Whisper's")
    config = _config(weights, ids, path)
    public_tokenizers.check_size(text, config, named)
    names = {"suppress_tokens": "suppress_ids", "begin_suppress_tokens": "suppress_ids_begin"}
    renamed = {name: settings.get(theirs) for name, theirs in names.items()}
    spec = speech.task(text, config, renamed, folder / "config.json")
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(_state(weights, config, path), assign=True)
    return ImportedModel(model.eval(), text, spec)


# -- the file ---------------------------------------------------------------------------------------------------------


def read_variables(path: Path) -> dict[str, Tensor]:
    """Return all variables of a model.bin by name, aliases included, with quantised ones in fp32."""
    try:
        with path.open("rb") as file:
            found = _variables(_ModelReader(file, path))
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}") from None
    for name in [name for name in found if f"{name}_scale" in found]:
        scale = found[f"{name}_scale"].float()
        shape = (-1, *[1] * (found[name].dim() - 1)) if scale.dim() else ()
        found[name] = found[name].float() / scale.reshape(shape)
    return {name: x for name, x in found.items() if not name.endswith("_scale")}


def _variables(reader: "_ModelReader") -> dict[str, Tensor]:
    version = reader.number("I")
    if version not in VERSIONS:
        versions = f"{VERSIONS[0]} to {VERSIONS[-1]}"
        raise reader.wrong(f"is no model of CTranslate2, or of another version: {version}, and {versions} are read")
    spec = reader.text()
    if spec != SPEC:
        raise reader.wrong(f"holds a {spec!r}: of CTranslate2's models, only Whisper ({SPEC}) is read")
    reader.number("I")  # the revision of the specification
    found = {}
    for _ in range(reader.count(MAX_VARIABLES)):
        name = reader.text()
        found[name] = reader.tensor(name)
    for _ in range(reader.count(MAX_VARIABLES)):
        name, of = reader.text(), reader.text()
        if of not in found:
            raise reader.wrong(f"is damaged: {name!r} is another name of {of!r}, which is missing")
        found[name] = found[of]
    return found


class _ModelReader:
    """A model.bin that is being read; what does not fit is an error with its place."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path, self.size = file, path, path.stat().st_size

    def bytes(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size else b""
        if len(data) < count:
            raise self.wrong(f"is damaged or cut short at byte {self.file.tell():,}")
        return data

    def number(self, form: str) -> int:
        (found,) = struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))
        return int(found)

    def count(self, most: int) -> int:
        found = self.number("I")
        if found > most:
            raise self.wrong(f"is damaged: it says that {found:,} names follow byte {self.file.tell():,}")
        return found

    def text(self) -> str:
        raw = self.bytes(self.number("H"))
        try:
            return raw.removesuffix(b"\0").decode()
        except UnicodeDecodeError:
            raise self.wrong(f"is damaged: the name before byte {self.file.tell():,} is not UTF-8") from None

    def tensor(self, name: str) -> Tensor:
        rank = self.number("B")
        if rank > MAX_RANK:
            raise self.wrong(f"is damaged: {name!r} has {rank} axes")
        shape = tuple(self.number("I") for _ in range(rank))
        kind, size = self.number("B"), self.number("I")
        if kind >= len(DTYPES) or math.prod(shape) * DTYPES[kind].itemsize != size:
            raise self.wrong(f"is damaged: {name!r} of shape {list(shape)} has {size:,} bytes of type {kind}")
        data = bytearray(self.bytes(size))
        return torch.frombuffer(data, dtype=DTYPES[kind]).reshape(shape) if data else torch.empty(shape)

    def wrong(self, what: str) -> Exception:
        return wrong(self.path, what)


# -- the model --------------------------------------------------------------------------------------------------------


def _config(weights: dict[str, Tensor], ids: dict[str, int], path: Path) -> ModelConfig:
    """Return the model that has these weights."""
    sizes = {
        "decoder/embeddings/weight": ("vocab_size", "d_model"),
        "encoder/conv1/weight": ("", "num_mel_bins", ""),
        "encoder/position_encodings/encodings": ("max_source_positions", ""),
        "decoder/position_encodings/encodings": ("max_target_positions", ""),
        "encoder/layer_0/ffn/linear_0/weight": ("encoder_ffn_dim", ""),
        "decoder/layer_0/ffn/linear_0/weight": ("decoder_ffn_dim", ""),
    }
    fields: dict[str, object] = {"decoder_start_token_id": ids[START], "eos_token_id": ids[END]}
    for name, axes in sizes.items():
        if name not in weights or weights[name].dim() != len(axes):
            raise wrong(path, f"has no variable {name!r} with {len(axes)} axes")
        fields |= {field: n for field, n in zip(axes, weights[name].shape, strict=True) if field}
    for side in ("encoder", "decoder"):
        if f"{side}/num_heads" not in weights:
            raise wrong(path, f"has no variable '{side}/num_heads'")
        layers = {name.split("/")[1] for name in weights if name.startswith(f"{side}/layer_")} - {"layer_norm"}
        fields |= {f"{side}_attention_heads": int(weights[f"{side}/num_heads"]), f"{side}_layers": len(layers)}
    fields |= {"pad_token_id": ids[END], "bos_token_id": ids[END]}
    return WHISPER.config(Fields(fields, path), ["WhisperForConditionalGeneration"])


def _state(weights: dict[str, Tensor], config: ModelConfig, path: Path) -> dict[str, Tensor]:
    with torch.device("meta"):
        expected = Transformer(config).state_dict()
    found = {}
    for ours, theirs in _names(config):
        x = weights.get(theirs)
        if x is None or x.shape != expected[ours].shape:
            what = "is missing" if x is None else f"has shape {list(x.shape)}, not {list(expected[ours].shape)}"
            raise wrong(path, f"the variable {theirs!r} {what}")
        found[ours] = x.float()
    table = weights["encoder/position_encodings/encodings"].float()
    if not torch.allclose(table, waves(table.shape), rtol=0, atol=0.01):
        raise wrong(path, "the positions of its encoder are not sines and cosines, as Whisper's are")
    return found


def _names(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield each of our tensors with the variable that it is."""
    yield "target.table.weight", "decoder/embeddings/weight"
    yield "decoder.embedder.tables.positions", "decoder/position_encodings/encodings"
    layers = {f"source.sound.convolutions.{i}": f"encoder/conv{i + 1}" for i in range(2)}
    for side, stack in config.stacks.items():
        layers[f"{side}.final_norm"] = f"{side}/layer_norm"
        for i, (ours, theirs) in product(range(stack.depth), LAYER.items()):
            if side == "decoder" or not ours.startswith("cross"):
                layers[f"{side}.blocks.{i}.{ours}"] = f"{side}/layer_{i}/{theirs}"
    for ours, theirs in layers.items():
        ends = ("gamma", "beta") if theirs.endswith("layer_norm") else ("weight", "bias")
        yield from ((f"{ours}.{end}", f"{theirs}/{name}") for end, name in zip(("weight", "bias"), ends, strict=True))
