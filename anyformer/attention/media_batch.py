"""The segments of a batch that are not tokens: images, sounds and feature vectors, and their places in the rows.

Images are bytes until they are on the device of the model, and `MediaBatch.decode` changes and normalises them there:
the process that prefetches batches only draws the random changes.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import MediaKind

GREY = 128.0  # level of an erased square: the middle of the range that a model reads


class MediaBatch(NamedTuple):
    """The segments of all rows, by kind; `..._at` [b, t] is the index of a place in the vectors of its kind, or -1."""

    images: Tensor | None = None  # [n, c, h, w], bytes or decoded; image i has the vectors from i · patches on
    image_at: Tensor | None = None
    sounds: Tensor | None = None  # log-mel frames [n, frames, mels], padded to a multiple of the stride
    frames: Tensor | None = None  # int [n]: frames of each sound, without padding
    audio_at: Tensor | None = None
    features: Tensor | None = None  # [n, size]
    features_at: Tensor | None = None
    # what `decode` does with images, in this order; None: nothing
    moves: Tensor | None = None  # int [n, 2, 2]: factor f and offset o of rows and of columns, i comes from f · i + o
    warps: Tensor | None = None  # [n, 2, 3]: from (x, y, 1) to x and y in the image, in [-1, 1]
    colours: Tensor | None = None  # [n, c, c + 1]: a matrix for the channels, and a factor for the mean of the image
    erased: Tensor | None = None  # int [n, 2, 2]: first row of a square and the row after it; the same of columns
    levels: Tensor | None = None  # [3, c, 1, 1]: scale, mean and deviation

    def at(self, kind: MediaKind) -> Tensor | None:
        """Return the indices of a kind [b, t]."""
        found: Tensor | None = getattr(self, f"{kind}_at")
        return found

    def decode(self) -> "MediaBatch":
        """Return the segments with images as a model reads them, on the same device."""
        if self.images is None or self.levels is None:
            return self
        images = self.images if self.moves is None else _move(self.images, self.moves)
        pixels = images.float()
        if self.warps is not None:
            pixels = _warp(pixels, self.warps)
        if self.colours is not None:
            pixels = _recolour(pixels, self.colours)
        if self.erased is not None:
            pixels.masked_fill_(_inside(self.erased, images)[:, None], GREY)
        scale, mean, deviation = self.levels
        pixels.mul_(scale).sub_(mean).div_(deviation)
        return MediaBatch(pixels, *self[1 : MediaBatch._fields.index("moves")])


def _indices(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of rows [h] and of columns [w]."""
    height, width = images.shape[2:]
    return torch.arange(height, device=images.device), torch.arange(width, device=images.device)


def _move(images: Tensor, moves: Tensor) -> Tensor:
    """Shift by whole pixels, and mirror: pixels are copied, and those from outside are black."""
    (n, channels, height, width), (rows, columns) = images.shape, _indices(images)
    (by_row, from_row), (by_column, from_column) = moves[..., None].movedim(0, 2)  # each [n, 1]
    rows = (by_row * rows + from_row).clamp(-1, height) + 1  # within a border of one pixel
    columns = (by_column * columns + from_column).clamp(-1, width) + 1
    index = (rows[:, :, None] * (width + 2) + columns[:, None]).view(n, 1, height * width)
    bordered = F.pad(images, (1, 1, 1, 1)).flatten(2)
    return bordered.gather(2, index.expand(-1, channels, -1)).view(images.shape)


def _warp(images: Tensor, warps: Tensor) -> Tensor:
    """Shift, mirror, turn, scale and shear in one bilinear interpolation."""
    y, x = ((i * 2 + 1) / len(i) - 1 for i in _indices(images))
    by_x, by_y, offset = warps[:, :, :, None, None].unbind(2)
    grid = by_x * x + by_y * y[:, None] + offset  # [n, 2, h, w]
    return F.grid_sample(images, grid.movedim(1, -1), align_corners=False)


def _recolour(images: Tensor, colours: Tensor) -> Tensor:
    """Map the channels of each image by a matrix, and add a multiple of its mean."""
    offset = colours[:, :, -1:] * images.mean((1, 2, 3))[:, None, None]
    with torch.autocast(images.device.type, enabled=False):  # 256 levels are too many for bf16
        changed = torch.baddbmm(offset, colours[:, :, :-1], images.flatten(2))
    return changed.clamp_(0, 255).view(images.shape)


def _inside(squares: Tensor, images: Tensor) -> Tensor:
    """Return which pixels are inside of the square of their image, [n, h, w]."""
    rows, columns = _indices(images)
    (top, bottom), (left, right) = squares[..., None].movedim(0, 2)  # each [n, 1]
    return ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None]
