"""Synthetic sources: rows of digits, dates, additions, scenes with captions, and walks. Imports no torch."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from anyformer.config import Fault
from anyformer.config.spec import Size
from anyformer.recipe.source import EPISODES, PAIR, PREFERRED, Length, Root, SingleSource, Split

if TYPE_CHECKING:
    from anyformer.data.readers import Rows
    from anyformer.data.synthetic import SyntheticPair, SyntheticPool


class Synthetic(SingleSource):
    """Pairs of a text and its answer, drawn from pools: one for each shape that they may have."""

    count: Size  # number of rows
    gives: ClassVar[tuple[tuple[str, ...], ...]] = (PAIR,)

    @abstractmethod
    def pools(self) -> "Iterator[SyntheticPool]":
        """Yield the pools."""

    def least(self) -> int:
        """Return how many characters a row has at least, or fewer."""
        return 0

    def keeps(self, row: "SyntheticPair") -> bool:
        """Return whether a row may be used."""
        return True

    def columns(self, rows: "Sequence[SyntheticPair]") -> dict[str, list[str]]:
        """Return the columns of some rows."""
        return {"source": [row.source for row in rows], "target": [row.target for row in rows]}

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.readers import Rows
        from anyformer.data.synthetic import generate

        return Rows.made(f"{self.kind} ({split})", generate(self, split, seed))


class Ranged(Synthetic):
    """Rows with sizes from `shortest` to `longest`."""

    shortest: Length = 6  # fewest digits of a row
    longest: Length = 11  # most digits of a row

    def least(self) -> int:
        return self.shortest

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        if self.shortest > self.longest:
            yield Fault("shortest", f"= {self.shortest}: must be at most longest = {self.longest}")


class Digits(Ranged):
    """Rows of digits, and answers computed from them."""

    @abstractmethod
    def answer(self, digits: str) -> Iterable[str]:
        """Return the digits of the answer."""

    def pools(self) -> "Iterator[SyntheticPool]":
        from anyformer.data.synthetic import digits

        return digits(self.shortest, self.longest, self.answer)


class SortDigits(Digits):
    """3 1 2 -> 1 2 3"""

    kind: Literal["sort"] = "sort"

    def answer(self, digits: str) -> Iterable[str]:
        return sorted(digits)


class CopyDigits(Digits):
    """3 1 2 -> 3 1 2"""

    kind: Literal["copy"] = "copy"

    def answer(self, digits: str) -> Iterable[str]:
        return digits


class ReverseDigits(Digits):
    """3 1 2 -> 2 1 3"""

    kind: Literal["reverse"] = "reverse"

    def answer(self, digits: str) -> Iterable[str]:
        return reversed(digits)


class PreferSorted(Digits):
    """3 1 2 -> 1 2 3, and 2 1 3 as the answer that is worse: for the task dpo."""

    kind: Literal["prefer_sorted"] = "prefer_sorted"
    gives = (PREFERRED,)

    def answer(self, digits: str) -> Iterable[str]:
        return sorted(digits)

    def keeps(self, row: "SyntheticPair") -> bool:
        return row.target != row.source[::-1]  # two equal answers

    def columns(self, rows: "Sequence[SyntheticPair]") -> dict[str, list[str]]:
        return {**super().columns(rows), "rejected": [row.source[::-1] for row in rows]}

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        if self.shortest == 1:
            yield Fault("shortest", "= 1: a single digit is sorted and reversed at once: must be at least 2")
        else:
            yield from super().faults(task, columns)


class WrittenDates(Synthetic):
    """tuesday, march 5 1996 -> 1996-03-05, in a dozen formats."""

    kind: Literal["dates"] = "dates"

    def pools(self) -> "Iterator[SyntheticPool]":
        from anyformer.data.synthetic import dates

        return dates()


class Additions(Synthetic):
    """17+25 -> 42, with numbers of up to `digits` digits, most significant first."""

    kind: Literal["addition"] = "addition"
    digits: Annotated[int, Field(strict=True, ge=1, le=100)] = 3  # most digits of a number

    def pools(self) -> "Iterator[SyntheticPool]":
        from anyformer.data.synthetic import additions

        return additions(self.digits)


class PassKeys(Ranged):
    """A number in a long text that says nothing, and the number as the answer (Mohtashami and Jaggi 2023).

    the grass is green . … the pass key is 4 1 7 . … the sky is blue . -> 4 1 7: one word per token for the tokenizer
    `words`. The number is at any depth of the text. A number of one split never occurs in another.
    """

    kind: Literal["passkey"] = "passkey"
    shortest: Length = 16  # fewest words around the number
    longest: Length = 480  # most words around the number
    digits: Annotated[int, Field(strict=True, ge=3, le=9)] = 3  # digits of the number

    def pools(self) -> "Iterator[SyntheticPool]":
        from anyformer.data.synthetic import pass_keys

        return pass_keys(self.digits, range(self.shortest, self.longest + 1))


SCENE_PREFIX = "scene:"  # of references to their pictures
SceneSize = Annotated[int, Field(strict=True, ge=40, le=1024)]
Shapes = Annotated[int, Field(strict=True, ge=1, le=3)]


class Scenes(SingleSource):
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
    gives = (PAIR,)

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.readers import Rows
        from anyformer.data.scenes import generate

        return Rows.made(f"scenes ({split})", generate(self, split, seed))


class KeyToDoorWalks(SingleSource):
    """Random walks in the environment key-to-door: a reward at the end depends on an action at the beginning."""

    kind: Literal["key_to_door"] = "key_to_door"
    count: Size  # number of episodes
    gives = (EPISODES,)

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.key_to_door import random_walks
        from anyformer.data.trajectories import episode_rows

        return episode_rows(f"{self.kind} ({split})", enumerate(random_walks(self.count, split, seed), 1))
