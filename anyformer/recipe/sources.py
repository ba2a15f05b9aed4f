"""Sources of examples: files, shards and synthetic tasks. Imports no torch."""

from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from anyformer.config import ConfigError, Fault, Spec
from anyformer.config.spec import BY_KIND, Flag, Fraction, Probability, Size, shorten
from anyformer.recipe.augment import Augment
from anyformer.recipe.synthetic import Length, Scenes, Synthetic

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
TABLE_FORMATS = ("tsv", "csv", "jsonl", "parquet")
MAX_PATH_SHOWN = 100  # characters of a path in an error message
Encoding = str  # a Python codec: utf-8, latin-1, cp949, ...
Column = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
ColumnName = str | Annotated[int, Field(strict=True, ge=0, lt=2**31)]  # the name of a column, or its number from 0
ColumnNames = ColumnName | Annotated[tuple[ColumnName, ...], Field(min_length=1)]  # several are joined to one text
Label = Annotated[str, Field(min_length=1)]
Delimiter = Annotated[str, Field(pattern=r'^[^"\r\n]$')]
RowSplit = Literal["spread", "rows"]


class TextFile(Spec):
    """Plain text for a language model: a file, or all text files in a folder and in those below it.

    `start` and `stop` select a part of it, as fractions of its characters. With `document = "line"`, a line belongs to
    the part in which it begins. With a `label`, all its texts have that label: one file per class.
    """

    kind: Literal["text"] = "text"
    path: str  # the file, or a folder: its files .txt, .text, .md, .markdown and .rst (or these with .gz) are read
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    document: Literal["file", "line"] = "file"  # whether one document is a file or a line
    label: Label | None = None  # label of all texts
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction


class ParallelFiles(Spec):
    """Two files with one row per line, source and target.

    Here and below, `start` and `stop` select a fraction of the rows: spread evenly over the file, or with
    `split = "rows"` contiguous ones. With `group`, a hash of that column decides: rows with equal values are in one
    part, and the fractions are those of the values.
    """

    kind: Literal["parallel"] = "parallel"
    source: str  # file of the sources
    target: str  # file of the targets, with as many lines
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")
    group: Literal["source", "target"] | None = None  # rows with equal values here are in one part


class TableFile(Spec):
    """Columns of a .tsv, .csv, .jsonl or .parquet file, by name or by number: `text = 2` is the third column.

    `header = false` is for files without a header, and for JSON lists. A column of JSON or Parquet may be nested:
    `meta.title`, `translations.0.text`. A list of columns is joined to one text: `text = ["title", "body"]`.
    """

    kind: Literal["table"] = "table"
    path: str  # the file
    source: ColumnNames | None = None  # column of the source (tasks with pairs of source and target), or a list of them
    target: ColumnNames | None = None  # column of the target, or a list of columns
    rejected: ColumnNames | None = (
        None  # column of the answer that is worse than the target (dpo), or a list of columns
    )
    text: ColumnNames | None = None  # column of the text, or a list of columns
    pair: ColumnNames | None = None  # column of the second text of a pair, or a list of columns
    label: ColumnName | None = None  # column of the label
    words: ColumnName | None = None  # column of a sentence's words: a list, or a string separated by spaces
    tags: ColumnName | None = None  # column of the words' tags, in the same form
    # column of conversations, or a list of columns: a message of the user, one of the assistant, and so on. For dpo and
    # grpo it is the prompt, in the place of `source`, and answers may be lists of messages. In dpo both answers may
    # begin with the prompt, if neither `messages` nor `source` is set
    messages: ColumnNames | None = None
    join: str = " "  # text between joined columns; blank cells are left out
    images: ColumnNames | None = None  # which of these columns hold paths of images, relative to the table's folder
    sounds: ColumnNames | None = None  # which of these columns hold paths of sounds; a.wav+b.wav are joined to one
    format: Literal["tsv", "csv", "jsonl", "parquet"] | None = None  # the format; None: by the suffix
    header: Flag = True  # the first row names the columns
    delimiter: Delimiter = ","  # between the columns of a CSV; cells in quotes may hold it
    decimal: Literal[".", ","] = "."  # sign before the decimals of numbers, in labels of the task regress
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")
    group: ColumnName | None = None  # column whose equal values are in one part


def table_columns(source: TableFile) -> dict[str, ColumnNames]:
    """Return the columns that a table names, by what they are read as."""
    roles = ("source", "target", "rejected", "text", "pair", "label", "words", "tags", "messages", "group")
    return {role: name for role in roles if (name := getattr(source, role)) is not None}


def holds_answers(source: TableFile) -> bool:
    """Return whether rows are conversations and answers to them, which may be lists of messages (dpo, grpo)."""
    return source.source is None and (source.rejected if source.messages is None else source.target) is not None


def single_columns(columns: dict[str, ColumnNames]) -> dict[str, ColumnName]:
    """Return each column by its key in the source; those of a list have keys such as `text.0`."""
    single: dict[str, ColumnName] = {}
    for role, names in columns.items():
        single |= {f"{role}.{i}": name for i, name in enumerate(names)} if isinstance(names, tuple) else {role: names}
    return single


def table_format(source: TableFile) -> str | None:
    """Return the format of a table, as given or by its suffix; None if the suffix is not one of `TABLE_FORMATS`."""
    if source.format is not None:
        return source.format
    suffix = source.path.lower().removesuffix(".gz").rpartition(".")[2]
    return suffix if suffix in TABLE_FORMATS else None


def unknown_format(source: TableFile) -> Fault:
    """Return the fault of a table whose suffix is not one of `TABLE_FORMATS`."""
    name = shorten(source.path, MAX_PATH_SHOWN)
    return Fault("format", f"is not clear from the name {name!r}: set it to 'tsv', 'csv', 'jsonl' or 'parquet'")


class ConllFile(Spec):
    """One word per line, with its tags in columns; a blank line ends a sentence.

    CoNLL-U has tabs between columns and comments that begin with #; multiword ranges (1-2) and empty nodes (1.1) are
    skipped. In other files with tabs, a line that begins with "# " and has no tab is a comment. Files with spaces have
    no comments unless `comment` is set, because such a line could be a word. Lines of -DOCSTART- are skipped. In files
    with tabs a word may be a space.
    """

    kind: Literal["conll"] = "conll"
    path: str  # the file
    word: Column | None = None  # column of the word, from 0 or from the end (-1); None: 0, or 1 in CoNLL-U
    tag: Column | None = None  # column of the tag; None: the last, or 3 in CoNLL-U
    format: Literal["conll", "conllu"] | None = None  # the format; None: by the suffix
    separator: Literal["tab", "spaces"] | None = None  # between columns; None: tab if the file has any, else spaces
    comment: Label | None = None  # lines that begin with this are skipped, too
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")


class SquadFile(Spec):
    """Questions with their texts and answers, in the formats of SQuAD: nested .json, or .jsonl with one question per
    line (see docs/your-data.md). In messages about a .json, the number of a row is that of its question."""

    kind: Literal["squad"] = "squad"
    path: str  # the file
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")


class MatchedLines(Spec):
    """Lines matched in full by a regular expression with named groups: `source` and `target`, or `text`, optionally
    with `pair` and `label`. With `label` as a setting, all rows have that label: one file per class."""

    kind: Literal["lines"] = "lines"
    path: str  # the file
    pattern: str  # the regular expression
    label: Label | None = None  # label of all rows
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")
    group: str | None = None  # named group of the pattern whose equal values are in one part


class ClassFolders(Spec):
    """One folder per label with one file per text, image or sound: `pos/001.txt`, `cat/001.png`."""

    kind: Literal["folders"] = "folders"
    path: str  # the folder of the folders
    media: Literal["image", "audio"] | None = None  # what each file is; None: a text
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")


class SoundFiles(Spec):
    """WAV files of a folder whose names have their labels, such as `7_jackson_32.wav`.

    A row is one file; with `count`, a row is several files, drawn at random and joined to one sound, and their labels,
    separated by spaces. Training rows depend on the seed.
    """

    kind: Literal["sounds"] = "sounds"
    path: str  # the folder
    pattern: str  # regular expression with a group `label`, matched with whole file names; other files are not read
    count: Size | None = None  # number of joined rows; None: a row for each file
    shortest: Length = 3  # fewest files of a joined row
    longest: Length = 6  # most files of a joined row


class ArrayFile(Spec):
    """Entries of an array in a `.npz` file, and their labels in another array of the same file. `anyformer data pack`
    writes such files from folders of images."""

    kind: Literal["arrays"] = "arrays"
    path: str  # the file
    array: str = "images"  # name of the array: uint8 [n, height, width] or [n, height, width, 3], or vectors [n, size]
    labels: str = "labels"  # name of the array of labels [n]: strings or whole numbers
    media: Literal["image", "features"] = "image"  # what each entry is
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")


class Shards(Spec):
    """Tokenised text of any size: a folder written by `anyformer data prepare`. `start` and `stop` are fractions of its
    tokens."""

    kind: Literal["shards"] = "shards"
    path: str  # the folder
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction


class Trajectories(Spec):
    """Recorded episodes: a `.npz` file of arrays, or `.jsonl` with one episode per line (see docs/environments.md)."""

    kind: Literal["trajectories"] = "trajectories"
    path: str  # the file
    start: Probability = 0.0  # beginning of the selected part, as a fraction of the episodes
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # episodes of the part: spread evenly over the file, or contiguous ("rows")


class KeyToDoorWalks(Spec):
    """Random walks in the environment key-to-door: a reward at the end depends on an action at the beginning."""

    kind: Literal["key_to_door"] = "key_to_door"
    count: Size  # number of episodes


OneSource = (
    TextFile
    | ParallelFiles
    | TableFile
    | MatchedLines
    | ConllFile
    | SquadFile
    | ClassFolders
    | SoundFiles
    | ArrayFile
    | Scenes
    | Trajectories
    | KeyToDoorWalks
    | Synthetic
)
SingleSource = Annotated[OneSource, *BY_KIND]


class JoinedSources(Spec):
    """The concatenated rows of several sources."""

    kind: Literal["joined"] = "joined"
    parts: Annotated[tuple[SingleSource, ...], Field(min_length=1)]  # the sources, in this order


class MixedSource(Spec):
    """The rows of one part of a mixture."""

    name: str  # name of the part, as in `task.parts`
    rows: SingleSource  # its source


class MixedSources(Spec):
    """The rows of a mixture of tasks: one source for each name in `task.parts`."""

    kind: Literal["mixed"] = "mixed"
    parts: Annotated[tuple[MixedSource, ...], Field(min_length=1)]  # sources by the name of their part


AnySource = OneSource | JoinedSources | MixedSources | Shards
Source = Annotated[AnySource, *BY_KIND]


class NamedSource(Spec):
    """The rows of a test set, and its name."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # name of the test set
    rows: Source  # its examples


class NamedSources(Spec):
    """Several test sets, each with its own metrics. A table of sources by name is the same."""

    kind: Literal["named"] = "named"
    parts: Annotated[tuple[NamedSource, ...], Field(min_length=1)]  # the test sets

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [part.name for part in self.parts]
        for i, name in enumerate(names):
            if name in SPLITS or name in names[:i]:
                what = "is the name of a split" if name in SPLITS else "is the name of two test sets"
                raise ConfigError([Fault(f"parts.{i}.name", f"= '{name}': {what}: choose another")])
        return self


def _by_name(value: Any) -> Any:
    """Return the data of `NamedSources` for a table of sources by name."""
    if not isinstance(value, dict) or value.get("kind", "named") != "named" or "parts" in value:
        return value
    parts = [{"name": name, "rows": rows} for name, rows in value.items() if name != "kind"]
    return {"kind": "named", "parts": parts}


TestSource = Annotated[AnySource | NamedSources, *BY_KIND, BeforeValidator(_by_name)]


class Data(Spec):
    """Sources for training, validation and test.

    Relative paths are relative to `root`. Without a root, a path that begins with one of `sets` is found wherever that
    data set is on this machine.
    """

    train: Source  # examples for training
    valid: Source | None = None  # examples for validation, during training; None: none
    test: TestSource | None = None  # examples for `anyformer evaluate`, or a table of test sets by name; None: none
    sets: tuple[str, ...] = ()  # registered data sets (`anyformer data list`) with which paths begin
    # folder of relative paths; empty: the environment variable ANYFORMER_DATA, else the working directory
    root: str = ""
    augment: Augment | None = None  # random changes of the images and sounds in training; None: none
    on_bad_row: Literal["error", "skip"] = "error"  # error: report unreadable rows and stop; skip: leave them out


class NamedSplit(NamedTuple):
    """A source of a recipe: its name for `anyformer evaluate --split`, its key in the recipe, and its split."""

    name: str
    key: str
    split: Split
    source: Source


def splits(data: Data) -> list[NamedSplit]:
    """Return all sources of a recipe, each test set by its name."""
    found = [NamedSplit("train", "data.train", "train", data.train)]
    if data.valid is not None:
        found.append(NamedSplit("valid", "data.valid", "valid", data.valid))
    match data.test:
        case None:
            return found
        case NamedSources(parts=parts):
            named = (NamedSplit(p.name, f"data.test.parts.{i}.rows", "test", p.rows) for i, p in enumerate(parts))
            return [*found, *named]
        case _:
            return [*found, NamedSplit("test", "data.test", "test", data.test)]
