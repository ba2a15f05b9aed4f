"""Claims on a shared folder: each cell of a grid is trained by one worker at a time, on whatever machine it runs.

A claim is a file `NAME.claim-N`, created exclusively. Its owner renews the file's time while it works. No locks and no
equal clocks are needed, so claims work on network file systems. A claim ends when its owner releases it, when it was
not renewed for `DEAD_AFTER` seconds, or at once if its owner was a process of this machine that has ended. The next
worker then creates `NAME.claim-(N+1)`: of several that try, the file system lets one succeed.
"""

import _thread
import json
import os
import random
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.runs.run import writing

DEAD_AFTER = 60.0  # seconds without a renewal after which a worker counts as dead
SECONDS_BETWEEN_RENEWALS = 10.0
SECONDS_BETWEEN_LOOKS = 1.0  # while waiting for a claim
WHOLE = "all"  # name of the claim on all cells, which excludes every other claim of the folder

CLAIM = re.compile(r"(.+)\.claim-(\d+)")


class Claimed(ConfigError):
    """Another worker holds the claim."""


@contextmanager
def claimed(folder: Path, name: str, wait: bool = False) -> Iterator[None]:
    """Hold a claim. Where another worker holds it, or one that excludes it, `wait` or raise `Claimed`.

    If another worker takes the claim over because this process was suspended, the work is interrupted by `Claimed`.
    """
    with writing(folder):
        while (mine := _take(folder, name)) is None:
            if not wait and (found := holder(folder, name)) is not None:
                raise Claimed([Fault(visible(str(folder)), f"{found}: wait until it ends")])
            time.sleep(SECONDS_BETWEEN_LOOKS if wait else random.uniform(0, 0.1))
    over, lost = threading.Event(), threading.Event()
    thread = threading.Thread(target=_renew, args=(mine, over, lost), daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if not lost.is_set():
            raise
        what = f"{_in_words(name)} taken over: this worker did not renew its claim for {DEAD_AFTER:.0f} s"
        raise Claimed([Fault(visible(str(folder)), what)]) from None
    finally:
        over.set()
        thread.join()
        for claim in sorted(_claims(folder), key=lambda claim: claim.number):  # its own last: until then it is held
            if claim.name == name and claim.number <= mine.number:
                claim.path.unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()  # if it is empty


def holder(folder: Path, name: str) -> str | None:
    """Return who holds a claim, or one that excludes it: "cell 7 is being trained by ..."; None if it is free."""
    found = next((claim for claim in _rivals(folder, name) if _is_alive(claim.path)), None)
    return found and f"{_in_words(found.name)} being trained by {_owner(found.path)}"


def _in_words(name: str) -> str:
    return "all cells are" if name == WHOLE else f"cell {name} is"


class _Claim(NamedTuple):
    """A claim file."""

    path: Path
    name: str
    number: int


def _claims(folder: Path) -> list[_Claim]:
    """Return the claim files of a folder."""
    if not folder.is_dir():
        return []
    found = ((path, CLAIM.fullmatch(path.name)) for path in folder.iterdir())
    return [_Claim(path, match[1], int(match[2])) for path, match in found if match]


def _rivals(folder: Path, name: str) -> list[_Claim]:
    """Return the claims that exclude a claim."""
    return [claim for claim in _claims(folder) if claim.name == name or WHOLE in (name, claim.name)]


def _take(folder: Path, name: str) -> _Claim | None:
    """Create the claim file; return None if another worker holds the claim."""
    folder.mkdir(parents=True, exist_ok=True)
    before = _rivals(folder, name)
    if any(_is_alive(claim.path) for claim in before):
        return None
    number = max((claim.number for claim in before if claim.name == name), default=0) + 1
    mine = _Claim(folder / f"{name}.claim-{number}", name, number)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "machine": _machine(), "started": started}
    content = json.dumps(owner).encode()
    try:
        with mine.path.open("xb", buffering=0) as file:
            file.write(content)
    except (FileExistsError, FileNotFoundError):  # another worker was faster, or has just removed the empty folder
        return None
    # Check again, now that others see this file: if two workers take claims that exclude each other, or one was
    # suspended since the check above, they do not both pass.
    if any(_is_alive(claim.path) for claim in _rivals(folder, name) if claim != mine):
        mine.path.unlink(missing_ok=True)
        return None
    return mine


def _renew(mine: _Claim, over: threading.Event, lost: threading.Event) -> None:
    """Renew a claim until the work is over; interrupt the main thread if the claim is lost."""
    while not over.wait(SECONDS_BETWEEN_RENEWALS):
        try:
            os.utime(mine.path)
            newest = max(claim.number for claim in _claims(mine.path.parent) if claim.name == mine.name)
        except (FileNotFoundError, ValueError):  # removed
            newest = None
        except OSError:
            continue  # a network file system that does not answer for a moment
        if newest != mine.number:
            lost.set()
            _thread.interrupt_main(signal.SIGTERM)  # SIGINT is ignored in the background of a shell
            return


def _is_alive(path: Path) -> bool:
    """Return whether the owner of a claim file may still be working."""
    try:
        with path.open("rb") as file:  # opened, so that a network file system returns its present time
            found, renewed = _content(file.read()), os.fstat(file.fileno()).st_mtime
        if found.get("machine") == _machine() and not _is_running(found.get("pid")):
            return False
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now-") as probe:  # the clock of the file system
            return os.fstat(probe.fileno()).st_mtime - renewed < DEAD_AFTER
    except FileNotFoundError:
        return False


def _owner(path: Path) -> str:
    """Return the process that a claim file names, in words."""
    with suppress(OSError, KeyError):
        found = _content(path.read_bytes())
        return f"process {found['pid']} on {visible(str(found['host']))} since {visible(str(found['started']))}"
    return "another worker"


def _content(text: bytes) -> dict[str, Any]:
    """Return the content of a claim file; empty if it is not written yet."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_running(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return True  # not known
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


@cache
def _machine() -> str:
    """Return what identifies the machine and the container in which process ids of this process are valid."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return socket.gethostname()
