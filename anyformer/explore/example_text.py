"""A text to begin with: one of the data that a run was trained on, where that is there."""

from pathlib import Path

from anyformer.config import ConfigError, io
from anyformer.data.files import locate
from anyformer.data.readers import read
from anyformer.data.synthetic import generate
from anyformer.recipe import (
    Additions,
    CopyDigits,
    Data,
    JoinedSources,
    MixedSources,
    MixturePart,
    Recipe,
    ReverseDigits,
    Shards,
    SortDigits,
    Source,
    WrittenDates,
)
from anyformer.run import Run
from anyformer.tasks.mlm import MaskedLanguageModelling
from anyformer.tasks.sequence_level import RowTask

EXAMPLE = "The quick brown fox jumps over the lazy dog."
SECOND = "A fox jumps."
LARGE = 8 * 2**20  # bytes of a file that is not read for the sake of one row
LONG = 80  # characters
DRAWN = 8  # rows of which the longest is shown


def example(run: Run, folder: Path) -> tuple[str, str]:
    """A text, and the second of a pair where texts come in pairs."""
    row: dict[str, str] = {}
    try:
        data = io.load(Recipe, folder / "recipe.toml").data
        row = _row(run, data.valid or data.train, data)
    except (ConfigError, OSError):  # the run came from elsewhere, or its data is elsewhere
        pass
    text = _short(row.get("source") or row.get("text") or "") or EXAMPLE
    if isinstance(run.task, MaskedLanguageModelling) and len(words := text.split(" ")) > 1:
        words[len(words) // 2] = run.tokenizer.token(run.task.mask)
        text = " ".join(words)
    pairs = isinstance(run.task, RowTask) and run.task.pairs
    return text, _short(row.get("pair", "")) or (SECOND if pairs else "")


def _row(run: Run, source: Source, data: Data) -> dict[str, str]:
    """One of the first rows of a source, by column; nothing where it is long to read."""
    match source:
        case JoinedSources(parts=parts):
            return _row(run, parts[0], data)
        case MixedSources(parts=mixed):
            name = run.spec.name if isinstance(run.spec, MixturePart) else mixed[0].name
            return _row(run, next(part.rows for part in mixed if part.name == name), data)
        case Shards():
            return {}
        case SortDigits() | CopyDigits() | ReverseDigits() | WrittenDates() | Additions():
            columns = generate(source.model_copy(update={"count": DRAWN}), "valid", 0)
        case _:
            first = str(getattr(source, "path", None) or getattr(source, "source", ""))
            path = locate(first, data)
            if not path.is_file() or path.stat().st_size > LARGE:
                return {}
            columns = read(source, data, "valid", 0).columns
    texts = columns.get("source") or columns.get("text") or []
    longest = max(range(min(DRAWN, len(texts))), key=lambda i: len(texts[i]), default=None)
    return {} if longest is None else {role: values[longest] for role, values in columns.items()}


def _short(text: str) -> str:
    """The beginning of a text, up to the end of a line or of a word."""
    lines = [line.strip() for line in text.splitlines()[:DRAWN]]
    first = max(lines, key=len, default="")
    return first if len(first) <= LONG else first[:LONG].rpartition(" ")[0] or first[:LONG]
