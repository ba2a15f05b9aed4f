"""Batches: padded rows, packed rows, random crops, or consecutive parts of one long text. Imports no torch."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from anyformer.config import Fault, Spec
from anyformer.config.spec import BY_KIND, Flag, Size

if TYPE_CHECKING:
    from anyformer.data.loader import Loader
    from anyformer.data.shards import Stream


class AnyBatches(Spec):
    """Rows of tokens that a step reads together."""

    batched_by: ClassVar[Literal["tokens", "rows"]]  # the field with the size of a batch
    packs: ClassVar[bool] = False  # a row holds several examples, separated by segments

    if TYPE_CHECKING:
        kind: str

    @property
    @abstractmethod
    def row_limit(self) -> int:
        """The most tokens of a row."""

    @property
    def row_length(self) -> int | None:
        """Tokens of every row; None: as many as the longest example of its batch has."""
        return self.row_limit

    @property
    def rounds_lengths(self) -> bool:
        """True if the lengths of rows are rounded up, so that batches have few shapes."""
        return False

    @property
    def size(self) -> int:
        """The size of a batch, in what it is `batched_by`."""
        return int(getattr(self, self.batched_by))

    @abstractmethod
    def row_count(self, length: int) -> int:
        """Return how many rows of a length are in a batch."""


class ExampleBatches(AnyBatches):
    """Examples with their own ends, in batches of at most `tokens`."""

    batched_by = "tokens"

    if TYPE_CHECKING:
        tokens: int

    def row_count(self, length: int) -> int:
        return max(1, self.tokens // length)


class TextBatches(AnyBatches):
    """Parts of one long text, `length` tokens in each of `rows` rows."""

    batched_by = "rows"

    if TYPE_CHECKING:
        rows: int
        length: int

    @property
    def row_limit(self) -> int:
        return self.length

    def row_count(self, length: int) -> int:
        return self.rows

    @abstractmethod
    def text_fault(self, tokens: int) -> Fault | None:
        """Return why a text of this many tokens is too short; None if it is not."""

    @abstractmethod
    def loader(self, text: "Stream", seed: int) -> "Loader":
        """Return the loader of a text."""


class Padded(ExampleBatches):
    """Rows of similar length, padded to the longest; at most `tokens` in a batch, padding included."""

    kind: Literal["padded"] = "padded"
    tokens: Size  # most tokens of a batch, padding included
    pool: Size = 50  # batches that are shuffled together before they are sorted by length
    # rounds lengths up and fills batches with empty rows: a GPU repeats steps of few shapes without its CPU's work
    few_shapes: Flag = False

    @property
    def row_limit(self) -> int:
        return self.tokens

    @property
    def row_length(self) -> None:
        return None

    @property
    def rounds_lengths(self) -> bool:
        return self.few_shapes


class Packed(ExampleBatches):
    """Several documents or pairs in a row of `length` tokens, separated by segments."""

    packs = True

    kind: Literal["packed"] = "packed"
    tokens: Size  # most tokens of a batch, padding included
    length: Size  # tokens of a row

    @property
    def row_limit(self) -> int:
        return self.length


class Crops(TextBatches):
    """`rows` random crops of `length` tokens from one long text."""

    kind: Literal["crops"] = "crops"
    rows: Size  # rows of a batch
    length: Size  # tokens of a row

    def text_fault(self, tokens: int) -> Fault | None:
        if tokens > self.length:
            return None
        return Fault("batches.length", f"= {self.length}: the text has {tokens} tokens")

    def loader(self, text: "Stream", seed: int) -> "Loader":
        from anyformer.data.loader import CropLoader

        return CropLoader(text, self, seed)


class Ordered(TextBatches):
    """One long text cut into `rows` equal parts: each batch holds the next `length` tokens of every part.

    A model with `memory` continues from the previous batch. At the end of the text, its memory is cleared.
    """

    kind: Literal["ordered"] = "ordered"
    rows: Size  # rows of a batch
    length: Size  # tokens of a row

    def text_fault(self, tokens: int) -> Fault | None:
        if tokens >= (minimum := self.rows * self.length + 1):
            return None
        what = f"with length = {self.length} it needs {minimum} tokens, and the text has {tokens}"
        return Fault("batches.rows", f"= {self.rows}: {what}")

    def loader(self, text: "Stream", seed: int) -> "Loader":
        from anyformer.data.loader import OrderedLoader

        return OrderedLoader(text, self)


class Lengths(NamedTuple):
    """Lengths of all training examples in tokens, of the longer side where there are two."""

    total: int
    longest: int


Batches = Annotated[Padded | Packed | Crops | Ordered, *BY_KIND]
