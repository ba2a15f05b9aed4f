"""Random changes of the images and sounds of a batch, by one random generator per batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.recipe import AudioAugment, Augment, ImageAugment

GREY = 128  # level of an erased square: the middle of the range that a model reads
DECIBELS = 40.0  # per unit of a log-mel frame: frames are log10 of a power, divided by 4
LUMA = (0.299, 0.587, 0.114)  # share of red, green and blue in the brightness


class Augmentation:
    """Changes a batch of images, or of sounds; the result depends on the generator alone."""

    def __init__(self, spec: Augment):
        self.spec = spec

    def images(self, images: np.ndarray, rng: np.random.Generator) -> Tensor:
        """Return changed images with levels from 0 to 255, float32 [n, c, h, w], from uint8."""
        spec = self.spec.image
        if spec is None:
            return torch.from_numpy(images).float()
        turned = spec.rotate or spec.scale or spec.shear
        changed = _warp(images, spec, rng) if turned else torch.from_numpy(_move(images, spec, rng)).float()
        if spec.brightness or spec.contrast or spec.saturation:
            changed = _recolour(changed, spec, rng)
        if spec.erase:
            _erase(changed.numpy(), spec.erase, rng)
        return changed

    def sounds(self, sounds: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """Return changed log-mel frames, each [frames, mels]."""
        spec = self.spec.audio
        return list(sounds) if spec is None else [_change_sound(frames, spec, rng) for frames in sounds]


def _move(images: np.ndarray, spec: ImageAugment, rng: np.random.Generator) -> np.ndarray:
    """Shift by whole pixels, and mirror."""
    n, _, height, width = images.shape
    moved = np.zeros_like(images)
    down, right = rng.integers(-spec.shift, spec.shift + 1, (2, n)).tolist()
    for i, (y, x, mirror) in enumerate(zip(down, right, _mirrored(spec, n, rng).tolist(), strict=True)):
        image = images[i, :, :, ::-1] if mirror else images[i]
        part = image[:, max(-y, 0) : max(height - y, 0), max(-x, 0) : max(width - x, 0)]
        moved[i, :, max(y, 0) : max(height + y, 0), max(x, 0) : max(width + x, 0)] = part
    return moved


def _mirrored(spec: ImageAugment, n: int, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(rng.random(n) < 0.5) & spec.flip


def _warp(images: np.ndarray, spec: ImageAugment, rng: np.random.Generator) -> Tensor:
    """Shift, mirror, turn, scale and shear in one bilinear interpolation."""
    n, _, height, width = images.shape
    angle = np.deg2rad(rng.uniform(-spec.rotate, spec.rotate, n))
    size = 1 + rng.uniform(-spec.scale, spec.scale, n)
    shear = rng.uniform(-spec.shear, spec.shear, n)
    right, down = (rng.uniform(-spec.shift, spec.shift, n) * 2 / side for side in (width, height))
    side = np.where(_mirrored(spec, n, rng), -1.0, 1.0)
    cos, sin = np.cos(angle) / size, np.sin(angle) / size
    # from a pixel of the result to its origin, both in [-1, 1]: [n, h, w, (x, y)]
    columns, rows = ((np.arange(size) * 2 + 1) / size - 1 for size in (width, height))
    to_x = np.array([side * cos, side * (shear * cos - sin), right], dtype=np.float32)[:, :, None, None]
    to_y = np.array([sin, shear * sin + cos, down], dtype=np.float32)[:, :, None, None]
    x, y = columns.astype(np.float32), rows.astype(np.float32)[:, None]
    grid = np.stack([to[0] * x + to[1] * y + to[2] for to in (to_x, to_y)], axis=-1)
    return F.grid_sample(torch.from_numpy(images).float(), torch.from_numpy(grid), align_corners=False)


def _recolour(images: Tensor, spec: ImageAugment, rng: np.random.Generator) -> Tensor:
    """Change brightness b, contrast c and saturation s of each image: one matrix per image.

    x becomes c · b · (s · x + (1 - s) · grey(x)) + (1 - c) · mean, where mean is that of b · x.
    """
    n, channels = images.shape[:2]
    b, c, s = (
        torch.from_numpy(1 + rng.uniform(-most, most, n)).float()[:, None, None]
        for most in (spec.brightness, spec.contrast, spec.saturation)
    )
    grey = torch.tensor(LUMA).expand(3, 3) if channels == 3 else torch.ones(1, 1)
    matrix = c * b * (s * torch.eye(channels) + (1 - s) * grey)
    offset = (1 - c) * b * images.mean((1, 2, 3))[:, None, None]
    changed = torch.baddbmm(offset.expand(n, channels, 1), matrix, images.flatten(2))
    return changed.clamp_(0, 255).view(images.shape)


def _erase(images: np.ndarray, side: int, rng: np.random.Generator) -> None:
    """Set a square of each image to grey; a part of it may lie outside."""
    n, _, height, width = images.shape
    tops, lefts = (rng.integers(-(side // 2), size - side // 2, n).tolist() for size in (height, width))
    for image, top, left in zip(images, tops, lefts, strict=True):
        image[:, max(top, 0) : top + side, max(left, 0) : left + side] = GREY


def _change_sound(frames: np.ndarray, spec: AudioAugment, rng: np.random.Generator) -> np.ndarray:
    """Change loudness, add noise, and set bands of time and frequency to the mean."""
    frames = frames + np.float32(rng.uniform(-spec.gain, spec.gain) / DECIBELS)
    if spec.noise:
        frames += rng.normal(0.0, spec.noise, frames.shape).astype(np.float32)
    mean = frames.mean()
    for axis, masks, most in ((0, spec.time_masks, spec.time_width), (1, spec.mel_masks, spec.mel_width)):
        for _ in range(masks):
            width = int(rng.integers(0, min(most, frames.shape[axis]) + 1))
            start = int(rng.integers(0, frames.shape[axis] - width + 1))
            np.moveaxis(frames, axis, 0)[start : start + width] = mean
    return frames
