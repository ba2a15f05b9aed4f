"""Images and spectrograms of a text as pixels, with the places of the row that they take."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anyformer.data.media import Segment


def pictures(segments: Sequence[Segment]) -> Iterator[dict[str, Any]]:
    """Yield each image and sound: kind, start, grid (rows and columns of places), size (height and width), channels,
    and pixels, base64 of bytes row by row. A sound has one row of places; its low bands are at the bottom."""
    for one in segments:
        match one.kind:
            case "image":
                pixels = one.value.transpose(1, 2, 0)
            case "audio":
                pixels = _grey(one.value.T[::-1])[:, :, None]
            case "features":
                continue
        height, width, channels = pixels.shape
        yield {
            "kind": one.kind,
            "start": one.start,
            "grid": list(one.grid),
            "size": [height, width],
            "channels": channels,
            "pixels": b64encode(np.ascontiguousarray(pixels).tobytes()).decode(),
        }


def _grey(values: np.ndarray) -> np.ndarray:
    """Return values as bytes, from the lowest to the highest."""
    low, high = float(values.min()), float(values.max())
    scaled: np.ndarray = ((values - low) / (high - low or 1.0) * 255).round().astype(np.uint8)
    return scaled
