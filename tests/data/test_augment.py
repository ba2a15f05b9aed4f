"""Augmentation: random changes of images and sounds, drawn by the reader of batches and applied by `MediaBatch`."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.attention.media_batch import GREY, MediaBatch
from anyformer.config import ConfigError, ImageSegment, Media
from anyformer.data.augment import Augmentation
from anyformer.data.batch import Batch
from anyformer.data.media import MediaStore
from anyformer.recipe import AudioAugment, Augment, ImageAugment
from anyformer.recipe.ready import read_recipe
from anyformer.tasks.base import inputs_of

CHANGES = st.builds(
    ImageAugment,
    shift=st.integers(0, 5),
    flip=st.booleans(),
    rotate=st.sampled_from([0.0, 20.0]),
    erase=st.integers(0, 3),
    shear=st.sampled_from([0.0, 0.2]),
    brightness=st.sampled_from([0.0, 0.4]),
    contrast=st.sampled_from([0.0, 0.4]),
    saturation=st.sampled_from([0.0, 0.4]),
)


LEVELS = torch.tensor([1.0, 0.0, 1.0])[:, None, None, None]  # of images that stay levels from 0 to 255


def drawn(spec: ImageAugment, images: np.ndarray, seed: int) -> MediaBatch:
    changes = Augmentation(Augment(image=spec)).images(images.shape, np.random.default_rng(seed))
    return MediaBatch(images=torch.from_numpy(images), levels=LEVELS.expand(-1, images.shape[1], 1, 1), **changes)


def augmented(spec: ImageAugment, images: np.ndarray, seed: int) -> torch.Tensor:
    found = drawn(spec, images, seed).decode().images
    assert found is not None
    return found


@given(CHANGES, st.sampled_from([1, 3]), st.integers(0, 9))
def test_augmentation_is_a_function_of_its_generator(spec: ImageAugment, channels: int, seed: int):
    images = np.random.default_rng(0).integers(0, 256, (3, channels, 4, 4), dtype=np.uint8)
    before = images.copy()
    a, b = (augmented(spec, images, seed) for _ in range(2))
    assert a.equal(b)
    assert np.array_equal(images, before)
    assert 0 <= float(a.min()) <= float(a.max()) <= 255.001


@given(CHANGES, st.sampled_from([1, 3]), st.integers(0, 9))
def test_images_are_changed_pixel_by_pixel_as_the_formulas_say(spec: ImageAugment, channels: int, seed: int):
    images = np.random.default_rng(seed).integers(0, 256, (2, channels, 4, 6), dtype=np.uint8)
    one = drawn(spec, images, seed)
    expected = np.stack([reference(image, one, i) for i, image in enumerate(images)])
    np.testing.assert_allclose(augmented(spec, images, seed), expected, atol=1e-2)


def reference(image: np.ndarray, changes: MediaBatch, n: int) -> np.ndarray:
    """Change an image, [c, h, w], by loops over its pixels."""
    channels, height, width = image.shape
    changed = np.zeros(image.shape)

    def pixel(y: int, x: int) -> np.ndarray:
        return image[:, y, x].astype(float) if 0 <= y < height and 0 <= x < width else np.zeros(channels)

    for y, x in np.ndindex(height, width):
        if changes.moves is not None:
            (down, top), (right, left) = changes.moves[n].tolist()
            changed[:, y, x] = pixel(down * y + top, right * x + left)
        elif changes.warps is not None:
            centre = np.array([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1, 1])
            from_x, from_y = (((changes.warps[n].numpy() @ centre + 1) * (width, height)) - 1) / 2
            top, left = math.floor(from_y), math.floor(from_x)
            for v, u in np.ndindex(2, 2):
                share = (1 - abs(from_y - top - v)) * (1 - abs(from_x - left - u))
                changed[:, y, x] += share * pixel(top + v, left + u)
    if changes.colours is not None:
        colours, mean = changes.colours[n].numpy(), changed.mean()
        for y, x in np.ndindex(height, width):
            changed[:, y, x] = (colours @ [*changed[:, y, x], mean]).clip(0, 255)
    if changes.erased is not None:
        (top, bottom), (left, right) = changes.erased[n].tolist()
        for y, x in np.ndindex(height, width):
            if top <= y < bottom and left <= x < right:
                changed[:, y, x] = GREY
    return changed


@given(st.integers(0, 9))
def test_no_change_is_the_identity(seed: int):
    images = np.random.default_rng(seed).integers(0, 256, (3, 3, 4, 6), dtype=np.uint8)
    assert np.array_equal(augmented(ImageAugment(), images, seed), images)
    for spec in (ImageAugment(rotate=1e-9), ImageAugment(brightness=1e-9)):
        np.testing.assert_allclose(augmented(spec, images, seed), images, atol=1e-2)


@given(st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_shifts_and_mirrors_copy_whole_pixels(seed: int, shift: int, flip: bool):
    """Every level of an image is found in the original at the shifted place; all others are black."""
    images = np.random.default_rng(seed).integers(1, 256, (8, 3, 5, 7), dtype=np.uint8)
    rng = np.random.default_rng(seed)
    down, right = rng.integers(-shift, shift + 1, (2, 8)).tolist()
    mirrored = (rng.random(8) < 0.5) & flip
    for i, changed in enumerate(augmented(ImageAugment(shift=shift, flip=flip), images, seed).numpy()):
        image = images[i, :, :, ::-1] if mirrored[i] else images[i]
        around = np.pad(image, ((0, 0), (shift, shift), (shift, shift)))
        top, left = shift - down[i], shift - right[i]
        assert np.array_equal(changed, around[:, top : top + 5, left : left + 7])


@given(st.integers(0, 9), st.integers(1, 30))
def test_masks_of_sounds(seed: int, count: int):
    frames = np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)
    spec = AudioAugment(time_masks=1, time_width=4, mel_masks=1, mel_width=2)
    (changed,) = Augmentation(Augment(audio=spec)).sounds([frames], np.random.default_rng(seed))
    differs = changed != frames
    assert (differs.all(axis=1).sum() <= 4) or count <= 4 or differs.mean() < 1
    assert changed.shape == frames.shape


def test_augmentation_needs_a_model_that_reads_the_kind():
    with pytest.raises(ConfigError, match=r"data.augment.audio: the model reads no audio"):
        read_recipe("captions-shapes", ["data.augment={audio={gain=3.0}}"])


def test_only_training_is_augmented(tmp_path: Path):
    """With a seed, a store augments, the same for the same seed; without one it does not."""
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).integers(0, 256, (1, 4, 4, 3), dtype=np.uint8))
    spec = Media(image=ImageSegment(image_height=4, patch=2, channels=3))
    store = MediaStore(spec, False, Augmentation(Augment(image=ImageAugment(shift=1, flip=True, brightness=0.5))))
    (ids,) = store.encode([f"<image:{tmp_path / 'a.npz'}#x/0>"], lambda texts: [])

    def images(seed: tuple[int, ...] | None) -> torch.Tensor:
        media = store.read(torch.tensor([ids]), seed=seed)[1]
        assert media is not None
        assert media.images is not None
        return media.images

    assert images(None).equal(images(None))
    assert images((0, 1, 2)).equal(images((0, 1, 2)))
    assert not images((0, 1, 2)).equal(images((0, 1, 3)))
    assert not images((0, 1, 2)).equal(images(None))
    batch = store.attach(Batch(torch.tensor([ids]), torch.zeros(1, 1), None), (0, 1, 2))
    assert batch.media is not None
    assert batch.media.images is not None
    assert batch.media.images.dtype == torch.uint8
    (inputs,) = inputs_of(batch, packed=False)
    assert inputs.media is not None
    assert inputs.media.images is not None
    assert inputs.media.images.equal(images((0, 1, 2)))
