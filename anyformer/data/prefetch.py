"""Batches that a process of their own reads ahead: who trains on a GPU only fetches them, and starts the next step."""

import gc
import math
import mmap
import os
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from multiprocessing import current_process, get_all_start_methods, get_context
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from anyformer.data.batch import Batch
from anyformer.data.loader import Cursor, Loader
from anyformer.data.vocabulary import one_thread
from anyformer.processes import end_with_parent

SLOTS = 8  # batches that are there before they are asked for
ALIGNED = 64  # bytes to which places in a slot are rounded up

Read = tuple[Batch, Cursor]


class PrefetchLoader:
    """A loader that reads on from the place that was asked for last. Anywhere else it begins anew."""

    def __init__(self, loader: Loader):
        self.loader = loader
        self._forked: PrefetchWorker | None = None
        self._last: tuple[Cursor, Read] | None = None

    def read(self, place: Cursor) -> Read:
        if self._last is not None and self._last[0] == place:  # once more
            return self._last[1]
        if self._forked is not None and self._last is not None and self._last[1][1] == place:
            try:
                found = self._forked.next()
            except BaseException:
                self.close()
                raise
        else:
            self.close()
            found = self.loader.read(place)
            self._forked = PrefetchWorker(self.loader, *found)
        self._last = place, found
        return found

    def close(self) -> None:
        if self._forked is not None:
            self._forked.close()
        self._forked = self._last = None


@contextmanager
def ending(loader: Loader) -> Iterator[None]:
    """A process that reads ahead does not outlive what is done here."""
    try:
        yield
    finally:
        if isinstance(loader, PrefetchLoader):
            loader.close()


def can_fork() -> bool:
    """Whether this system, and this process, may have such a reader."""
    return "fork" in get_all_start_methods() and not current_process().daemon


class PrefetchWorker:
    """The process that reads, a fork of this one: it has all that the loader has. Tensors come through memory that both
    share, in slots with room for twice the first batch; a larger one comes through the pipe with the rest."""

    def __init__(self, loader: Loader, first: Batch, place: Cursor):
        context = get_context("fork")
        room = 2 * sum(x.nbytes for x in first if isinstance(x, Tensor)) + mmap.PAGESIZE
        slots = [memoryview(mmap.mmap(-1, room)) for _ in range(SLOTS)]
        free, (inbox, outbox) = context.Semaphore(SLOTS), context.Pipe(duplex=False)
        shared = Shared(slots, free, inbox, outbox)
        self.process = context.Process(target=_work, args=(loader, place, shared, os.getpid()), daemon=True)
        with one_thread(), warnings.catch_warnings():  # or the library, and Python, would warn of the fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        outbox.close()
        self._shared, self._slots = shared, cycle(slots)
        # Python's own way: by nobody but who began it, and before it waits for its processes at the end
        self.close = Finalize(self, _end, (self.process,), exitpriority=1)

    def next(self) -> Read:
        try:
            found = self._shared.inbox.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            why = ": was memory short?" if code == -signal.SIGKILL else ""
            raise RuntimeError(f"the process that reads batches has ended with {code}{why}") from None
        if isinstance(found, Exception):
            raise found
        tensors, facts, after = found
        slot = next(self._slots)
        here: dict[str, Any] = {name: torch.from_numpy(_found(x, slot)) for name, x in tensors.items()}
        self._shared.free.release()
        return Batch(**here, **facts), after


def _end(process: Any) -> None:
    process.kill()
    process.join()


class Shared(NamedTuple):
    slots: Sequence[memoryview]
    free: Any  # how many of them may be written
    inbox: Any
    outbox: Any


def _work(loader: Loader, place: Cursor, shared: Shared, owner: int) -> None:
    """Read batches into the slots that are free, as long as the process that trains runs."""
    end_with_parent(owner)
    gc.freeze()  # what the owner has left behind is the owner's, and may be a GPU's
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever trains saves first, reads on for it, and ends this one
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # those of the other process were not forked
    shared.inbox.close()
    for slot in cycle(shared.slots):
        shared.free.acquire()
        try:
            batch, place = loader.read(place)
            message: Any = *_put(batch, slot), place
        except BaseException as error:
            message = _sendable(error)
        try:
            shared.outbox.send(message)
        except BrokenPipeError:
            return
        if isinstance(message, Exception):
            return


def _sendable(error: BaseException) -> Exception:
    """As it is, with where it arose, or as a text."""
    where = "".join(traceback.format_exception(error))
    try:
        if isinstance(ForkingPickler.loads(ForkingPickler.dumps(error)), Exception):
            error.add_note(where)
            return cast(Exception, error)
    except Exception:
        pass
    return RuntimeError(where)


def _put(batch: Batch, slot: memoryview) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where in the slot each tensor is, and of which kind, or the tensor itself where there is no room; the rest."""
    arrays = {name: x.contiguous().numpy() for name, x in batch._asdict().items() if isinstance(x, Tensor)}
    facts = {name: x for name, x in batch._asdict().items() if name not in arrays}
    if sum(x.nbytes + ALIGNED for x in arrays.values()) > len(slot):
        return arrays, facts
    places, at = dict[str, Any](), 0
    for name, x in arrays.items():
        places[name] = x.dtype.str, x.shape, at
        np.frombuffer(slot, x.dtype, x.size, at)[:] = x.ravel()
        at += -(-x.nbytes // ALIGNED) * ALIGNED
    return places, facts


def _found(x: Any, slot: memoryview) -> np.ndarray:
    """One of them, for good: the slot is written again."""
    if isinstance(x, np.ndarray):
        return x
    dtype, shape, at = x
    return np.frombuffer(slot, dtype, math.prod(shape), at).reshape(shape).copy()
