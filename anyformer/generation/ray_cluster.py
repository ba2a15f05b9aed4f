"""Ray clusters (extra `ray`): connect to one, or start one on this machine that ends with its context.

Nothing is uploaded: workers import the packages of their machine, and Ray sends no usage statistics. A cluster of
this machine accepts only processes that know its token.
"""

import importlib
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from anyformer import __version__
from anyformer.config.spec import ConfigError, Fault
from anyformer.kernels.hardware import usable_cores
from anyformer.runs.processes import scratch

OBJECT_STORE_BYTES = 256 * 2**20  # memory of a cluster of this machine for arguments and results
SECONDS_TO_CONNECT = 10.0
MAX_HOME_LENGTH = 30  # characters: Ray's sockets lie below, and the path of a socket has at most 107


@contextmanager
def ray_cluster(address: str | None, cpus: int = 0) -> Iterator[Any]:
    """Yield the module `ray`, connected to the cluster at an address, or to a new one on this machine.

    A new cluster has the GPUs of this machine, and its cores or `cpus`, if these are more.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # else `uv run` uploads the working directory
    if address is None and "ray" not in sys.modules:  # Ray reads these when it is imported
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # the ports of a cluster are open to the network
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError([Fault("--engine", "= ray needs the package ray: pip install 'anyformer[ray]'")]) from None
    given: dict[str, Any] = {"address": address}
    with ExitStack() as stack:
        if address is None:
            given = {"address": "local", "num_cpus": max(usable_cores(), cpus), "include_dashboard": False}
            given["object_store_memory"] = OBJECT_STORE_BYTES
            if len(tempfile.gettempdir()) < MAX_HOME_LENGTH:
                given["_temp_dir"] = str(stack.enter_context(scratch("anyformer-ray-")) / "ray")
        else:
            _must_answer(address)
        stack.callback(ray.shutdown)
        try:
            ray.init(**given, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises plain ones, too, such as where a machine under load is too slow
            place, what = "--address", f"= '{address}'"
            if address is None:
                place, what = "--engine", "= ray: no cluster started on this machine"
            raise ConfigError([Fault(place, f"{what}: {_first_line(error)}")]) from None
        yield ray


def prepare_worker(folder: str, threads: int, version: str) -> None:
    """Prepare a process of the cluster: in the folder of the driver, if it is there, and with its version."""
    import torch

    if version != __version__:
        what = f"has anyformer {__version__}, not {version}: install the same version on all machines"
        raise ConfigError([Fault(os.uname().nodename, what)])
    if Path(folder).is_dir():
        os.chdir(folder)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(threads)


def get_result(ray: Any, ready: Any, place: str, kept: str, attempts: int) -> Any:
    """Return the result of a task. Raise its own error, or a `ConfigError` at `place` if its worker died each time."""
    try:
        return ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        why = f"a worker died {attempts} times, without memory or killed; finished {kept} are kept"
        raise ConfigError([Fault(place, f"{why} ({type(error).__name__})")]) from None


def _must_answer(address: str) -> None:
    """Raise if nothing listens at HOST:PORT: Ray would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return  # auto, or a name that Ray resolves
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise ConfigError([Fault("--address", f"= '{address}': no Ray cluster answers there ({error})")]) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
