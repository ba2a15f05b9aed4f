"""Import of torch, and of all that loads a run, in less time: for verbs that run a model."""

import ctypes
import gc
import os
import sys
import threading
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

EXTENSIONS = ("hashlib", "importlib.metadata", "pydantic.main")  # modules that are, or import, extension modules


def import_torch() -> None:
    """Import torch and `anyformer.runs.run`; call it first in a verb that needs them.

    A thread loads torch's library, of about 250 MB, while Python creates the classes of configs and recipes. Garbage is
    not collected meanwhile: imported objects stay until the end, and later collections pass over them.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        start_loading()
        import anyformer.recipe
        import anyformer.runs.run  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


@cache
def start_loading() -> None:
    """Start a thread that loads torch's library, once. A verb that first does other work calls it before that."""
    import_extensions()
    threading.Thread(target=_load_library).start()


def import_extensions() -> None:
    """Import the extension modules that configs use. Later they would wait: the system loads one library at a time."""
    for name in EXTENSIONS:
        import_module(name)


def _load_library() -> None:
    """Load torch's library, and CUDA's where torch has them, without Python's lock, which `import` holds.

    Any failure is left to `import torch`.
    """
    spec = find_spec("torch")
    if sys.platform != "linux" or spec is None or spec.origin is None:
        return
    library = Path(spec.origin).parent / "lib" / "libtorch.so"
    load = ctypes.CDLL(None).dlopen  # a foreign function, called without the lock; ctypes.CDLL(library) would hold it
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    load(os.fsencode(library), os.RTLD_NOW)
