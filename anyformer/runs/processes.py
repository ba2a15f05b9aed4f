"""Processes beside each other: locks on folders, temporary folders, restarts, workers that end with their parent.

Imports no torch.
"""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path

from anyformer.config.spec import ConfigError, Fault, visible

LOCK = ".anyformer-lock"
PATIENCE = 2.0  # seconds to wait for a lock: the workers of a killed process may hold it for a moment
VISIBLE_SECONDS = 60.0  # in which a file appears on all nodes: NFS remembers as long that there was none
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends


# -- locks ------------------------------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path, name: str = LOCK, target: Path | None = None, wait: bool = False) -> Iterator[None]:
    """Hold a folder for this process. Where another one holds it, `wait`, or raise a `ConfigError` that names it.

    The kernel releases the lock (`flock`) however the process ends, so the file of a killed process is taken over.
    A folder that is missing is created, and removed at the end if it is still empty. `target` is the folder that error
    messages name, if it is another one.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    handle = _acquire(folder, name, target or folder, wait)
    try:
        yield
    finally:
        (folder / name).unlink(missing_ok=True)
        os.close(handle)
        for path in made:
            with suppress(OSError):
                path.rmdir()


def is_locked(folder: Path, name: str = LOCK) -> bool:
    """Return whether a process holds a folder now."""
    try:
        handle = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _try(handle) is False
    finally:
        os.close(handle)


def read_lock(folder: Path) -> bytes:
    """Return what the owner of a folder wrote into its lock file; empty if there is none."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return _content(handle)
    finally:
        os.close(handle)


def check_shared(folder: Path, lock: bytes) -> None:
    """Raise a `ConfigError` if this process does not find the lock file that another one wrote into the folder."""
    until = time.monotonic() + VISIBLE_SECONDS
    while read_lock(folder) != lock:
        if time.monotonic() > until:
            what = f"not found on {socket.gethostname()} ({_owner(lock)} writes there): --out must be a folder"
            raise _fault(folder.absolute(), f"{what} that all nodes share")
        time.sleep(0.02)


def _acquire(folder: Path, name: str, target: Path, wait: bool) -> int:
    """Return the open lock file."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except FileNotFoundError:  # removed by another process since the line before
            continue
        except (FileExistsError, NotADirectoryError):
            raise _fault(target, "is not a folder") from None
        except OSError as error:
            raise _fault(target, f"cannot be written: {error.strerror}") from None
        got = _try(handle)
        if got is None:
            warnings.warn(
                f"{target}: its file system has no locks: let one process at a time write there", stacklevel=4
            )
        if got is not False and _is_there(handle, folder / name):
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            os.ftruncate(handle, 0)
            os.write(
                handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}).encode()
            )
            return handle
        owner = _owner(_content(handle))
        os.close(handle)
        if time.monotonic() > until:
            if not wait:
                raise _fault(target, f"is in use by {owner}: wait until it ends, or choose another --out")
            warnings.warn(f"{target}: waiting for {owner}", stacklevel=4)
            until = float("inf")
        time.sleep(0.02)


def _try(handle: int) -> bool | None:
    """Return whether this process has the lock now; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_there(handle: int, path: Path) -> bool:
    """Return whether the file is still the one at the path: its last owner may have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _content(handle: int) -> bytes:
    """Return the content of an open lock file; empty if it cannot be read, such as that of a pipe."""
    try:
        return os.pread(handle, 4096, 0)
    except OSError:
        return b""


def _owner(lock: bytes) -> str:
    """The process that the content of a lock file names."""
    try:
        found = json.loads(lock)
        return f"process {int(found['pid'])} on {visible(str(found['host']))} since {visible(str(found['started']))}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def _fault(path: Path, message: str) -> ConfigError:
    return ConfigError([Fault(visible(str(path)), message)])


# -- temporary folders ------------------------------------------------------------------------------------------------


@contextmanager
def workspace(target: Path) -> Iterator[Path]:
    """An empty, locked folder `.tmp-NAME` beside a target that is about to be written; removed at the end."""
    folder = target.with_name(f".tmp-{target.name}")
    remove_abandoned(target.parent, ".tmp-*")
    with locked(folder, target=target):
        for path in folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A locked folder in the system's folder for temporary files; removed at the end, or by the next call if killed."""
    remove_abandoned(Path(tempfile.gettempdir()), f"{prefix}*")
    with tempfile.TemporaryDirectory(prefix=prefix) as name, locked(Path(name)):
        yield Path(name)


def remove_abandoned(home: Path, pattern: str) -> None:
    """Remove the temporary folders of processes that are gone: those with a lock file that is free."""
    for folder in home.glob(pattern):
        with suppress(OSError):
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _try(handle) and _is_there(handle, folder / LOCK):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


# -- restarts by torchrun ---------------------------------------------------------------------------------------------


def restart_count() -> int:
    """Return how often torchrun has restarted the processes of this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def record_failure(reason: str, exit_code: int | None = None) -> None:
    """Write why this process ends to the file that torchrun reports.

    An `exit_code` means that another attempt would end in the same way: restarted processes exit with it at once.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time())), "final_exit_code": exit_code}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}), encoding="utf-8")


def final_failure() -> tuple[str, int] | None:
    """Return reason and exit code of an earlier attempt, if torchrun restarted it although it cannot succeed."""
    path, count = os.environ.get("TORCHELASTIC_ERROR_FILE"), restart_count()
    if not path or not count:
        return None
    before = Path(path).parents[1].with_name(f"attempt_{count - 1}")  # torchrun: LOGS/attempt_N/LOCAL_RANK/error.json
    for file in sorted(before.glob(f"*/{Path(path).name}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            message = json.loads(file.read_bytes())["message"]
            return str(message["message"]), int(message["extraInfo"]["final_exit_code"])
    return None


# -- workers ----------------------------------------------------------------------------------------------------------


def end_with_parent(parent: int) -> None:
    """Let this worker be killed as soon as its parent, the process with this id, has ended, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_follow, daemon=True).start()
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _follow() -> None:
    owner = parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)
