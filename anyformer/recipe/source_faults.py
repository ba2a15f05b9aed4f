"""Which sources fit which task. Imports no torch."""

import re
import warnings
from collections.abc import Iterator

from anyformer.config import Fault
from anyformer.config.spec import did_you_mean
from anyformer.recipe.sources import (
    TABLE_FORMATS,
    ArrayFile,
    ClassFolders,
    ColumnName,
    ConllFile,
    JoinedSources,
    KeyToDoorWalks,
    MatchedLines,
    MixedSources,
    ParallelFiles,
    Shards,
    SoundFiles,
    Source,
    SquadFile,
    TableFile,
    TextFile,
    Trajectories,
    holds_answers,
    single_columns,
    table_columns,
    table_format,
    unknown_format,
)
from anyformer.recipe.synthetic import Additions, Digits, PassKeys, PreferSorted, Scenes, WrittenDates

TEXT, LABELLED, PAIR = ("text",), ("text", "label"), ("source", "target")  # columns of sources that do not name them
TAGGED = ("words", "tags")
EPISODES = ("text", "observations", "actions", "rewards")
CONVERSATIONS = ("messages",)
PREFERRED = ("source", "target", "rejected")
ANSWERED = ("text", "pair", "answers")
ANSWERING = ("dpo", "grpo")  # tasks whose sources may be conversations
MEDIA_ROLES = ("source", "text", "pair")  # columns that may refer to images and sounds
NEEDS = {
    TEXT: "text: text, table, lines, conll, folders or shards",
    LABELLED: "labels: table, lines, folders, or text with a label",
    PAIR: "pairs: parallel, table or lines",
    ("text", "pair"): "pairs of texts: table or lines",
    PREFERRED: "pairs of answers: table, lines or prefer_sorted",
    TAGGED: "words with tags: conll or table",
    ANSWERED: "questions with answers: squad",
    EPISODES: "episodes: trajectories or key_to_door",
    CONVERSATIONS: "conversations: a table with the column `messages`",
}


def source_faults(source: Source, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
    """Yield what makes a source unfit for a task that reads these columns."""
    needs = NEEDS.get(columns, "labels: table or lines")
    match source:
        case MixedSources(parts=mixed) if task == "mixture":
            for i, one in enumerate(mixed):
                yield from (fault.under(f"parts.{i}.rows") for fault in source_faults(one.rows, "seq2seq", columns))
        case _ if (task == "mixture") != isinstance(source, MixedSources):
            needs = "'mixed', with a source for each of its parts" if task == "mixture" else needs
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case JoinedSources(parts=parts):
            if task in ANSWERING and len({"source" in _required(part, task, columns) for part in parts}) > 1:
                yield Fault("parts", "have texts as prompts, and conversations: use one of them")
            for i, part in enumerate(parts):
                yield from (fault.under(f"parts.{i}") for fault in source_faults(part, task, columns))
        case TextFile(label=str()) if columns not in (TEXT, LABELLED):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case TextFile(label=str(label)) | MatchedLines(label=str(label)) if "label" not in columns:
            yield Fault("label", f"= {label!r}: the task {task} reads no labels: leave it out")
        case TextFile(label=None) | Shards() if columns != TEXT:
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case ClassFolders() | ArrayFile() if columns not in (TEXT, LABELLED):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case SoundFiles() if columns not in (LABELLED, PAIR):
            yield Fault("kind", f"= 'sounds': the task {task} needs {needs}")
        case SoundFiles(count=int()) if source.shortest > source.longest:
            yield Fault("shortest", f"= {source.shortest}: must be at most longest = {source.longest}")
        case SoundFiles() if why := _pattern_fault(source.pattern, ("label",), None):
            yield Fault("pattern", why)
        case Trajectories() | KeyToDoorWalks() if columns != EPISODES:
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case SquadFile() if columns != ANSWERED:
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case TableFile() if columns in (EPISODES, ANSWERED):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case MatchedLines() if columns in (TAGGED, EPISODES, CONVERSATIONS, ANSWERED):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case ConllFile() if columns not in (TAGGED, TEXT):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case ConllFile(word=int(word), tag=int(tag)) if word == tag:
            yield Fault("tag", f"= {tag}: is also the column of the word")
        case PreferSorted() if columns != PREFERRED:
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case PreferSorted(shortest=1):
            yield Fault("shortest", "= 1: a single digit is sorted and reversed at once: must be at least 2")
        case ParallelFiles() | Digits() | WrittenDates() | Additions() | PassKeys() | Scenes() if (
            columns != PAIR and not isinstance(source, PreferSorted)
        ):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case (
            TextFile()
            | ParallelFiles()
            | TableFile()
            | MatchedLines()
            | ConllFile()
            | SquadFile()
            | ClassFolders()
            | ArrayFile()
            | Shards()
        ) if source.start >= source.stop:
            yield Fault("start", f"= {source.start}: must be before stop = {source.stop}")
        case Trajectories() if source.start >= source.stop:
            yield Fault("start", f"= {source.start}: must be before stop = {source.stop}")
        case ParallelFiles() | TableFile() | MatchedLines() if source.group is not None and source.split == "rows":
            yield Fault(
                "group", f"= {source.group!r}: a hash of it decides the part of a row: leave out split = 'rows'"
            )
        case TableFile() if table_format(source) is None:
            yield unknown_format(source)
            readable = source.model_copy(update={"format": TABLE_FORMATS[0]})
            yield from source_faults(readable, task, columns)  # report the other faults, too
        case MatchedLines(pattern=pattern) if why := _pattern_fault(pattern, columns, source.label):
            yield Fault("pattern", f"= {pattern!r}: {why}")
        case MatchedLines(group=str(group)) if group not in (named := re.compile(source.pattern).groupindex):
            yield Fault("group", f"= {group!r}: the pattern has no group of this name; {did_you_mean(group, named)}")
        case TableFile(source=str() | int() | tuple(), messages=str() | int() | tuple()) if task in ANSWERING:
            yield Fault("messages", f"= {source.messages!r}: is the prompt, as `source` is: leave out one of them")
        case TableFile() if any(getattr(source, name) is None for name in _required(source, task, columns)):
            if len(columns) == 1:
                yield Fault(columns[0], f"is required: the column that the task {task} reads")
            else:
                *first, last = (f"`{name}`" for name in columns)
                yield Fault("", f"the task {task} needs the columns {', '.join(first)} and {last}")
        case TableFile() if source.delimiter != "," and table_format(source) != "csv":
            yield Fault("delimiter", f"= {source.delimiter!r}: is for CSV, and this is {table_format(source)}")
        case TableFile(decimal=",") if task != "regress":
            yield Fault("decimal", f"= ',': is for numbers, which the task regress reads, and not {task}")
        case TableFile() if source.join != " " and not any(
            isinstance(c, tuple) for role, c in table_columns(source).items() if role != "messages"
        ):
            yield Fault("join", f"= {source.join!r}: is for a list of columns, such as text = ['title', 'body']")
        case TableFile() if unread := _unread_media(source):
            yield from (
                Fault(key, f"= {name!r}: no column of this name is read: name it in `text` or `source`, too")
                for key, name in unread
            )
        case TableFile() if numbered := _numbered_names(source):
            kind = "lines of JSON have names: give them, or set header = false for JSON lists"
            kind = "columns of Parquet have names: give them" if table_format(source) == "parquet" else kind
            yield from (Fault(path, f"= {number}: {kind}") for path, number in numbered)
        case TableFile(pair=pair) if pair is not None and "pair" not in columns and "label" in columns:
            yield Fault("pair", f"= {pair!r}: set task.pairs = true, or leave it out: the task reads single texts")
        case Digits() | PassKeys() if source.shortest > source.longest:
            yield Fault("shortest", f"= {source.shortest}: must be at most longest = {source.longest}")


def _required(source: Source, task: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that a table must name for a task: a conversation can be in the place of a source."""
    if task not in ANSWERING or not isinstance(source, TableFile):
        return columns
    if not holds_answers(source):
        return columns
    return tuple(name for name in columns if name != "source")


def _numbered_names(source: TableFile) -> list[tuple[str, int]]:
    """Return the columns by number in files whose columns have names."""
    if table_format(source) in ("tsv", "csv") or (table_format(source) == "jsonl" and not source.header):
        return []
    return [(key, name) for key, name in single_columns(table_columns(source)).items() if isinstance(name, int)]


def _unread_media(source: TableFile) -> list[tuple[str, ColumnName]]:
    """Return the columns with paths of images or sounds that are not read as a text."""
    read = [*single_columns({k: v for k, v in table_columns(source).items() if k in MEDIA_ROLES}).values()]
    named = {key: names for key in ("images", "sounds") if (names := getattr(source, key)) is not None}
    return [(key, name) for key, name in single_columns(named).items() if name not in read]


def _pattern_fault(pattern: str, groups: tuple[str, ...], label: str | None) -> str:
    """Return why a regular expression is invalid, lacks named groups, or has a second label; empty if it is fine."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # patterns whose meaning may change in a later Python
            names = re.compile(pattern).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression ({error})"
    if label is not None and "label" in names:
        return f"has the group (?P<label>...), and label = {label!r} is set: leave out one of them"
    known = {*names, *(["label"] if label else [])}
    missing = " and ".join(f"(?P<{name}>...)" for name in groups if name not in known)
    return missing and f"needs the named groups {missing}"
