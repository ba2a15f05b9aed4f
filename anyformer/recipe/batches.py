"""Batches: padded rows, packed rows, random crops, or consecutive parts of one long text. Imports no torch."""

from typing import Annotated, Literal, NamedTuple

from anyformer.config import Spec
from anyformer.config.spec import BY_KIND, Flag, Size


class Padded(Spec):
    """Rows of similar length, padded to the longest; at most `tokens` in a batch, padding included."""

    kind: Literal["padded"] = "padded"
    tokens: Size  # most tokens of a batch, padding included
    pool: Size = 50  # batches that are shuffled together before they are sorted by length
    # rounds lengths up and fills batches with empty rows: a GPU repeats steps of few shapes without its CPU's work
    few_shapes: Flag = False


class Packed(Spec):
    """Several documents or pairs in a row of `length` tokens, separated by segments."""

    kind: Literal["packed"] = "packed"
    tokens: Size  # most tokens of a batch, padding included
    length: Size  # tokens of a row


class Crops(Spec):
    """`rows` random crops of `length` tokens from one long text."""

    kind: Literal["crops"] = "crops"
    rows: Size  # rows of a batch
    length: Size  # tokens of a row


class Ordered(Spec):
    """One long text cut into `rows` equal parts: each batch holds the next `length` tokens of every part.

    A model with `memory` continues from the previous batch. At the end of the text, its memory is cleared.
    """

    kind: Literal["ordered"] = "ordered"
    rows: Size  # rows of a batch
    length: Size  # tokens of a row


class Lengths(NamedTuple):
    """Lengths of all training examples in tokens, of the longer side where there are two."""

    total: int
    longest: int


Batches = Annotated[Padded | Packed | Crops | Ordered, *BY_KIND]
