"""Windows of lines from a reader to a sink, and notes about lines that failed or hold unknown tokens."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Protocol

from anyformer.generation.batch.input_lines import LineReader
from anyformer.generation.batch.predictor import Predicted, Predictor

MAX_NAMED = 10  # lines that a note names


class Advance(Protocol):
    """Counts the progress of a job."""

    def __call__(self, lines: int, size: int) -> None:
        """Count lines, and bytes of the input, that have been processed."""

    def skip(self, size: int) -> None:
        """Count bytes of the input that an earlier run has processed."""


@dataclass
class Notes:
    """Counts of lines, and the numbers of the first ones that failed or hold unknown tokens."""

    lines: int = 0
    failures: int = 0
    failed: list[int] = field(default_factory=list)
    unknowns: int = 0
    unknown: list[int] = field(default_factory=list)

    def add(self, found: Predicted) -> None:
        self.merge(Notes(len(found.answers), len(found.failed), found.failed, len(found.unknown), found.unknown))

    def merge(self, other: "Notes") -> None:
        self.lines += other.lines
        self.failures += other.failures
        self.unknowns += other.unknowns
        self.failed = (self.failed + other.failed)[:MAX_NAMED]
        self.unknown = (self.unknown + other.unknown)[:MAX_NAMED]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Sink(Protocol):
    """Where predictions are written."""

    def write(self, text: str, reader: LineReader, notes: Notes) -> None:
        """Add the predictions of a window; the reader and the notes are as after it."""


class TextSink:
    """Predictions to a stream, which are visible after each window."""

    def __init__(self, file: IO[str]):
        self._file = file

    def write(self, text: str, reader: LineReader, notes: Notes) -> None:
        self._file.write(text)
        self._file.flush()


def predict_stream(predictor: Predictor, reader: LineReader, sink: Sink, notes: Notes, advance: Advance) -> None:
    """Predict all lines that a reader has left. Only one window of lines is in memory."""
    before = reader.bytes
    while lines := reader.read(predictor.window):
        found = predictor.predict_window(lines, notes.lines, _within(len(lines), advance))
        notes.add(found)
        sink.write(as_text(predictor, lines, found.answers), reader, notes)
        advance(0, reader.bytes - before)
        before = reader.bytes


def as_text(predictor: Predictor, lines: Sequence[str], answers: Sequence[str]) -> str:
    """Return predictions, one per line; with scores, each before its text."""
    if predictor.options.get("scores"):
        answers = [f"{answer}\t{line}" for answer, line in zip(answers, lines, strict=True)]
    return "".join(f"{answer}\n" for answer in answers)


def _within(count: int, advance: Advance) -> Callable[[int], None]:
    """Return a function that passes on at most `count` lines in all: candidate labels are texts, too."""
    left = count

    def limited(more: int) -> None:
        nonlocal left
        more = min(more, left)
        left -= more
        advance(more, 0)

    return limited
