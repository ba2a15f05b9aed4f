"""Compiled code of training steps, kept in the user's cache folder: the next run of the same model starts sooner.

torch.compile keeps its files in a temporary folder, which a restart of the machine empties, and trusts what it finds.
Here each config has a folder for its version of torch, its device and our source, since torch does not notice a changed
custom operator. `digests.json` holds the SHA-256 of every file; a folder in which a listed file is missing or changed
is removed, and its code compiled again. The files are Python code and pickles that torch loads: the cache folder is
trusted as the installed packages are.

A folder that was not used for 30 days is removed when a training uses another one. Training uses torch's temporary
folder where another training holds the folder, or where it cannot be written. Folders of the user's own,
TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR, are used as they are.
"""

import hashlib
import json
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from anyformer.config import ConfigError, ModelConfig, io
from anyformer.data.datasets.storage import sha256_of
from anyformer.kernels.conventions import user_cache
from anyformer.kernels.private import caching_custom_gradients
from anyformer.runs.atomic_folder import remove
from anyformer.runs.processes import locked

SETTING = "TORCHINDUCTOR_CACHE_DIR"
TRITON_SETTING = "TRITON_CACHE_DIR"
DIGESTS = "digests.json"
UNUSED_DAYS = 30  # after which a folder is removed
UNLISTED = (".lock", ".tmp")  # endings of files that come and go
PACKAGE = Path(__file__).parents[1]
SOURCES = ("attention", "kernels", "nn")  # folders whose files define custom operators


class CompileCache:
    """The folder of one model's compiled code, held by one training at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.held, self.damaged = ExitStack(), False

    def hold(self) -> bool:
        """Lock the folder, and remove it if it is damaged; return whether it can be used."""
        with suppress(ConfigError, OSError):  # held by another training, or not writable
            self.held.enter_context(locked(self.folder.parent, name=f"{self.folder.name}.lock"))
            if self.folder.is_dir() and not self._is_intact():
                self.damaged = True
                remove(self.folder)
            self.folder.mkdir(exist_ok=True)
            os.utime(self.folder)  # its last use
            self._remove_unused()
            return True
        self.held.close()
        return False

    def _remove_unused(self) -> None:
        """Remove the folders of other models that were not used for long and that no training holds."""
        before = time.time() - UNUSED_DAYS * 24 * 3600
        for other in self.folder.parent.iterdir():
            with suppress(ConfigError, OSError):  # held by another training, or removed by it
                if other.is_dir() and other.stat().st_mtime < before:
                    with locked(other.parent, name=f"{other.name}.lock"):
                        remove(other)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let torch.compile and Triton read and write this folder."""
        folders = {SETTING: str(self.folder)}
        if not (given := os.environ.get(TRITON_SETTING)) or _is_temporary(Path(given)):
            folders[TRITON_SETTING] = str(self.folder / "triton")
        before = {name: os.environ.get(name) for name in folders}
        os.environ |= folders
        try:
            with caching_custom_gradients():
                yield
        finally:
            for name, value in before.items():
                del os.environ[name]
                os.environ |= {} if value is None else {name: value}
            self.held.close()

    def record(self) -> None:
        """Store the digests of all files; without them the folder counts as damaged."""
        with suppress(OSError):
            temporary = self.folder / f"{secrets.token_hex(4)}.tmp"
            temporary.write_text(json.dumps(dict(self._digests()), indent=0), encoding="utf-8")
            temporary.replace(self.folder / DIGESTS)

    def _digests(self) -> Iterator[tuple[str, str]]:
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name != DIGESTS and not name.endswith(UNLISTED):
                yield name, sha256_of(path)

    def _is_intact(self) -> bool:
        """Return whether all listed files are as they were. A folder without a list is of a run that was killed."""
        try:
            digests = json.loads((self.folder / DIGESTS).read_text(encoding="utf-8"))
            return all(sha256_of(self.folder / name) == digest for name, digest in digests.items())
        except (OSError, ValueError, AttributeError):
            return False


def find_compile_cache(config: ModelConfig, device: torch.device) -> CompileCache | None:
    """Return the cache of a model on a device; None if the user has set a folder."""
    if (given := os.environ.get(SETTING)) and not _is_temporary(Path(given)):
        return None
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability()
    versions = torch.__version__, platform.python_version(), platform.machine()
    key = json.dumps([*versions, _source_digest(), device.type, name, io.dumps(config, "json")])
    return CompileCache(user_cache("compiled") / hashlib.sha256(key.encode()).hexdigest()[:24])


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (PACKAGE / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_temporary(folder: Path) -> bool:
    """Return whether this is torch's own folder or in it; torch writes these to the environment when it compiles."""
    temporary = Path(tempfile.gettempdir())
    return any(
        path.name.startswith("torchinductor_") and path.parent == temporary for path in (folder, *folder.parents)
    )
