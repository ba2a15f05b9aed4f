"""Read pickle files that hold plain data: numbers, strings, bytes, lists, tables. Nothing in them can run.

First the opcodes are listed, not executed: each must have its operand in the file, and no memo index may exceed
the file's size, as either would allocate memory that the file does not fill. Then the data are built. The only class
that the reader finds is the one that the caller names, as a stand-in that stores its state.
"""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

from anyformer.config.spec import visible
from anyformer.interop.weight_files import wrong
from anyformer.runs.atomic_folder import must_be_file

MAX_BYTES = 2**26  # of a file: the vocabularies that are read this way have a few megabytes


class StoredState:
    """Stand-in for an object of another program: its state and nothing else."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _StateReader(pickle.Unpickler):
    """Unpickler that finds one class, as `StoredState`, and no other object by name."""

    def __init__(self, content: bytes, class_name: str):
        super().__init__(io.BytesIO(content))
        self._class_name = class_name

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" == self._class_name:
            return StoredState
        raise pickle.UnpicklingError(f"holds {visible(module)}.{visible(name)}, which is code")


def read_plain(path: Path, class_name: str = "") -> Any:
    """Return the data of a pickle file; an object of `class_name` is a `StoredState`, any other is an error."""
    must_be_file(path)
    if path.stat().st_size > MAX_BYTES:
        raise wrong(path, f"has {path.stat().st_size:,} bytes: at most {MAX_BYTES:,} are read")
    content = path.read_bytes()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if "PUT" in opcode.name and isinstance(argument, int) and argument > len(content):
                raise pickle.UnpicklingError("is damaged")
        return _StateReader(content, class_name).load()
    except pickle.UnpicklingError as error:
        raise wrong(path, f"is not read: it {visible(str(error)).partition(chr(10))[0]}") from None
    except Exception as error:  # a damaged pickle raises errors of many types
        raise wrong(path, f"is damaged: {visible(str(error)).partition(chr(10))[0]}") from None
