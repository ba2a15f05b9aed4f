"""The text that the page shows first: an example of the run's own data if it is available."""

from pathlib import Path
from typing import assert_never

from anyformer.config import ConfigError, io
from anyformer.data.files import locate
from anyformer.data.readers import read
from anyformer.data.synthetic import generate
from anyformer.recipe import (
    Additions,
    ArrayFile,
    ClassFolders,
    ConllFile,
    Data,
    Digits,
    JoinedSources,
    KeyToDoorWalks,
    MatchedLines,
    MixedSources,
    MixturePart,
    ParallelFiles,
    Recipe,
    Scenes,
    Shards,
    SoundFiles,
    Source,
    TableFile,
    TextFile,
    Trajectories,
    WrittenDates,
)
from anyformer.run import Run
from anyformer.tasks.mlm import MaskedLanguageModelling
from anyformer.tasks.sequence_level import SequenceLevelTask

EXAMPLE = "The quick brown fox jumps over the lazy dog."
SECOND = "A fox jumps."
MAX_FILE_BYTES = 8 * 2**20  # larger files are not read for one example
MAX_CHARACTERS = 80
SAMPLE_ROWS = 8  # the longest of these rows is shown


def example(run: Run, folder: Path) -> tuple[str, str]:
    """Return a text, and the second text of a pair if the run reads pairs."""
    row: dict[str, str] = {}
    try:
        data = io.load(Recipe, folder / "recipe.toml").data
        row = _row(run, data.valid or data.train, data)
    except (ConfigError, OSError):  # no recipe, or its data is not on this machine
        pass
    text = _shorten(row.get("source") or row.get("text") or "") or EXAMPLE
    if isinstance(run.task, MaskedLanguageModelling) and len(words := text.split(" ")) > 1:
        words[len(words) // 2] = run.tokenizer.token(run.task.mask)
        text = " ".join(words)
    pairs = isinstance(run.task, SequenceLevelTask) and run.task.pairs
    return text, _shorten(row.get("pair", "")) or (SECOND if pairs else "")


def _row(run: Run, source: Source, data: Data) -> dict[str, str]:
    """Return one of the first rows of a source by column; empty if the source is a folder, a large file or shards."""
    match source:
        case JoinedSources(parts=parts):
            return _row(run, parts[0], data)
        case MixedSources(parts=mixed):
            name = run.spec.name if isinstance(run.spec, MixturePart) else mixed[0].name
            return _row(run, next(part.rows for part in mixed if part.name == name), data)
        case Shards() | ClassFolders(media=None) | SoundFiles() | Trajectories() | KeyToDoorWalks():
            return {}
        case Digits() | WrittenDates() | Additions():
            columns = generate(source.model_copy(update={"count": SAMPLE_ROWS}), "valid", 0)
        case Scenes() | ClassFolders() | ArrayFile():
            columns = read(source, data, "valid", 0).columns
        case ParallelFiles(source=name) | TextFile(path=name) | TableFile(path=name):
            columns = _file_columns(source, name, data)
        case ConllFile(path=name) | MatchedLines(path=name):
            columns = _file_columns(source, name, data)
        case _:
            assert_never(source)
    texts = columns.get("source") or columns.get("text") or []
    longest = max(range(min(SAMPLE_ROWS, len(texts))), key=lambda i: len(texts[i]), default=None)
    return {} if longest is None else {role: values[longest] for role, values in columns.items()}


def _file_columns(source: Source, name: str, data: Data) -> dict[str, list[str]]:
    """Return the columns of a file; empty if it is missing or large."""
    path = locate(name, data)
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return {}
    return read(source, data, "valid", 0).columns


def _shorten(text: str) -> str:
    """Return the longest of the first lines, cut at the end of a word."""
    lines = [line.strip() for line in text.splitlines()[:SAMPLE_ROWS]]
    first = max(lines, key=len, default="")
    return (
        first if len(first) <= MAX_CHARACTERS else first[:MAX_CHARACTERS].rpartition(" ")[0] or first[:MAX_CHARACTERS]
    )
