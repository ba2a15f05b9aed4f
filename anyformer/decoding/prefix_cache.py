"""Prefix caching: what prompts have in common with texts read before is not read again.

Examples are a long instruction before many questions, and a conversation that continues.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.cache.kv_cache import Cache
from anyformer.cache.snapshot import Snapshot, adopt, snapshot
from anyformer.decoding.buffers import key_of
from anyformer.nn.model import Transformer


class Begun(NamedTuple):
    """The beginning of a prompt that was read before."""

    length: int
    known: Snapshot | None

    def put(self, cache: Cache, row: int) -> None:
        if self.known is not None and self.length:
            adopt(cache, row, self.known, self.length)


class Fingerprint(NamedTuple):
    """Differs between two models that compute other keys and values, and when a model has changed."""

    versions: Hashable  # config, precision, addresses and version counters
    values: tuple[int, ...]  # a checksum of each tensor: writes through `.data` and CUDA graphs change no counter


class Reuse:
    """The KV cache of the last `texts` texts that a decoder has read: `generate(..., reuse=Reuse())`.

    Tokens are the same as without. Texts are forgotten once the model's weights, buffers or precision change: each call
    reads all weights once to find out, which takes as long as a few decode steps.
    """

    def __init__(self, texts: int = 8):
        if type(texts) is not int or texts < 1:
            raise ValueError(f"texts = {texts!r}: must be a whole number of at least 1")
        self.texts = texts
        self.spared = 0  # tokens that were not read again, so far
        self.model: Fingerprint | None = None  # of the model that read the texts
        self._known: list[tuple[list[int], Snapshot]] = []  # the newest last

    def find(self, model: Transformer, cache: Cache, prompts: Sequence[Sequence[int]]) -> "list[Begun]":
        """Return the longest known beginning of each prompt that fits a cache like this one.

        At least one token is left to read, since the logits after it are needed.
        """
        if (now := fingerprint(model)) != self.model:
            self._known, self.model = [], now
        found = []
        for prompt in prompts:
            each = [
                Begun(known.fits(cache, min(_common(ids, prompt), len(prompt) - 1)), known)
                for ids, known in self._known
            ]
            found.append(max(each, key=lambda begun: begun.length, default=Begun(0, None)))
        self.spared += sum(begun.length for begun in found)
        return found

    def keep(self, model: Transformer, since: Fingerprint | None, cache: Cache, texts: Sequence[Sequence[int]]) -> None:
        """Remember what the rows of a cache have read, unless the model changed `since` they began."""
        if since != self.model or (since is not None and _versions(model) != since.versions):
            return
        for row, ids in list(enumerate(texts))[-self.texts :]:
            new = snapshot(cache, row)
            self._known = [
                (old, known) for old, known in self._known if known.form != new.form or _common(old, ids) < len(old)
            ]
            self._known.append((list(ids), new))
        self._known = self._known[-self.texts :]

    def nbytes(self) -> int:
        """Bytes that are remembered."""
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
    """How many ids two texts have in common before they differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
