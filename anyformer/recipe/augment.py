"""Augmentation: random changes of images and sounds in training. Imports no torch.

The changes of a batch depend on the seed, the epoch and the number of the batch, so that a resumed training continues
with the same ones.
"""

from typing import Annotated

from pydantic import Field

from anyformer.config import Spec
from anyformer.config.spec import Count, Flag

Angle = Annotated[float, Field(strict=True, ge=0, le=180)]
Change = Annotated[float, Field(strict=True, ge=0, lt=1)]
Amount = Annotated[float, Field(strict=True, ge=0, le=100)]


class ImageAugment(Spec):
    """Random changes of each image."""

    shift: Count = 0  # most pixels by which an image moves in each direction; the border is black
    flip: Flag = False  # mirror half of the images, left to right
    rotate: Angle = 0.0  # most degrees by which an image turns
    scale: Change = 0.0  # largest change of the size, as a fraction
    shear: Change = 0.0  # largest horizontal shear, as a fraction of the height
    erase: Count = 0  # side of a square that becomes grey, in pixels, at a random place
    brightness: Change = 0.0  # largest change of the brightness, as a fraction
    contrast: Change = 0.0  # largest change of the contrast, as a fraction
    saturation: Change = 0.0  # largest change of the saturation, as a fraction; grey images have none


class AudioAugment(Spec):
    """Random changes of each sound's log-mel frames; masks as in SpecAugment (Park et al. 2019)."""

    time_masks: Count = 0  # masks over time
    time_width: Count = 20  # most frames of a mask
    mel_masks: Count = 0  # masks over mel bands
    mel_width: Count = 15  # most bands of a mask
    gain: Amount = 0.0  # largest change of the loudness, in dB
    noise: Amount = 0.0  # standard deviation of white noise that is added to the frames


class Augment(Spec):
    """Random changes by kind of segment."""

    image: ImageAugment | None = None  # changes of images; None: none
    audio: AudioAugment | None = None  # changes of sounds; None: none
