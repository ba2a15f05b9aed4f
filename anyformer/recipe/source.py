"""The family of data sources, and which sources fit which task. Imports no torch.

A source is one class: its fields, and the methods of `Source`. To add one, derive a class from `SingleSource` and give
it a `kind`: here, or in a file of your own (docs/extending.md).
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol

from pydantic import Field

from anyformer.config import Fault
from anyformer.config.part import Part

if TYPE_CHECKING:
    from anyformer.data.readers import Rows

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
RowSplit = Literal["spread", "rows"]
Encoding = str  # a Python codec: utf-8, latin-1, cp949, ...
Length = Annotated[int, Field(strict=True, ge=1, le=10_000)]
SAMPLED = 8  # rows of a source of which an example is shown

# columns that tasks read together
TEXT, LABELLED, PAIR = ("text",), ("text", "label"), ("source", "target")
TAGGED = ("words", "tags")
EPISODES = ("text", "observations", "actions", "rewards")
CONVERSATIONS = ("messages",)
PREFERRED = ("source", "target", "rejected")
ANSWERED = ("text", "pair", "answers")
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
ANSWERING = ("dpo", "grpo")  # tasks whose sources may be conversations


class Root(Protocol):
    """Where the paths of sources begin: the fields of `Data` that say so."""

    @property
    def root(self) -> str: ...
    @property
    def sets(self) -> tuple[str, ...]: ...


class Source(Part):
    """Rows of examples: read from files, or made up."""

    gives: ClassVar[tuple[tuple[str, ...], ...]] = ()  # the columns that a task may read, all of a tuple together
    files: ClassVar[tuple[str, ...]] = ()  # fields that name a file or a folder
    of_mixture: ClassVar[bool] = False  # has the rows of each task of a mixture
    is_tokenised: ClassVar[bool] = False  # one long text as ids, with the tokenizer that made them
    names_columns: ClassVar[bool] = False  # columns have names, by one of which metrics may be divided

    @abstractmethod
    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        """Return the rows. Only random training rows may depend on the seed.

        `by` is a column that rows have as the column "by", too; None for a source that does not name its columns.
        """

    def fits(self, columns: tuple[str, ...]) -> bool:
        """Return whether a task can read these columns."""
        return columns in self.gives

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        """Yield what else is wrong, for a task that reads these columns."""
        yield from ()

    def required(self, task: str, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return which of these columns a task must have."""
        return columns

    def inner(self) -> "list[tuple[str, str, SingleSource]]":
        """Return the sources that it is made of, with the path and the name of each."""
        return []

    def sample(self, data: Root) -> "Source | None":
        """Return a source of few rows, to show one of them; None if that would take long."""
        if self.files:
            from anyformer.data.files import are_small

            return self if are_small([getattr(self, name) for name in self.files], data) else None
        return self.model_copy(update={"count": SAMPLED}) if "count" in type(self).model_fields else self

    def fingerprints(self, data: Root) -> Iterator[tuple[str, str]]:
        """Yield the fingerprints of files that rows refer to, by the field that has them (`data/fingerprint.py`)."""
        yield from ()


class SingleSource(Source):
    """A source that may be joined with others, or be a part of a mixture."""


class FileSource(Source):
    """A file or folder, of which `start` and `stop` select a part."""

    files: ClassVar[tuple[str, ...]] = ("path",)
    if TYPE_CHECKING:  # fields of each, in its own order

        @property
        def start(self) -> float: ...
        @property
        def stop(self) -> float: ...
        @property
        def encoding(self) -> str: ...  # of texts

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        if self.start >= self.stop:
            yield Fault("start", f"= {self.start}: must be before stop = {self.stop}")


class RowFile(FileSource, SingleSource):
    """Rows of a file or folder: a part is spread evenly, is contiguous, or has certain values in a column."""

    if TYPE_CHECKING:

        @property
        def split(self) -> RowSplit: ...
        @property
        def group(self) -> str | int | None: ...  # of rows with columns

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        yield from super().faults(task, columns)
        if (group := getattr(self, "group", None)) is not None and self.split == "rows":
            yield Fault("group", f"= {group!r}: a hash of it decides the part of a row: leave out split = 'rows'")


def source_faults(source: Source, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
    """Yield what makes a source unfit for a task that reads these columns."""
    needs = NEEDS.get(columns, "labels: table or lines")
    if (task == "mixture") != source.of_mixture:
        needs = "'mixed', with a source for each of its parts" if task == "mixture" else needs
    elif source.fits(columns):
        yield from source.faults(task, columns)
        return
    yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
