"""A folder with a manifest: written atomically, verified by SHA-256.

A folder is filled under another name, synced and renamed, so that a reader sees all of it or nothing. `manifest.json`
is written last and holds the SHA-256 of each file and of itself. A file that is missing, changed, cut short or not a
regular file is refused by name. No pickle is read. Importing it imports no torch.
"""

import hashlib
import json
import os
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import did_you_mean, is_file_name, visible
from anyformer.runs.processes import LOCK, workspace

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
MAX_FAULTS = 10  # tensors that an error names


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Write a new folder with what `fill` writes into it and a manifest: all of it is there, or nothing."""
    with new_folder(folder) as temporary, writing(folder):
        fill(temporary)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. At the end it gets a manifest and is renamed to `folder`, which must be new."""
    with workspace(folder) as temporary:
        if os.path.lexists(folder):
            raise ConfigError([Fault(visible(str(folder)), "exists already; choose another --out")])
        yield temporary
        with writing(folder):
            seal(temporary, (path.name for path in temporary.iterdir() if path.is_file() and path.name != LOCK))
            temporary.rename(folder)
            (folder / LOCK).unlink()
            _sync(folder.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a full disk, and any other error of a write, as a `ConfigError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([Fault(str(path), f"cannot be written: {reason}")]) from None


def remove(folder: Path) -> None:
    """Remove a folder: it disappears at once, and `remove_leftovers` completes an interrupted removal."""
    gone = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def seal(folder: Path, names: Iterable[str]) -> None:
    """Sync some files of a folder to disk, then write their manifest."""
    files = sorted(names)
    for name in files:
        _sync(folder / name)
    digests = {name: _digest(folder / name) for name in files}
    temporary = folder / f".{MANIFEST}.tmp"
    temporary.write_text(json.dumps({"files": digests, "sha256": _digest_of(digests)}, indent=2), encoding="utf-8")
    _sync(temporary)
    temporary.replace(folder / MANIFEST)
    _sync(folder)


def verify(folder: Path) -> frozenset[str]:
    """Return the names of the files that the manifest lists. Raise a `ConfigError` that names each damaged one."""
    digests = _read_manifest(folder)
    if faults := [fault for name, digest in digests.items() if (fault := _damage(folder, name, digest))]:
        raise ConfigError(faults)
    return frozenset(digests)


def verify_file(folder: Path, name: str) -> Path:
    """Return the path of one file of a folder. Raise a `ConfigError` if it is damaged; other files are not read."""
    digests = _read_manifest(folder)
    if name not in digests:
        raise ConfigError([Fault(visible(str(folder / name)), f"is not in {MANIFEST}")])
    if fault := _damage(folder, name, digests[name]):
        raise ConfigError([fault])
    return folder / name


def _absent(folder: Path) -> str:
    """Return what to say about a folder that does not exist, with the runs beside it."""
    beside = [path.parent.name for path in folder.parent.glob(f"*/{MANIFEST}")] if folder.parent.is_dir() else []
    return "there is no such folder" + (f"; {did_you_mean(folder.name, beside)}" if beside else "")


def _read_manifest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder by its manifest; its own checksum is verified if it has one."""
    manifest = folder / MANIFEST
    if not os.path.lexists(manifest):
        what = "is not a finished run: it has no manifest.json" if folder.is_dir() else _absent(folder)
        raise ConfigError([Fault(visible(str(folder)), what)])
    content = read_json(manifest)
    digests = content.get("files")
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise ConfigError([Fault(visible(str(manifest)), "lists no files: it is damaged")])
    if "sha256" in content and content["sha256"] != _digest_of(digests):  # manifests of earlier versions have none
        raise ConfigError([Fault(visible(str(manifest)), "does not match its own checksum: it was changed")])
    return digests


def _damage(folder: Path, name: str, digest: str) -> Fault | None:
    path = folder / name
    if not is_file_name(name) or not os.path.lexists(path):
        return Fault(visible(str(path)), "is missing")
    try:
        same = _digest(must_be_file(path)) == digest
    except OSError as error:
        return Fault(visible(str(path)), f"cannot be read: {error.strerror}")
    except ConfigError as error:
        return error.faults[0]
    what = "is not the file that was written: it was changed, swapped or cut short"
    return None if same else Fault(visible(str(path)), what)


def must_be_file(path: Path) -> Path:
    """Return the path. Raise a `ConfigError` for a folder, a pipe or a device, which reading may never finish."""
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise ConfigError([Fault(visible(str(path)), "is not a regular file")])
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    try:
        content = json.loads(must_be_file(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError([Fault(visible(str(path)), f"cannot be read: {error.strerror}")]) from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else visible(str(error))
        raise ConfigError([Fault(visible(str(path)), f"is not JSON: {what}")]) from None
    if not isinstance(content, dict):
        raise ConfigError([Fault(visible(str(path)), "must hold an object: { ... }")])
    return content


def write_tensors(path: Path, tensors: "dict[str, Tensor]") -> None:
    """Write a .safetensors file with the permissions of the config.json beside it."""
    from safetensors.torch import save_file  # it imports torch

    save_file({name: x.detach().contiguous().cpu() for name, x in tensors.items()}, path)
    shutil.copymode(path.with_name("config.json"), path)  # safetensors lets only the owner read


def read_tensors(path: Path, prefix: str = "") -> "dict[str, Tensor]":
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  not a dict
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ConfigError([Fault(str(path), f"cannot be read: {error}")]) from None


def check_weights(folder: Path, wanted: "dict[str, Tensor]", weights: "dict[str, Tensor]") -> None:
    """Raise a `ConfigError` where the weights of a folder are not those its model wants; warn of NaN and Inf."""
    path = str(folder / "model.safetensors")
    faults = [Fault(path, f"has no tensor {name}, which the model needs") for name in wanted if name not in weights]
    for name, x in weights.items():
        if name not in wanted:
            faults.append(Fault(path, f"has a tensor {visible(name)}, which the model does not have"))
        elif x.shape != wanted[name].shape:
            faults.append(Fault(path, f"{name} has the shape {[*x.shape]}; the model needs {[*wanted[name].shape]}"))
        elif x.is_floating_point() != wanted[name].is_floating_point():
            faults.append(Fault(path, f"{name} is {x.dtype}; the model needs {wanted[name].dtype}"))
    if len(kinds := {x.dtype for x in weights.values() if x.dim() > 1 and x.is_floating_point()}) > 1:
        named = " and ".join(sorted(map(str, kinds)))
        faults.append(Fault(path, f"has matrices of {named}: all must be of one type"))
    if faults:
        more = [Fault(path, f"and {len(faults) - MAX_FAULTS} more")] if len(faults) > MAX_FAULTS else []
        raise ConfigError([*faults[:MAX_FAULTS], *more])
    if nonfinite := [name for name, x in weights.items() if not x.isfinite().all()]:
        shown = ", ".join(nonfinite[:3]) + (", ..." if len(nonfinite) > 3 else "")
        warnings.warn(f"{path}: NaN or Inf in {len(nonfinite)} of {len(weights)} tensors: {shown}", stacklevel=3)


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary folders and files of writes that were killed."""
    return [*folder.glob(".tmp-*"), *folder.glob(".anyformer-*.tmp")]


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders and files of writes that were killed. The caller holds the lock of the folder."""
    for stale in leftovers(folder):
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(digests: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
