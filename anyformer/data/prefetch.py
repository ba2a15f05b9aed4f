"""Prefetch batches in a forked worker: the training process only fetches them and launches the next step."""

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

from anyformer.attention.media_batch import MediaBatch
from anyformer.data.batch import Batch
from anyformer.data.loader import Cursor, Loader
from anyformer.data.vocabulary import one_thread
from anyformer.runs.processes import end_with_parent

MAX_PREFETCHED = 8  # batches that are prefetched
ALIGNMENT = 64  # alignment of tensors in a slot, in bytes

Read = tuple[Batch, Cursor]


class PrefetchLoader:
    """A loader that prefetches the batches after the last one read. At any other cursor it starts a new worker."""

    def __init__(self, loader: Loader):
        self.loader = loader
        self._worker: PrefetchWorker | None = None
        self._last: tuple[Cursor, Read] | None = None

    @property
    def shapes(self) -> int:
        return self.loader.shapes

    def read(self, cursor: Cursor) -> Read:
        if self._last is not None and self._last[0] == cursor:  # the same batch again
            return self._last[1]
        if self._worker is not None and self._last is not None and self._last[1][1] == cursor:
            try:
                found = self._worker.next()
            except BaseException:
                self.close()
                raise
        else:
            self.close()
            found = self.loader.read(cursor)
            self._worker = PrefetchWorker(self.loader, *found)
        self._last = cursor, found
        return found

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = self._last = None


@contextmanager
def ending(loader: Loader) -> Iterator[None]:
    """End the worker of a loader, if it has one, at the end of the block."""
    try:
        yield
    finally:
        if isinstance(loader, PrefetchLoader):
            loader.close()


def can_fork() -> bool:
    """Return whether this system and this process can fork a worker."""
    return "fork" in get_all_start_methods() and not current_process().daemon


class PrefetchWorker:
    """The prefetching process, a fork of this one with a copy of the loader.

    Tensors are passed in shared memory, in slots of twice the size of the first batch; a larger batch goes through the
    pipe with the other fields.
    """

    def __init__(self, loader: Loader, first: Batch, cursor: Cursor):
        context = get_context("fork")
        room = 2 * sum(x.nbytes for x in _tensors(first).values()) + mmap.PAGESIZE
        slots = [memoryview(mmap.mmap(-1, room)) for _ in range(MAX_PREFETCHED)]
        free, (inbox, outbox) = context.Semaphore(MAX_PREFETCHED), context.Pipe(duplex=False)
        shared = Shared(slots, free, inbox, outbox)
        self.process = context.Process(target=_work, args=(loader, cursor, shared, os.getpid()), daemon=True)
        with one_thread(), warnings.catch_warnings():  # else the library and Python would warn about the fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        outbox.close()
        self._shared, self._slots = shared, cycle(slots)
        # as Python itself does: only in the process that started it, before it joins its children at exit
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
        media = {name.partition(".")[2]: here.pop(name) for name in tensors if name.startswith("media.")}
        return Batch(**here, **facts, media=MediaBatch(**media) if media else None), after


def _end(process: Any) -> None:
    process.kill()
    process.join()


class Shared(NamedTuple):
    slots: Sequence[memoryview]
    free: Any  # number of slots that may be written
    inbox: Any
    outbox: Any


def _work(loader: Loader, cursor: Cursor, shared: Shared, owner: int) -> None:
    """Read batches into the slots that are free, as long as the process that trains runs."""
    end_with_parent(owner)
    gc.freeze()  # garbage of the parent belongs to the parent, and may be on a GPU
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent saves first, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # threads of the parent were not forked
    shared.inbox.close()
    for slot in cycle(shared.slots):
        shared.free.acquire()
        try:
            batch, cursor = loader.read(cursor)
            message: Any = *_put(batch, slot), cursor
        except BaseException as error:
            message = _sendable(error)
        try:
            shared.outbox.send(message)
        except BrokenPipeError:
            return
        if isinstance(message, Exception):
            return


def _sendable(error: BaseException) -> Exception:
    """Return an error that can be pickled: itself with its traceback, or its text."""
    where = "".join(traceback.format_exception(error))
    try:
        if isinstance(ForkingPickler.loads(ForkingPickler.dumps(error)), Exception):
            error.add_note(where)
            return cast(Exception, error)
    except Exception:
        pass
    return RuntimeError(where)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    """Return all tensors of a batch by name; those of its segments as `media.NAME`."""
    found = batch._asdict() | {f"media.{name}": x for name, x in (batch.media or MediaBatch())._asdict().items()}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def _put(batch: Batch, slot: memoryview) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return each tensor's offset in the slot and its type, or the tensor if it does not fit; and the other fields."""
    arrays = {name: x.contiguous().numpy() for name, x in _tensors(batch).items()}
    facts = {name: x for name, x in batch._asdict().items() if name not in (*arrays, "media")}
    if sum(x.nbytes + ALIGNMENT for x in arrays.values()) > len(slot):
        return arrays, facts
    places, at = dict[str, Any](), 0
    for name, x in arrays.items():
        places[name] = x.dtype.str, x.shape, at
        np.frombuffer(slot, x.dtype, x.size, at)[:] = x.ravel()
        at += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    return places, facts


def _found(x: Any, slot: memoryview) -> np.ndarray:
    """Return a copy of one tensor: the slot will be overwritten."""
    if isinstance(x, np.ndarray):
        return x
    dtype, shape, at = x
    return np.frombuffer(slot, dtype, math.prod(shape), at).reshape(shape).copy()
