"""Predictions of several files into a folder, in shards: any number of workers, in any order, killed at any time.

The output of a shard is a file in FOLDER/NAME.parts/ whose name has a hash of its lines and of what predictions depend
on. So a shard that is there is never predicted again, and one of other lines, options or weights is never used. When
all shards of a file are there, they are joined to FOLDER/NAME. A hidden record beside it lets a later run skip it.
"""

import hashlib
import io
import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from anyformer.config.io import write_file
from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.generation.batch.input_lines import LineReader
from anyformer.generation.batch.predictor import Predicted, Predictor
from anyformer.generation.batch.stream import Advance, Notes, as_text
from anyformer.runs.atomic_folder import read_json, writing
from anyformer.runs.processes import locked

SHARD_LINES = 4096  # a multiple of the windows, so that shards have the windows of the whole file


class Shard(NamedTuple):
    """Consecutive lines of a file."""

    first: int  # lines before them
    lines: int
    offset: int  # bytes before them
    size: int
    sha256: str


class ShardText(NamedTuple):
    """The lines of a shard, with the number of lines before them, and the file that they are from."""

    lines: list[str]
    first: int
    file: Path


class Workers(Protocol):
    """Predicts shards."""

    def predict(self, shards: Iterable[ShardText]) -> Iterator[tuple[int, Predicted]]:
        """Yield the predictions of each shard with its index, in any order; take shards only when they are needed."""


class LocalWorker:
    """Predicts shards in this process."""

    def __init__(self, predictor: Predictor):
        self._predictor = predictor

    def predict(self, shards: Iterable[ShardText]) -> Iterator[tuple[int, Predicted]]:
        for i, shard in enumerate(shards):
            yield i, predict_shard(self._predictor, shard)


def predict_shard(predictor: Predictor, shard: ShardText) -> Predicted:
    """Return the predictions of a shard, window by window."""
    size = predictor.window
    starts = range(0, len(shard.lines), size)
    try:
        found = [predictor.predict_window(shard.lines[at : at + size], shard.first + at) for at in starts]
    except ConfigError as error:
        raise ConfigError(_in_file(fault, shard.file) for fault in error.faults) from None
    answers, failed, unknown = ([item for one in part for item in one] for part in zip(*found, strict=True))
    return Predicted(answers, failed, unknown)


def _in_file(fault: Fault, file: Path) -> Fault:
    name, _, number = fault.path.partition(" ")
    return Fault(f"{visible(str(file))}: line {number}", fault.message) if name == "text" else fault


def predict_files(
    predictor: Predictor,
    identity: Mapping[str, Any],
    files: Sequence[Path],
    folder: Path,
    workers: Workers,
    advance: Advance,
) -> dict[Path, Notes]:
    """Predict the lines of each file to a file of the same name in a folder. Return notes about each.

    `identity` is what the predictions depend on besides the lines, as JSON.
    """
    names = [file.name for file in files]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError([Fault("FILES", f"two of them are called {visible(min(twice))}: their outputs would be one")])
    if same := next((file for file in files if (folder / file.name).resolve() == file.resolve()), None):
        raise ConfigError([Fault("--out", f"= '{folder}': {visible(str(same))} would be overwritten")])
    known = json.loads(json.dumps(identity))
    notes: dict[Path, Notes] = {}
    taken: dict[int, tuple[_Job, Shard, list[str]]] = {}  # what workers have, by the number of the shard

    def read() -> Iterator[ShardText]:
        number = itertools.count()
        for file in files:
            job = _Job.of(file, _Output(folder / file.name, known))
            advance.skip(sum(shard.size for shard in job.shards) - sum(shard.size for shard in job.missing))
            if not job.missing:
                notes[file] = job.finished or job.output.join(job.shards, job.sha256)
            for shard in list(job.missing):
                lines = _read(file, shard)
                taken[next(number)] = job, shard, lines
                yield ShardText(lines, shard.first, file)

    with locked(folder):
        for i, found in workers.predict(read()):
            job, shard, lines = taken.pop(i)
            job.output.write_part(shard, as_text(predictor, lines, found.answers), found)
            advance(shard.lines, shard.size)
            job.missing.remove(shard)
            if not job.missing:
                notes[job.file] = job.output.join(job.shards, job.sha256)
    return {file: notes[file] for file in files}


class _Job(NamedTuple):
    """A file, its shards and those that have no output yet."""

    file: Path
    output: "_Output"
    shards: list[Shard]
    sha256: str
    finished: Notes | None  # of an output that is complete
    missing: list[Shard]

    @classmethod
    def of(cls, file: Path, output: "_Output") -> "_Job":
        shards, sha256 = plan(file)
        finished = output.finished(sha256)
        missing = [shard for shard in shards if finished is None and not output.part(shard).exists()]
        return cls(file, output, shards, sha256, finished, missing)


def plan(file: Path, lines: int | None = None) -> tuple[list[Shard], str]:
    """Return the shards of a file and the hash of all of it."""
    shards: list[Shard] = []
    with file.open("rb") as raw:
        reader = LineReader(raw, str(file))
        while True:
            first, offset, inner = reader.lines, reader.bytes, reader.start_part()
            if not (read := len(reader.read(lines or SHARD_LINES))):
                return shards, reader.sha256
            shards.append(Shard(first, read, offset, reader.bytes - offset, inner()))


def _read(file: Path, shard: Shard) -> list[str]:
    with file.open("rb") as raw:
        raw.seek(shard.offset)
        found = raw.read(shard.size)
    if hashlib.sha256(found).hexdigest() != shard.sha256:
        raise ConfigError([Fault(visible(str(file)), "was changed while it was read: start again")])
    return LineReader(io.BytesIO(found), str(file)).read(shard.lines)


class _Output:
    """The output of one file: its shards, the joined file, and the record of a finished one."""

    def __init__(self, target: Path, identity: Mapping[str, Any]):
        self.target, self.parts = target, target.with_name(f"{target.name}.parts")
        self.record = target.with_name(f".{target.name}.json")
        self.identity = identity
        self._key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def part(self, shard: Shard) -> Path:
        """Return the path of the output of a shard."""
        key = hashlib.sha256(f"{self._key} {shard.sha256}".encode()).hexdigest()
        return self.parts / f"{shard.first:012d}-{key[:24]}"

    def write_part(self, shard: Shard, text: str, found: Predicted) -> None:
        """Write the output of a shard after a line of notes: all of it is there, or nothing."""
        notes = Notes()
        notes.add(found)
        head = json.dumps(notes.as_json()).encode()
        with writing(self.target):
            self.parts.mkdir(exist_ok=True)
            write_file(self.part(shard), head + b"\n" + text.encode("utf-8", "backslashreplace"))

    def finished(self, sha256: str) -> Notes | None:
        """Return the notes of a complete output; None if it is not complete, or of another input or run."""
        if not self.target.is_file() or not self.record.is_file():
            return None
        found = read_json(self.record)
        same = found.get("identity") == self.identity and found.get("input") == sha256
        return Notes(**found["notes"]) if same and _digest(self.target) == found.get("output") else None

    def join(self, shards: Sequence[Shard], sha256: str) -> Notes:
        """Join the outputs of all shards in order, and remove them."""
        notes, joined = Notes(), self.target.with_name(f"{self.target.name}.part")
        with writing(self.target):
            with joined.open("wb") as out:
                for shard in shards:
                    with self.part(shard).open("rb") as part:
                        notes.merge(Notes(**json.loads(part.readline())))
                        shutil.copyfileobj(part, out)
            record = {"identity": self.identity, "input": sha256, "output": _digest(joined), "notes": notes.as_json()}
            joined.replace(self.target)
            write_file(self.record, json.dumps(record, indent=1).encode())
            shutil.rmtree(self.parts, ignore_errors=True)
        return notes


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
