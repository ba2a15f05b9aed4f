"""Read and write weight files tensor by tensor: at most one tensor is in memory besides the model.

A .safetensors file is the length of its header (8 bytes), the header (JSON: dtype, shape and place of each tensor), and
the numbers. Files are checked against their headers before a number is read.
"""

import json
import math
import mmap
import pickle
import re
import reprlib
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import is_file_name, visible
from anyformer.runs.atomic_folder import must_be_file, read_json as read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MAX_HEADER_BYTES = 100_000_000  # limit of the format
MAX_TENSORS = 200_000  # of a file; the largest published mixtures of experts have about 100,000 in all shards
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StoredTensor(Protocol):
    """A tensor in a file."""

    @property
    def file(self) -> Path: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self) -> Tensor: ...


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a .safetensors file, by its byte range."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        try:  # separate memory, outside the heap: once freed, it leaves no hole between the weights that stay
            buffer = mmap.mmap(-1, max(self.size, 1), access=mmap.ACCESS_COPY)
        except OSError:
            raise wrong(self.file, f"needs {self.size / 2**30:,.1f} GiB of memory for one tensor") from None
        with self.file.open("rb") as file:
            file.seek(self.start)
            if file.readinto(memoryview(buffer)[: self.size]) != self.size:
                raise wrong(self.file, "was cut short while it was read")
        return torch.frombuffer(buffer, dtype=torch.uint8)[: self.size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PickledTensor:
    """A tensor of a .bin file, which stays on disk until it is read."""

    file: Path
    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self) -> Tensor:
        return self.tensor.clone()


def stored(folder: Path, allow_pickle: bool = False) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name, from one file or from the shards of an index."""
    if (folder / WEIGHTS).exists():
        return _header(folder / WEIGHTS)
    if (folder / INDEX).exists():
        return _sharded(folder / INDEX, _header)
    pickled = next((folder / name for name in (PICKLED, PICKLED_INDEX) if (folder / name).exists()), None)
    if pickled is None:
        raise wrong(folder, f"holds no weights: no {WEIGHTS}, nor {INDEX}")
    if pickled.name == PICKLED:
        return stored_in(pickled, allow_pickle)
    _check_allowed(pickled, allow_pickle)
    return _sharded(pickled, _unpickle)


def stored_in(path: Path, allow_pickle: bool = False) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name: .safetensors, or a pickle where that is allowed."""
    if path.suffix == ".safetensors":
        return _header(path)
    _check_allowed(path, allow_pickle)
    return _unpickle(path)


def _check_allowed(path: Path, allow_pickle: bool) -> None:
    if not allow_pickle:
        what = "is a pickle, which can run code: convert it to .safetensors, or allow it (--allow-pickle)"
        raise wrong(path, what)


def _sharded(index: Path, open_: Callable[[Path], dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Read the shards of an index: files in the same folder that hold each tensor once."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise wrong(index, "has no weight_map from weights to files")
    for name in sorted(set(places.values())):
        if not is_file_name(name):
            raise wrong(index, f"names {reprlib.repr(name)}, which is not a file of this folder")
        if not (index.parent / name).is_file():
            raise wrong(index.parent / name, f"is missing, and {index.name} names it")
    shards = {name: open_(index.parent / name) for name in sorted(set(places.values()))}
    if lost := next((weight for weight, name in places.items() if weight not in shards[name]), None):
        raise wrong(index, f"places {visible(lost)} in {places[lost]}, which does not hold it")
    found: dict[str, StoredTensor] = {}
    for name, shard in shards.items():
        if twice := next((weight for weight in shard if weight in found), None):
            raise wrong(index.parent / name, f"holds {visible(twice)}, and so does {found[twice].file.name}")
        found |= shard
    return found


def _header(path: Path) -> dict[str, StoredTensor]:
    must_be_file(path)
    try:
        with path.open("rb") as file:
            start, length = file.read(8), file.seek(0, 2)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= size <= min(MAX_HEADER_BYTES, length - 8):
                what = f"its header would have {size:,} bytes, and the file has {length:,}"
                raise wrong(path, f"is cut short, or no .safetensors file: {what}")
            file.seek(8)
            header = json.loads(file.read(size))
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        raise wrong(path, "is damaged: its header is not JSON") from None
    if not isinstance(header, dict):
        raise wrong(path, "is damaged: its header is not a table")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise wrong(path, f"has {len(header):,} tensors: at most {MAX_TENSORS:,} are read")
    found = {name: _span(path, name, entry, 8 + size) for name, entry in header.items()}
    end = 8 + size
    for name, span in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
        if span.start != end:
            raise wrong(path, f"is damaged: {visible(name)} does not begin where the tensor before it ends")
        end += span.size
    if end != length:
        what = "it was cut short" if length < end else "something follows the tensors"
        raise wrong(path, f"has {length:,} bytes, and its header needs {end:,}: {what}")
    return dict(found)


def _span(path: Path, name: str, entry: Any, base: int) -> FileTensor:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise wrong(path, f"is damaged: its header does not say what {visible(name)} is")
    if not isinstance(kind, str) or kind not in DTYPES:
        raise wrong(
            path, f"{visible(name)} is of {visible(reprlib.repr(kind))}, which is not read: {', '.join(DTYPES)} are"
        )
    span = FileTensor(path, DTYPES[kind], tuple(shape), base + begin)
    if end - begin != span.size:
        raise wrong(path, f"is damaged: {visible(name)} of shape {reprlib.repr(list(shape))} has {end - begin:,} bytes")
    return span


def _unpickle(path: Path) -> dict[str, StoredTensor]:
    """Read a .bin file as tensors and nothing else."""
    return pickled(path, load_pickle(path))


def pickled(path: Path, content: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict that was in a file, by name."""
    if not isinstance(content, Mapping) or not all(isinstance(x, Tensor) for x in content.values()):
        raise wrong(path, "its weights are not a table of tensors")
    if other := next((name for name, x in content.items() if x.layout != torch.strided), None):
        raise wrong(path, f"{visible(str(other))} is a sparse tensor: only dense ones are read")
    return {str(name): PickledTensor(path, x) for name, x in content.items()}


def load_pickle(path: Path) -> Any:
    """Read tensors, numbers and strings that torch.save wrote, and nothing else; tensors stay on disk where possible.

    Files older than torch 1.6 are no zip archives, and not mapped.
    """
    must_be_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"{name[1]}, which is code" if name else "something else than tensors, or is damaged"
        raise wrong(path, f"is not read: it holds {what}; convert it to .safetensors where it was made") from None
    except Exception as error:  # zip, end-of-file and runtime errors alike
        raise wrong(path, f"cannot be read: {visible(str(error)).partition(chr(10))[0]}") from None


# -- writing ----------------------------------------------------------------------------------------------------------


Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def write(path: Path, shapes: Shapes, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a .safetensors file from a stream of tensors, in the order and with the shapes of `shapes`."""
    names, at = {dtype: name for name, dtype in DTYPES.items()}, 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in shapes.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the data to 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, x), expected in zip(tensors, shapes.items(), strict=True):
            assert (name, (x.dtype, tuple(x.shape))) == expected, name
            file.write(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def wrong(path: str | Path, message: str) -> ConfigError:
    return ConfigError([Fault(visible(str(path)), message)])


def must_be_new(path: str | Path, noun: str = "folder") -> None:
    """Refuse to write where something is already."""
    if Path(path).exists():
        raise wrong(path, f"exists already; choose another {noun}")
