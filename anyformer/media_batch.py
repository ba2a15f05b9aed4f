"""The segments of a batch that are not tokens: images, sounds and feature vectors, and their places in the rows."""

from typing import NamedTuple

from torch import Tensor

from anyformer.config import MediaKind


class MediaBatch(NamedTuple):
    """The segments of all rows, by kind; `..._at` [b, t] is the index of a place in the vectors of its kind, or -1."""

    images: Tensor | None = None  # [n, c, h, w]; image i has the vectors from i · patches on
    image_at: Tensor | None = None
    sounds: Tensor | None = None  # log-mel frames [n, frames, mels], padded to a multiple of the stride
    frames: Tensor | None = None  # int [n]: frames of each sound, without padding
    audio_at: Tensor | None = None
    features: Tensor | None = None  # [n, size]
    features_at: Tensor | None = None

    def at(self, kind: MediaKind) -> Tensor | None:
        """Return the indices of a kind [b, t]."""
        found: Tensor | None = getattr(self, f"{kind}_at")
        return found
