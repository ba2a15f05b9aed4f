"""Prompts that begin alike are read once: a long instruction before many questions, a conversation that goes on."""

from collections.abc import Sequence
from typing import NamedTuple

from anyformer.nn.cache import Cache
from anyformer.nn.model import Transformer
from anyformer.nn.snapshot import Snapshot, adopt, snapshot


class Begun(NamedTuple):
    """The beginning of a prompt that was read before."""

    length: int
    known: Snapshot | None

    def put(self, cache: Cache, row: int) -> None:
        if self.known is not None and self.length:
            adopt(cache, row, self.known, self.length)


class Reuse:
    """Remembers the last `texts` texts that a decoder has read, for the next call: `generate(..., reuse=Reuse())`.

    What is decoded is the same as without. Once the model's weights change, nothing is remembered any more.
    """

    def __init__(self, texts: int = 8):
        if texts < 1:
            raise ValueError(f"texts = {texts}: must be at least 1")
        self.texts = texts
        self.spared = 0  # tokens that were not read again, so far
        self._known: list[tuple[list[int], Snapshot]] = []  # the newest last
        self._weights: tuple[tuple[int, int], ...] = ()

    def find(self, model: Transformer, cache: Cache, prompts: Sequence[Sequence[int]]) -> "list[Begun]":
        """What is known of each prompt, for a cache like this one.

        At least one token is left to read: what follows it is to be known.
        """
        if (weights := _state(model)) != self._weights:
            self._known, self._weights = [], weights
        found = []
        for prompt in prompts:
            each = [
                Begun(known.fits(cache, min(_common(ids, prompt), len(prompt) - 1)), known)
                for ids, known in self._known
            ]
            found.append(max(each, key=lambda begun: begun.length, default=Begun(0, None)))
        self.spared += sum(begun.length for begun in found)
        return found

    def keep(self, cache: Cache, texts: Sequence[Sequence[int]]) -> None:
        """Remembers what the rows of a cache have read."""
        for row, ids in list(enumerate(texts))[-self.texts :]:
            self._known = [(old, known) for old, known in self._known if _common(old, ids) < len(old)]
            self._known.append((list(ids), snapshot(cache, row)))
        self._known = self._known[-self.texts :]

    def nbytes(self) -> int:
        """Bytes that are remembered."""
        return sum(known.nbytes() for _, known in self._known)


def _state(model: Transformer) -> tuple[tuple[int, int], ...]:
    """Changes whenever weights do."""
    return tuple((id(p), p._version) for p in model.parameters())


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two texts have in common before they differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
