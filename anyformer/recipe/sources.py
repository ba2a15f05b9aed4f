"""Sources of examples in files: texts, tables, lines, folders, arrays, shards. Imports no torch."""

import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from anyformer.config import Fault
from anyformer.config.spec import Fraction, Probability, Size, did_you_mean, visible
from anyformer.recipe.source import (
    ANSWERED,
    CONVERSATIONS,
    EPISODES,
    LABELLED,
    PAIR,
    TAGGED,
    TEXT,
    Encoding,
    FileSource,
    Length,
    Root,
    RowFile,
    RowSplit,
    SingleSource,
    Source,
    Split,
)

if TYPE_CHECKING:
    from anyformer.data.readers import Rows

Column = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
Label = Annotated[str, Field(min_length=1)]


class TextFile(FileSource, SingleSource):
    """Text for a language model: a file, or all text files in a folder and in those below it.

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

    def fits(self, columns: tuple[str, ...]) -> bool:
        return columns in ((TEXT, LABELLED) if self.label else (TEXT,))

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        yield from super().faults(task, columns)
        yield from _label_faults(self.label, task, columns)

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.text_rows import text_rows

        return text_rows(self, data)


class ParallelFiles(RowFile):
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
    gives = (PAIR,)
    files = ("source", "target")

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.text_rows import parallel_rows

        return parallel_rows(self, data)


class ConllFile(RowFile):
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
    gives = (TAGGED, TEXT)

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        if self.word is not None and self.word == self.tag:
            yield Fault("tag", f"= {self.tag}: is also the column of the word")
        else:
            yield from super().faults(task, columns)

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.conll import conll_rows

        return conll_rows(self, data)


class SquadFile(RowFile):
    """Questions with their texts and answers, in the formats of SQuAD: nested .json, or .jsonl with one question per
    line (see docs/your-data.md). In messages about a .json, the number of a row is that of its question."""

    kind: Literal["squad"] = "squad"
    path: str  # the file
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")
    gives = (ANSWERED,)

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.squad import squad_rows

        return squad_rows(self, data)


class MatchedLines(RowFile):
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
    names_columns = True

    def fits(self, columns: tuple[str, ...]) -> bool:
        return columns not in (TAGGED, EPISODES, CONVERSATIONS, ANSWERED)

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        if found := [*_label_faults(self.label, task, columns), *super().faults(task, columns)]:
            yield from found
        elif why := _pattern_fault(self.pattern, columns, self.label):
            yield Fault("pattern", f"= {self.pattern!r}: {why}")
        elif self.group is not None and self.group not in (named := re.compile(self.pattern).groupindex):
            hint = did_you_mean(self.group, named)
            yield Fault("group", f"= {self.group!r}: the pattern has no group of this name; {hint}")

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.text_rows import matched_rows

        return matched_rows(self, data, by)


class ClassFolders(RowFile):
    """One folder per label with one file per text, image or sound: `pos/001.txt`, `cat/001.png`."""

    kind: Literal["folders"] = "folders"
    path: str  # the folder of the folders
    media: Literal["image", "audio"] | None = None  # what each file is; None: a text
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")
    gives = (TEXT, LABELLED)

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.text_rows import folder_rows

        return folder_rows(self, data)

    def sample(self, data: Root) -> Source | None:
        return None if self.media is None else self


class SoundFiles(SingleSource):
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
    gives = (LABELLED, PAIR)
    files = ("path",)

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        if self.count is not None and self.shortest > self.longest:
            yield Fault("shortest", f"= {self.shortest}: must be at most longest = {self.longest}")
        elif why := _pattern_fault(self.pattern, ("label",), None):
            yield Fault("pattern", why)

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.media_rows import sound_rows

        return sound_rows(self, data, split, seed)


class ArrayFile(RowFile):
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
    gives = (TEXT, LABELLED)

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.media_rows import array_rows

        return array_rows(self, data)

    def sample(self, data: Root) -> Source:
        return self


class Shards(FileSource):
    """Tokenised text of any size: a folder written by `anyformer data prepare`. `start` and `stop` are fractions of its
    tokens."""

    kind: Literal["shards"] = "shards"
    path: str  # the folder
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    gives = (TEXT,)
    is_tokenised = True

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.readers import Rows
        from anyformer.data.shards import open_shards

        corpus = open_shards(self, data)
        documents = max(1, corpus.share("documents"))
        return Rows({}, visible(str(corpus.folder)), range(1, documents + 1), stream=corpus)


class Trajectories(RowFile):
    """Recorded episodes: a `.npz` file of arrays, or `.jsonl` with one episode per line (see docs/environments.md)."""

    kind: Literal["trajectories"] = "trajectories"
    path: str  # the file
    start: Probability = 0.0  # beginning of the selected part, as a fraction of the episodes
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # episodes of the part: spread evenly over the file, or contiguous ("rows")
    gives = (EPISODES,)

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.trajectories import recorded_rows

        return recorded_rows(self, data)

    def sample(self, data: Root) -> None:
        return None


def _label_faults(label: str | None, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
    """Yield the fault of a label for a task without labels."""
    if label is not None and "label" not in columns:
        yield Fault("label", f"= {label!r}: the task {task} reads no labels: leave it out")


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
