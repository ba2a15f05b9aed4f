"""Prefix caching: a beginning that a prompt shares with an earlier text is not read again.

Examples are a long instruction before many questions, and a conversation that continues.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.attention.cache.kv_cache import Cache
from anyformer.attention.cache.snapshot import Snapshot, adopt, snapshot
from anyformer.generation.buffers import key_of
from anyformer.nn.model import Transformer


class CachedPrefix(NamedTuple):
    """The beginning of a prompt that was read before."""

    length: int
    snapshot: Snapshot | None

    def copy_into(self, cache: Cache, row: int) -> None:
        if self.snapshot is not None and self.length:
            adopt(cache, row, self.snapshot, self.length)


class Fingerprint(NamedTuple):
    """Equal only for the same model with unchanged weights, whose keys and values are equal."""

    versions: Hashable  # config, precision, addresses and version counters
    values: tuple[int, ...]  # a checksum of each tensor: writes through `.data` and CUDA graphs change no counter


class Reuse:
    """The KV cache of the last `texts` texts that a decoder has read: `generate(..., reuse=Reuse())`.

    Answers do not change. Texts are forgotten once the model's weights, buffers or precision change: each call
    reads all weights once to find out, which takes as long as a few decode steps.

    Args:
        texts: how many of the last texts are kept.

    Attributes:
        spared: tokens that were not read again, so far.

    Raises:
        ValueError: `texts` is below 1.

    Example:
        >>> model = af.Transformer(af.presets.gpt2(depth=2, width=64, heads=4, vocab=97))
        >>> reuse = af.Reuse()
        >>> for last in (4, 5):
        ...     _ = af.generate(model, torch.tensor([[1, 2, 3, last]]), max_new_tokens=2, reuse=reuse)
        >>> reuse.spared
        3
    """

    def __init__(self, texts: int = 8):
        if type(texts) is not int or texts < 1:
            raise ValueError(f"texts = {texts!r}: must be a whole number of at least 1")
        self.texts = texts
        self.spared = 0  # tokens that were not read again, so far
        self.model: Fingerprint | None = None  # of the model that read the texts
        self._known: list[tuple[list[int], Snapshot]] = []  # the newest last

    def find(self, model: Transformer, cache: Cache, prompts: Sequence[Sequence[int]]) -> list[CachedPrefix]:
        """Return the longest known beginning of each prompt that fits a cache like this one.

        At least one token is left to read, since the logits after it are needed.
        """
        if (now := fingerprint(model)) != self.model:
            self._known, self.model = [], now
        longest = []
        for prompt in prompts:
            prefixes = [
                CachedPrefix(known.fits(cache, min(_common(ids, prompt), len(prompt) - 1)), known)
                for ids, known in self._known
            ]
            longest.append(max(prefixes, key=lambda prefix: prefix.length, default=CachedPrefix(0, None)))
        self.spared += sum(prefix.length for prefix in longest)
        return longest

    def keep(self, model: Transformer, since: Fingerprint | None, cache: Cache, texts: dict[int, list[int]]) -> None:
        """Remember the ids that some rows of a cache have read, unless the model changed `since` they began."""
        if since != self.model or (since is not None and _versions(model) != since.versions):
            return
        for row, ids in list(texts.items())[-self.texts :]:
            new = snapshot(cache, row)
            self._known = [
                (old, known) for old, known in self._known if known.form != new.form or _common(old, ids) < len(old)
            ]
            self._known.append((ids, new))
        self._known = self._known[-self.texts :]

    def nbytes(self) -> int:
        """Return the memory that the snapshots take."""
        return sum(known.nbytes() for _, known in self._known)


def fingerprint(model: Transformer) -> Fingerprint:
    weights = _weights(model)
    return Fingerprint(_versions(model), tuple(torch.stack([_checksum(x) for x in weights]).tolist()))


def _versions(model: Transformer) -> Hashable:
    return model.config, key_of(model), tuple(0 if x.is_inference() else x._version for x in _weights(model))


def _weights(model: Transformer) -> list[Tensor]:
    return [x.detach() for group in (model.parameters(), model.buffers()) for x in group if x.numel()]


def _checksum(x: Tensor) -> Tensor:
    """Return a 64-bit checksum: of each row the XOR and the sum of its elements, weighted by the row's index."""
    rows = x.reshape(len(x), -1) if x.dim() > 1 else x.reshape(-1, 1)
    if rows.element_size() == 1:  # torch has no checksum of 8-bit floats
        rows = rows.view(torch.uint8)
    bits = torch.hash_tensor(rows, dim=-1).view(torch.int64)
    sums = rows.sum(dim=-1, dtype=torch.float32).view(torch.int32).long() << 17
    return ((bits ^ sums) * torch.arange(1, 2 * len(rows), 2, device=x.device)).sum()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
