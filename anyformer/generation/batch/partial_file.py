"""The output of one file: written as OUT.part and renamed when it is complete. Imports no torch.

OUT.part.json records what the predictions depend on, and how far input and output belong together. A later run with
the same record continues after the last window that it names, so the result is that of an undisturbed run.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyformer.config.io import write_file
from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.generation.batch.input_lines import LineReader
from anyformer.generation.batch.stream import Notes
from anyformer.runs.atomic_folder import read_json, writing
from anyformer.runs.processes import locked

SECONDS_BETWEEN_RECORDS = 1.0


class PartialFile:
    """A sink that a killed process leaves in a state which the next one continues."""

    def __init__(self, out: Path, identity: Mapping[str, Any]):
        self.out, self.identity = out, json.loads(json.dumps(identity))
        self.part, self.record = out.with_name(f"{out.name}.part"), out.with_name(f"{out.name}.part.json")
        self.notes = Notes()
        self._recorded = 0.0
        self._pending: tuple[LineReader, Notes] | None = None

    @contextmanager
    def open(self, reader: LineReader) -> Iterator["PartialFile"]:
        """Hold the output for this process, pass over what an earlier run has done, and rename it at the end."""
        with locked(self.out.parent, f".{self.out.name}.lock", self.out):
            written = self._continue(reader)
            with writing(self.out):
                self._file = self.part.open("r+b" if written else "wb")
                self._file.truncate(written)
                self._file.seek(written)
            with self._file:
                try:
                    yield self
                finally:
                    self._save()
            with writing(self.out):
                self.part.replace(self.out)
                self.record.unlink(missing_ok=True)

    def write(self, text: str, reader: LineReader, notes: Notes) -> None:
        with writing(self.out):
            self._file.write(text.encode("utf-8", "backslashreplace"))
        self._pending = reader, notes
        if time.monotonic() - self._recorded >= SECONDS_BETWEEN_RECORDS:
            self._save()

    def _save(self) -> None:
        """Record the last window, after its output has reached the disk."""
        if self._pending is None:
            return
        (reader, notes), self._pending = self._pending, None
        with writing(self.out):
            self._file.flush()
            os.fsync(self._file.fileno())
            done = {"bytes": reader.bytes, "sha256": reader.sha256, "written": self._file.tell(), **notes.as_json()}
            write_file(self.record, json.dumps({"identity": self.identity, "done": done}, indent=1).encode())
        self._recorded = time.monotonic()

    def _continue(self, reader: LineReader) -> int:
        """Pass over the input that an earlier run has read; return the bytes of its output."""
        if not self.part.exists() or not self.record.exists():
            return 0
        found = read_json(self.record)
        identity, done = found.get("identity"), found.get("done")
        if not isinstance(identity, dict) or not isinstance(done, dict):
            raise self._fault("has a damaged record, " + visible(self.record.name))
        names = [name for name in {**identity, **self.identity} if identity.get(name) != self.identity.get(name)]
        if names:
            raise self._fault(f"was begun with another {', '.join(map(visible, names))}")
        written = int(done.pop("written"))
        size, sha256 = int(done.pop("bytes")), done.pop("sha256")
        self.notes = Notes(**done)
        reader.skip(size, self.notes.lines)
        if (reader.bytes, reader.sha256) != (size, sha256):
            raise self._fault(f"was begun with another input: its first {self.notes.lines:,} lines differ")
        if self.part.stat().st_size < written:
            raise self._fault("is shorter than its record says")
        return written

    def _fault(self, what: str) -> ConfigError:
        return ConfigError([Fault(visible(str(self.part)), f"{what}: remove it to begin again")])
