"""Random changes of the images and sounds of a batch, by one random generator per batch.

Those of images are only drawn here: `MediaBatch.decode` applies them, on the device of the model.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anyformer.recipe import AudioAugment, Augment, ImageAugment

DECIBELS = 40.0  # per unit of a log-mel frame: frames are log10 of a power, divided by 4
LUMA = (0.299, 0.587, 0.114)  # share of red, green and blue in the brightness


class Augmentation:
    """Changes a batch of images, or of sounds; the result depends on the generator alone."""

    def __init__(self, spec: Augment):
        self.spec = spec

    def images(self, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, Tensor]:
        """Return the changes of images of a shape, [n, c, h, w], as fields of `MediaBatch`."""
        spec = self.spec.image
        if spec is None:
            return {}
        turned = spec.rotate or spec.scale or spec.shear
        changes = {"warps": _warps(shape, spec, rng)} if turned else {"moves": _moves(shape, spec, rng)}
        if spec.brightness or spec.contrast or spec.saturation:
            changes["colours"] = _colours(shape, spec, rng)
        if spec.erase:
            changes["erased"] = _squares(shape, spec.erase, rng)
        return {name: torch.from_numpy(x) for name, x in changes.items()}

    def sounds(self, sounds: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """Return changed log-mel frames, each [frames, mels]."""
        spec = self.spec.audio
        return list(sounds) if spec is None else [_change_sound(frames, spec, rng) for frames in sounds]


def _moves(shape: tuple[int, ...], spec: ImageAugment, rng: np.random.Generator) -> np.ndarray:
    """Shift by whole pixels, and mirror."""
    n, width = shape[0], shape[3]
    down, right = rng.integers(-spec.shift, spec.shift + 1, (2, n))
    mirrored = _mirrored(spec, n, rng)
    columns = np.where(mirrored, (np.full(n, -1), width - 1 + right), (np.ones(n), -right))
    return np.stack([(np.ones(n), -down), columns]).transpose(2, 0, 1).astype(np.int64)


def _mirrored(spec: ImageAugment, n: int, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(rng.random(n) < 0.5) & spec.flip


def _warps(shape: tuple[int, ...], spec: ImageAugment, rng: np.random.Generator) -> np.ndarray:
    """Shift, mirror, turn, scale and shear: maps from a pixel of the result to its origin."""
    n, _, height, width = shape
    angle = np.deg2rad(rng.uniform(-spec.rotate, spec.rotate, n))
    size = 1 + rng.uniform(-spec.scale, spec.scale, n)
    shear = rng.uniform(-spec.shear, spec.shear, n)
    right, down = (rng.uniform(-spec.shift, spec.shift, n) * 2 / side for side in (width, height))
    side = np.where(_mirrored(spec, n, rng), -1.0, 1.0)
    cos, sin = np.cos(angle) / size, np.sin(angle) / size
    maps = (side * cos, side * (shear * cos - sin), right), (sin, shear * sin + cos, down)
    return np.array(maps, dtype=np.float32).transpose(2, 0, 1)


def _colours(shape: tuple[int, ...], spec: ImageAugment, rng: np.random.Generator) -> np.ndarray:
    """Change brightness b, contrast c and saturation s of each image.

    x becomes c · b · (s · x + (1 - s) · grey(x)) + (1 - c) · mean, where mean is that of b · x.
    """
    n, channels = shape[:2]
    most = (spec.brightness, spec.contrast, spec.saturation)
    b, c, s = (1 + rng.uniform(-one, one, n)[:, None, None] for one in most)
    grey = np.tile(LUMA, (3, 1)) if channels == 3 else np.ones((1, 1))
    matrix = c * b * (s * np.eye(channels) + (1 - s) * grey)
    offset = np.broadcast_to((1 - c) * b, (n, channels, 1))
    return np.concatenate([matrix, offset], axis=2).astype(np.float32)


def _squares(shape: tuple[int, ...], side: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a square of each image; a part of it may lie outside."""
    n, _, height, width = shape
    first = np.stack([rng.integers(-(side // 2), size - side // 2, n) for size in (height, width)], axis=1)
    return np.stack([first, first + side], axis=2)


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
