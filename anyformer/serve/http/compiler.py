"""Compilation of constraints in a separate process, with a deadline.

A regular expression or schema of a few bytes can take minutes to compile. The process is killed at the deadline, and
the next request starts another one. It reads pickled jobs from its standard input and writes pickled results; both
ends are this server, so no pickle comes from a client.
"""

import asyncio
import json
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from anyformer.config.spec import ConfigError, Fault
from anyformer.data.tokenizer import TextTokenizer
from anyformer.decoding.constraints.constraint import Constraint, TextConstraint
from anyformer.serve.http.errors import ApiError
from anyformer.tasks.output_constraints import OutputConstraints, tokenise

START_SECONDS = 60.0  # until a new process has imported what it needs
MAX_KEPT = 64  # compiled constraints
MAX_WAITING = 32  # requests that wait for the process
HEADER = 8  # bytes of the length before each message


class Rules(NamedTuple):
    """Source of a constraint, besides the model."""

    kind: str  # a field of `OutputConstraints`
    value: str | tuple[str, ...]  # for `json_schema`: its JSON
    alone: bool  # the answer is a text, not the continuation of one

    def constraints(self) -> OutputConstraints:
        value: Any = (
            json.loads(self.value) if self.kind == "json_schema" and isinstance(self.value, str) else self.value
        )
        return OutputConstraints(**{self.kind: value})


class Vocabulary(NamedTuple):
    """The model's side of a constraint: its tokenizer, the size of its vocabulary, and the ids that end an answer."""

    tokenizer: TextTokenizer
    size: int
    stop: tuple[int, ...]


Key = tuple[str, Vocabulary, Rules]


@dataclass(eq=False)
class Compilation:
    """A constraint that is being compiled, or waits for it: for all requests that need it."""

    task: "asyncio.Task[None]"
    requests: int = 0
    started: bool = False


class Compiler:
    """Compiles constraints, one at a time, and keeps the latest.

    A compilation that has begun is completed even if its request is cancelled: the process serves all requests.
    """

    def __init__(self, seconds: float, states: int):
        self._seconds, self._states = seconds, states
        self._process: Process | None = None
        self._lock, self._closing = asyncio.Lock(), False
        self._pending: dict[Key, Compilation] = {}
        self._kept: OrderedDict[Key, Constraint] = OrderedDict()
        self._sent: set[Vocabulary] = set()  # tokenizers that the process has

    async def compile(self, model: str, vocabulary: Vocabulary, rules: Rules) -> Constraint:
        """Return the constraint. Raise an `ApiError` if it is wrong, too large, or not compiled in time."""
        key = model, vocabulary, rules
        if key not in self._kept:
            pending = self._pending.get(key) or self._add(key)
            pending.requests += 1
            try:
                await asyncio.shield(pending.task)
            finally:
                pending.requests -= 1
                if not pending.requests and not pending.started:
                    pending.task.cancel()
        self._kept.move_to_end(key)
        return self._kept[key]

    def _add(self, key: Key) -> Compilation:
        if len(self._pending) >= MAX_WAITING:
            raise ApiError(429, f"{MAX_WAITING} constraints are waiting to be compiled: try again later")
        pending = self._pending[key] = Compilation(asyncio.create_task(self._compile(key)))

        def done(task: "asyncio.Task[None]") -> None:
            del self._pending[key]
            if not task.cancelled():
                task.exception()  # retrieved, also if no request waits for it

        pending.task.add_done_callback(done)
        return pending

    async def _compile(self, key: Key) -> None:
        _, vocabulary, rules = key
        async with self._lock:
            self._pending[key].started = True
            if self._closing:
                raise ApiError(503, "the server is shutting down")
            self._kept[key] = await self._ask(vocabulary, rules)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    async def _ask(self, vocabulary: Vocabulary, rules: Rules) -> Constraint:
        try:
            process = await self._started(vocabulary)
            async with asyncio.timeout(self._seconds):
                await _send(process, (_key(vocabulary), rules, self._states))
                done, result = await _receive(process)
        except TimeoutError:
            await self._kill()
            what = f"could not be compiled in {self._seconds:g} s: use a simpler one"
            raise ApiError(400, f"{rules.kind}: {what}", param=rules.kind, code="constraint_too_complex") from None
        except (OSError, EOFError, asyncio.IncompleteReadError):
            await self._kill()
            if self._closing:
                raise ApiError(503, "the server is shutting down") from None
            what = "needs too much memory to compile: use a simpler one"
            raise ApiError(400, f"{rules.kind}: {what}", param=rules.kind, code="constraint_too_complex") from None
        if not done:
            raise ConfigError([Fault(*fault) for fault in result])
        return result

    async def _started(self, vocabulary: Vocabulary) -> Process:
        """Return the process, which has this vocabulary."""
        if self._process is None or self._process.returncode is not None:
            path = os.pathsep.join(part for part in sys.path if part)
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            command = sys.executable, "-m", "anyformer.serve.http.compiler"
            self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)
            self._sent.clear()
            async with asyncio.timeout(START_SECONDS):
                await _receive(self._process)
        if vocabulary not in self._sent:
            async with asyncio.timeout(START_SECONDS):
                await _send(self._process, (_key(vocabulary), vocabulary, self._states))
                await _receive(self._process)
            self._sent.add(vocabulary)
        return self._process

    async def close(self) -> None:
        """End all compilations and the process."""
        self._closing = True
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # `Process.kill` would reap it before asyncio does
            await process.wait()


async def _send(process: Process, message: Any) -> None:
    data = pickle.dumps(message)
    assert process.stdin is not None
    process.stdin.write(len(data).to_bytes(HEADER, "little") + data)
    await process.stdin.drain()


async def _receive(process: Process) -> Any:
    assert process.stdout is not None
    size = int.from_bytes(await process.stdout.readexactly(HEADER), "little")
    return pickle.loads(await process.stdout.readexactly(size))


def _key(vocabulary: Vocabulary) -> tuple[int, int, tuple[int, ...]]:
    return id(vocabulary.tokenizer), vocabulary.size, vocabulary.stop


# -- in the process ---------------------------------------------------------------------------------------------------


def main(requests: BinaryIO, results: BinaryIO) -> None:
    """Compile until the input ends."""
    _write(results, "ready")
    known: dict[Any, Vocabulary] = {}
    while header := requests.read(HEADER):
        key, what, states = pickle.loads(requests.read(int.from_bytes(header, "little")))
        if isinstance(what, Vocabulary):
            known[key], what = what, Rules("regex", "", True)  # the empty pattern prepares the tables
        result: tuple[bool, Any]
        try:
            result = True, _compile(known[key], what, states)
        except ConfigError as error:
            result = False, [tuple(fault) for fault in error.faults]
        except RecursionError:
            result = False, [(what.kind, "is nested too deeply")]
        _write(results, result)


def _compile(vocabulary: Vocabulary, rules: Rules, states: int) -> Constraint:
    tokenizer, size, stop = vocabulary
    constraint = tokenise(rules.constraints(), tokenizer, size, stop, rules.alone).constraint
    assert constraint is not None
    if isinstance(constraint, TextConstraint) and constraint.parts > states:
        raise ConfigError([Fault(rules.kind, f"has {constraint.parts:,} states, and the limit is {states:,}")])
    return constraint


def _write(results: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    results.write(len(data).to_bytes(HEADER, "little") + data)
    results.flush()


if __name__ == "__main__":
    from anyformer.serve.http import compiler  # pickled classes are those of the module, not of `__main__`

    compiler.main(sys.stdin.buffer, sys.stdout.buffer)
