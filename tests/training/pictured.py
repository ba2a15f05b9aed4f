"""A recipe on images that trains in a moment."""

from pathlib import Path
from typing import Any

import numpy as np

from anyformer.config import Attention, Block, Classifier, ImageSegment, Media, ModelConfig, Rotary, Stack, Tokens
from anyformer.recipe import ArrayFile, Augment, Bytes, Classify, Data, ImageAugment, Recipe, Source
from tests.training.small import PADDED, settings


def dark_and_bright() -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, 4, 4] of two classes, and their labels."""
    rng, count = np.random.default_rng(0), 24
    labels = np.arange(count) % 2
    images = rng.integers(0, 128, (count, 4, 4), dtype=np.uint8) + (labels * 127).astype(np.uint8)[:, None, None]
    return images, labels


def recipe_of(source: Source, **train: Any) -> Recipe:
    """Classify images of 4×4 grey pixels, augmented in training."""
    change = ImageAugment(shift=1, flip=True, rotate=10.0, erase=1, brightness=0.2)
    tokens = Tokens(media=Media(image=ImageSegment(image_height=4, patch=2, channels=1)))
    stack = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2)),), position=Rotary())
    return Recipe(
        task=Classify(),
        data=Data(train=source, valid=source, augment=Augment(image=change)),
        tokenizer=Bytes(),
        model=ModelConfig(width=8, source=tokens, encoder=stack, head=Classifier(labels=2, pool="first")),
        batches=PADDED,
        train=settings(**train),
    )


def pictured(folder: Path, **train: Any) -> Recipe:
    """Images in an array."""
    path = folder / "images.npz"
    if not path.exists():
        images, labels = dark_and_bright()
        np.savez(path, images=images, labels=labels)
    return recipe_of(ArrayFile(path=str(path)), **train)
