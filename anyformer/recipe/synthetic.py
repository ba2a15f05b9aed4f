"""Synthetic sources: rows of digits, dates, additions, and scenes with captions. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import Spec
from anyformer.config.spec import Size

Length = Annotated[int, Field(strict=True, ge=1, le=10_000)]


class Digits(Spec):
    """Rows of digits."""

    kind: str
    count: Size  # number of rows
    shortest: Length = 6  # fewest digits of a row
    longest: Length = 11  # most digits of a row


class SortDigits(Digits):
    """3 1 2 -> 1 2 3"""

    kind: Literal["sort"] = "sort"


class CopyDigits(Digits):
    """3 1 2 -> 3 1 2"""

    kind: Literal["copy"] = "copy"


class ReverseDigits(Digits):
    """3 1 2 -> 2 1 3"""

    kind: Literal["reverse"] = "reverse"


class PreferSorted(Digits):
    """3 1 2 -> 1 2 3, and 2 1 3 as the answer that is worse: for the task dpo."""

    kind: Literal["prefer_sorted"] = "prefer_sorted"


class WrittenDates(Spec):
    """tuesday, march 5 1996 -> 1996-03-05, in a dozen formats."""

    kind: Literal["dates"] = "dates"
    count: Size  # number of rows


class Additions(Spec):
    """17+25 -> 42, with numbers of up to `digits` digits, most significant first."""

    kind: Literal["addition"] = "addition"
    count: Size  # number of rows
    digits: Annotated[int, Field(strict=True, ge=1, le=100)] = 3  # most digits of a number


class PassKeys(Spec):
    """A number in a long text that says nothing, and the number as the answer (Mohtashami and Jaggi 2023).

    the grass is green . … the pass key is 4 1 7 . … the sky is blue . -> 4 1 7: one word per token for the tokenizer
    `words`. The number is at any depth of the text. A number of one split never occurs in another.
    """

    kind: Literal["passkey"] = "passkey"
    count: Size  # number of rows
    shortest: Length = 16  # fewest words around the number
    longest: Length = 480  # most words around the number
    digits: Annotated[int, Field(strict=True, ge=3, le=9)] = 3  # digits of the number


SceneSize = Annotated[int, Field(strict=True, ge=40, le=1024)]
Shapes = Annotated[int, Field(strict=True, ge=1, le=3)]


class Scenes(Spec):
    """Pictures of coloured shapes, and sentences that describe them: "a large red circle left of a small blue square".

    A picture is a function of its reference, such as `<image:scene:48 large red circle 12 20>`: size, shapes, centres.
    Scenes of one split never occur in another. For a compositional split, the training rows are `without` some pairs of
    colour and shape, and each test row has at least one of these (`only`).
    """

    kind: Literal["scenes"] = "scenes"
    count: Size  # number of rows
    size: SceneSize = 48  # height and width of a picture, in pixels
    most: Shapes = 3  # most shapes of a scene
    without: tuple[str, ...] = ()  # pairs of colour and shape that no scene has: "red circle"
    only: tuple[str, ...] = ()  # pairs of which each scene has at least one; empty: any scene


Synthetic = SortDigits | CopyDigits | ReverseDigits | PreferSorted | WrittenDates | Additions | PassKeys
