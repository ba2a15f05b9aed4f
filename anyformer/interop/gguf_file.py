"""GGUF files (ggml): metadata, tokenizer and tensors of a model in one file. Their bytes, read and written.

magic "GGUF", version (uint32), number of tensors, number of metadata entries (uint64); little-endian
entry      key, type (uint32), value; a string is its length (uint64) and UTF-8; an array is a type, a length, values
tensor     name, rank (uint32), sizes (uint64, the innermost first), type (uint32), offset (uint64)
values     at multiples of `general.alignment` bytes, each tensor at its offset

The package `gguf` converts quantised values. Its own reader needs 6 s for the header of a model with 49,152 tokens.
"""

import math
import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.interop.weight_files import MAX_TENSORS, wrong
from anyformer.runs.atomic_folder import must_be_file

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_ENTRIES, MAX_RANK, MAX_DEPTH = 100_000, 4, 4  # of metadata, of tensors, of arrays in arrays
MAX_VALUES = 1 << 48  # of a tensor
ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
# Types of metadata by number: struct's letter, or a string, or an array.
LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file; quantised values are read as fp32."""

    file: Path
    kind: "GGMLQuantizationType"
    shape: tuple[int, ...]
    start: int
    size: int  # in bytes

    @property
    def dtype(self) -> torch.dtype:
        return FLOATS.get(self.kind.name, torch.float32)

    def data(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return the bytes as they are in the file."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            found = np.fromfile(file, np.uint8, self.size)
        if len(found) != self.size:
            raise wrong(self.file, "was cut short while it was read")
        return found

    def read(self) -> Tensor:
        from gguf import quants

        data = self.data()
        if self.kind.name in FLOATS:
            return torch.from_numpy(data).view(self.dtype).view(self.shape)
        values = quants.dequantize(data.reshape(*self.shape[:-1], -1), self.kind)
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).view(self.shape)


class GgufFile(NamedTuple):
    """The metadata and the tensors of a file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def require_package() -> None:
    """Raise `ConfigError` if the package `gguf` is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError([Fault("gguf", "needs the package gguf: pip install 'anyformer[gguf]'")]) from None


def read(path: Path) -> GgufFile:
    """Read the header of a file, after checking it against the file's length."""
    require_package()
    must_be_file(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise wrong(path, "is no GGUF file: it does not begin with 'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except (ValueError, struct.error):  # among them UnicodeDecodeError
        raise wrong(path, "is damaged: its header cannot be read") from None


class _Cursor:
    """A place in the header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, len(MAGIC)

    def numbers(self, letters: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{letters}", self.data, self.at)
        self.at += struct.calcsize(f"<{letters}")
        return found

    def number(self, letter: str) -> Any:
        return self.numbers(letter)[0]

    def string(self) -> str:
        return bytes(self._take(self.number("Q"))).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Return a value; single-precision numbers as the shortest decimal that has the same bits."""
        if kind == STRING:
            return self.string()
        if kind in LETTERS:
            found = self.number(LETTERS[kind])
            return float(str(np.float32(found))) if LETTERS[kind] == "f" else found
        if kind != ARRAY or depth == MAX_DEPTH:
            raise ValueError("a value of an unknown type")
        inner, count = self.numbers("IQ")
        if inner in LETTERS:
            letter = LETTERS[inner]
            return np.frombuffer(self._take(count * struct.calcsize(letter)), f"<{letter}").tolist()
        if count > len(self.data) - self.at:
            raise ValueError("cut short")
        return [self.value(inner, depth + 1) for _ in range(count)]

    def _take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError("cut short")
        self.at += size
        return self.data[self.at - size : self.at]


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data)
    version = cursor.number("I")
    if version not in VERSIONS:
        what = "is big-endian" if version in (v << 24 for v in VERSIONS) else f"is of GGUF version {version}"
        raise wrong(path, f"{what}: little-endian files of versions 2 and 3 are read")
    tensors, entries = cursor.numbers("QQ")
    if tensors > MAX_TENSORS or entries > MAX_ENTRIES:
        raise wrong(path, f"is damaged: it would have {tensors:,} tensors and {entries:,} entries of metadata")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.string()
        if key in metadata:
            raise wrong(path, f"is damaged: {visible(key)} is there twice")
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count", 0) not in (0, 1):
        what = f"is one of {metadata['split.count']} parts: join them with llama-gguf-split --merge"
        raise wrong(path, what)
    infos = [_info(cursor) for _ in range(tensors)]
    alignment = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise wrong(path, f"{ALIGNMENT} = {alignment}: must be from 1 to {1 << 20:,}")
    base = -(-cursor.at // alignment) * alignment
    found: dict[str, GgufTensor] = {}
    for name, shape, number, offset in infos:
        if name in found:
            raise wrong(path, f"is damaged: {visible(name)} is there twice")
        found[name] = _tensor(path, name, shape, number, base + offset)
        if found[name].start + found[name].size > len(data):
            raise wrong(path, f"is cut short: it has {len(data):,} bytes, and {visible(name)} ends after them")
    return GgufFile(path, metadata, found)


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, rank = cursor.string(), cursor.number("I")
    if rank > MAX_RANK:
        raise ValueError("a tensor of too many dimensions")
    shape = cursor.numbers("Q" * rank)[::-1]
    return name, shape, *cursor.numbers("IQ")


def _tensor(path: Path, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = next((kind for kind in GGMLQuantizationType if kind == number), None)
    if kind is None or kind.name not in (*FLOATS, *QUANTISED):
        what = f"{visible(name)} is of type {kind.name if kind else number}, which is not read"
        raise wrong(path, f"{what}: {', '.join((*FLOATS, *QUANTISED))} are")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or not math.prod(shape) or shape[-1] % block or math.prod(shape) > MAX_VALUES:
        raise wrong(path, f"is damaged: {visible(name)} of {kind.name} has the shape {list(shape)}")
    return GgufTensor(path, kind, shape, start, math.prod(shape) // block * block_bytes)


# -- writing ----------------------------------------------------------------------------------------------------------


LARGEST = {"F32": math.inf, "F16": 65_504.0, "Q8_0": 127 * 65_504.0}


def encode(x: Tensor, kind: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return the bytes of a tensor, in a shape whose last dimension is bytes: F32, F16 or Q8_0.

    Q8_0 is 32 values as int8 with one scale in half precision; a block whose scale would be 0 is all zeros.
    """
    from gguf import GGMLQuantizationType, quants

    values = x.detach().cpu().float().contiguous().numpy()
    if kind == "F32":
        return values.view(np.uint8)
    if kind == "F16":
        return values.astype(np.float16).view(np.uint8)
    assert kind == "Q8_0", kind
    blocks = values.reshape(-1, 32)
    smallest = 127 * 2.0**-25  # below it, half precision has no scale
    flushed = np.where(np.abs(blocks).max(axis=1, keepdims=True) <= smallest, np.float32(0), blocks)
    return quants.quantize(flushed.reshape(values.shape), GGMLQuantizationType.Q8_0)


def write(
    path: Path,
    metadata: dict[str, Any],
    kinds: dict[str, tuple[str, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a file from a stream of tensors, in the order of `kinds`: the type and the shape of each."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    header = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(kinds), len(metadata))]
    header += [_string(key) + b"".join(_packed(value)) for key, value in metadata.items()]
    offset = 0
    for name, (kind, shape) in kinds.items():
        number = GGMLQuantizationType[kind]
        block, size = GGML_QUANT_SIZES[number]
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header.append(_string(name) + sizes + struct.pack("<IQ", number, offset))
        offset += _padded(math.prod(shape) // block * size)
    text = b"".join(header)
    with path.open("wb") as file:
        file.write(text.ljust(_padded(len(text)), b"\0"))
        for (name, x), (expected, (kind, shape)) in zip(tensors, kinds.items(), strict=True):
            assert (name, tuple(x.shape)) == (expected, shape), name
            if x.numel() and float(x.abs().max()) > LARGEST[kind]:
                raise wrong(path.name, f"{name} has values above {LARGEST[kind]:,g}, the largest of {kind}")
            data = encode(x, kind).tobytes()
            file.write(data.ljust(_padded(len(data)), b"\0"))


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _packed(value: Any) -> Iterator[bytes]:
    """Yield the type and the bytes of a value: integers as uint32, in lists as int32; floats in single precision."""
    if isinstance(value, list):
        inner = {int: 5, float: 6, str: STRING}[type(value[0]) if value else str]
        yield struct.pack("<IIQ", ARRAY, inner, len(value))
        yield (
            b"".join(map(_string, value)) if inner == STRING else struct.pack(f"<{len(value)}{LETTERS[inner]}", *value)
        )
    elif isinstance(value, str):
        yield struct.pack("<I", STRING) + _string(value)
    else:
        kind = {bool: 7, int: 4, float: 6}[type(value)]
        yield struct.pack(f"<I{LETTERS[kind]}", kind, value)
