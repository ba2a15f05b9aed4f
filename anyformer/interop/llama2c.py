"""Files of llama2.c (Karpathy 2023): a Llama as a sequence of fp32 values, and the pieces of a SentencePiece BPE.

A model file (version 0, which has no magic number) is 7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads,
vocab_size (negative if the head is not tied) and seq_len; then the weights in the order of `_layout`.
A tokenizer file is max_token_length, and for each id a score (float32), a length (int32) and that many bytes.
"""

import math
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer import presets
from anyformer.config import ConfigError, Fault, ModelConfig, Special
from anyformer.config.spec import visible
from anyformer.data.sentencepiece import BYTE, BYTE_PIECES, CONTROL, NORMAL, SPACE, UNKNOWN, PieceReader
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop.gguf_tokenizers import model_file
from anyformer.interop.public_tokenizers import frame
from anyformer.interop.sentencepiece_conversion import library_form
from anyformer.interop.weight_conversion import ImportedModel
from anyformer.interop.weight_files import wrong
from anyformer.interop.weight_rules import RotaryPairs
from anyformer.nn.model import Transformer

HEADER, ENTRY = struct.Struct("<7i"), struct.Struct("<fi")
MAGIC = 0x616B3432  # "ak42", with which later versions begin
MAX_SIZE = 2**24  # of any number in a header: beyond it the file has another format
BOUND = 1  # the id before each text, which so ends the text before it: there llama2.c stops, and </s> is never used
SPECIAL = ("<unk>", "<s>", "</s>")
PIECES = len(SPECIAL) + len(BYTE_PIECES)  # the first id that is a piece of text


def read(path: str | Path, tokenizer: str | Path | None) -> ImportedModel:
    """Return a model and its tokenizer; raise `ConfigError` if a file is damaged or of another format."""
    if tokenizer is None:
        raise ConfigError([Fault("--tokenizer", "is missing: a llama2.c model comes with a tokenizer, a .bin, too")])
    path, found = Path(path), read_tokenizer(tokenizer)
    header = read_header(path)
    if header.vocab != found.size:
        raise wrong(tokenizer, f"has {found.size} tokens, and the model in {path.name} has {header.vocab}")
    with torch.device("meta"):
        model = Transformer(header.config())
    model.load_state_dict(_weights(path, header), assign=True)
    return ImportedModel(model.eval(), found)


def find(folder: Path) -> tuple[Path, Path] | None:
    """Return the model and the tokenizer in a folder of llama2.c, by their names; None for another folder."""
    tokenizers = sorted(folder.glob("tok*.bin"))
    models = sorted({*folder.glob("*.bin")} - {*tokenizers, folder / "pytorch_model.bin"})
    return (models[0], tokenizers[0]) if models and tokenizers else None


# -- the model --------------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """The sizes of a model in the header of its file."""

    width: int
    ff: int
    depth: int
    heads: int
    kv_heads: int
    vocab: int
    length: int
    tied: bool

    def config(self) -> ModelConfig:
        """Return the config; rotary positions have no end, so `length` is that of the training."""
        sizes = self._asdict()
        length, tie = sizes.pop("length"), "output" if sizes.pop("tied") else "none"
        ends = Special(bos=BOUND, eos=BOUND)
        return presets.llama(**sizes).model_copy(update={"tie": tie, "special": ends, "context": length})


def read_header(path: Path) -> Header:
    """Return the header of a file, after checking the file's length against it."""
    with _open(path) as file:
        start = file.read(HEADER.size)
        length = file.seek(0, 2)
    if len(start) < HEADER.size:
        raise wrong(path, f"is no llama2.c model: it has {len(start)} bytes, and the header alone has {HEADER.size}")
    width, ff, depth, heads, kv_heads, vocab, positions = HEADER.unpack(start)
    if width == MAGIC:
        raise wrong(path, f"is of llama2.c's version {ff}: only version 0 is read, which its export.py writes, too")
    header = Header(width, ff, depth, heads, kv_heads, abs(vocab), positions, tied=vocab > 0)
    if not all(0 < size <= MAX_SIZE for size in header[:-1]):
        raise wrong(path, f"is no llama2.c model: its first numbers, {header[:-1]}, are no sizes")
    if width % heads or heads % kv_heads or width // heads % 2:
        what = f"dim = {width}, n_heads = {heads}, n_kv_heads = {kv_heads}"
        raise wrong(path, f"is no llama2.c model: {what} make no heads of an even width")
    expected = HEADER.size + 4 * sum(math.prod(shape) for shape in _layout(header).values())
    if length != expected:
        what = "it was cut short" if length < expected else "something follows the weights"
        raise wrong(path, f"has {length:,} bytes, and its header needs {expected:,}: {what}")
    return header


def _layout(header: Header) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a file in order; weights are [out, in], stacked over layers."""
    d, f, n, v = header.width, header.ff, header.depth, header.vocab
    k = d // header.heads
    angles = (header.length, k // 2)
    return {
        "table": (v, d),
        "norm": (n, d),
        "q": (n, d, d),
        "k": (n, header.kv_heads * k, d),
        "v": (n, header.kv_heads * k, d),
        "out": (n, d, d),
        "ff_norm": (n, d),
        "gate": (n, f, d),
        "down": (n, d, f),
        "up": (n, f, d),
        "final_norm": (d,),
        "cos": angles,  # of the rotary angles, which llama2.c itself skips
        "sin": angles,
        **({} if header.tied else {"head": (v, d)}),
    }


def _weights(path: Path, header: Header) -> dict[str, Tensor]:
    """Return the state dict of a `Transformer` from a file of the right length."""
    read: dict[str, Tensor] = {}
    with _open(path) as file:
        file.seek(HEADER.size)
        for name, shape in _layout(header).items():
            part = np.fromfile(file, "<f4", math.prod(shape))
            if not np.isfinite(part).all():
                at = HEADER.size + 4 * sum(x.numel() for x in read.values()) + 4 * int((~np.isfinite(part)).argmax())
                raise wrong(path, f"is damaged: at byte {at:,}, in {name}, there is a number that is not finite")
            read[name] = torch.from_numpy(part.astype(np.float32, copy=False)).view(shape)
    state = {"target.table.weight": read["table"], "decoder.final_norm.weight": read["final_norm"]}
    if not header.tied:
        state["head.table"] = read["head"]
    queries, keys = RotaryPairs(header.heads), RotaryPairs(header.kv_heads)
    for i in range(header.depth):
        q, k = queries.join([read["q"][i]]), keys.join([read["k"][i]])
        parts = {
            "mixer.norm_in": read["norm"][i],
            "mixer.inner.qkv": torch.cat((q, k, read["v"][i])),
            "mixer.inner.out": read["out"][i],
            "feedforward.norm_in": read["ff_norm"][i],
            "feedforward.inner.gate_up": torch.cat((read["gate"][i], read["up"][i])),
            "feedforward.inner.down": read["down"][i],
        }
        state |= {f"decoder.blocks.{i}.{name}.weight": x for name, x in parts.items()}
    return {name: x.clone() for name, x in state.items()}  # no views of all layers


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def read_tokenizer(path: str | Path) -> TextTokenizer:
    """Read a tokenizer as SentencePiece's BPE, from which llama2.c's exporter writes it with spaces in place of ▁."""
    path = Path(path)
    pieces = _pieces(path)
    reader = PieceReader(model_file(pieces, dummy_prefix=True), SPECIAL[0])
    inner, first = library_form(path, reader, [text for text, *_ in pieces]), SPECIAL[BOUND]
    frame(inner, [first], [])
    return TextTokenizer(inner, {"unk": SPECIAL[0], "bos": first, "eos": first}, reader)


def _pieces(path: Path) -> list[tuple[str, float, int]]:
    """Return all tokens by id, each with its score and type."""
    entries = _entries(path)
    if len(entries) < PIECES or tuple(text.decode("utf-8", "replace") for text, _ in entries[3:PIECES]) != BYTE_PIECES:
        raise wrong(path, "is no llama2.c tokenizer: ids 3 to 258 are not the bytes <0x00> to <0xFF>")
    types = (UNKNOWN, CONTROL, CONTROL)
    found = [(token, 0.0, type) for token, type in zip(SPECIAL, types, strict=True)]
    found += [(token, 0.0, BYTE) for token in BYTE_PIECES]
    known = {*SPECIAL, *BYTE_PIECES}
    for i, (text, score) in enumerate(entries[PIECES:], PIECES):
        try:
            piece = text.decode().replace(" ", SPACE)
        except UnicodeDecodeError:
            raise wrong(path, f"is damaged: token {i} is not UTF-8") from None
        if not piece or piece in known:
            raise wrong(path, f"is damaged: token {i}, '{visible(piece)}', is {'there twice' if piece else 'empty'}")
        if not math.isfinite(score):
            raise wrong(path, f"is damaged: the score of token {i} is not finite")
        known.add(piece)
        found.append((piece, score, NORMAL))
    return found


def _entries(path: Path) -> list[tuple[bytes, float]]:
    with _open(path) as file:
        data = file.read()
    if len(data) < 4:
        raise wrong(path, f"is no llama2.c tokenizer: it has {len(data)} bytes")
    (longest,) = struct.unpack_from("<i", data)
    found: list[tuple[bytes, float]] = []
    at = 4
    while at < len(data):
        score, size = ENTRY.unpack_from(data, at) if at + ENTRY.size <= len(data) else (0.0, 0)
        end = at + ENTRY.size + size
        if not 0 <= size <= longest:
            what = f"token {len(found)}, at byte {at:,}, has {size} bytes, and the longest has {longest}"
            raise wrong(path, f"is no llama2.c tokenizer, or damaged: {what}")
        if end > len(data):
            raise wrong(path, f"was cut short: token {len(found)}, at byte {at:,}, is not whole")
        found.append((data[at + ENTRY.size : end], score))
        at = end
    return found


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}") from None
