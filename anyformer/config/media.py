"""Segments of other modalities between the tokens of a text: images, sounds, feature vectors. Imports no torch.

A stream is a row of tokens in which some places are taken by vectors made from an image, a sound or numbers. The text
has a reference where the segment is, such as `<image:cat.png>` (see `data/media.py`); the model embeds each kind in its
own way, and from there on all places are alike. Values in bins, such as actions, are tokens of the vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from anyformer.config.cost import Cost, linear
from anyformer.config.spec import BY_KIND, Fault, Flag, Number, Positive, Size, Spec

MediaKind = Literal["image", "audio", "features"]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "audio", "features")


class NoStem(Spec):
    """Each patch is projected alone, as in ViT."""

    kind: Literal["none"] = "none"


class ConvStem(Spec):
    """3×3 convolutions of stride 2, each with a norm over channels and GELU, until a patch is one pixel, and a linear
    layer to d (Xiao et al. 2021, "Early convolutions help transformers see better")."""

    kind: Literal["convolution"] = "convolution"
    channels: Size = 64  # channels after the first convolution; each further one doubles them


Stem = Annotated[NoStem | ConvStem, *BY_KIND]


class NoGrid(Spec):
    """No positions but those of the stack."""

    kind: Literal["none"] = "none"


class LearnedGrid(Spec):
    """A learned vector for each row of patches and one for each column, added to the patches."""

    kind: Literal["learned"] = "learned"


class SinusoidalGrid(Spec):
    """Fixed waves of the row in the first half of d and of the column in the second, added to the patches."""

    kind: Literal["sinusoidal"] = "sinusoidal"


GridPosition = Annotated[NoGrid | LearnedGrid | SinusoidalGrid, *BY_KIND]


class ImageSegment(Spec):
    """Images [c, height, width] in squares, read row by row."""

    image_height: Size = 224  # height of an image, in pixels; files of another size are an error
    image_width: Size | None = None  # width of an image, in pixels; None: its height
    patch: Size = 16  # side of a square patch, in pixels
    channels: Literal[1, 3] = 3  # 1: grey, 3: red, green and blue
    stem: Stem = NoStem()  # layers before the patches
    position: GridPosition = NoGrid()  # positions of rows and columns
    both_ways: Flag = True  # in a decoder, patches of one image attend to each other in both directions

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image, in pixels."""
        return self.image_height, self.image_width or self.image_height

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.size
        return height // self.patch, width // self.patch

    @property
    def places(self) -> int:
        """Places that an image takes in a row."""
        rows, columns = self.grid
        return rows * columns

    def cost(self, width: int, images: int) -> Cost:
        rows, columns = self.grid
        cost = Cost((rows + columns) * width) if isinstance(self.position, LearnedGrid) else Cost()
        if isinstance(self.stem, NoStem):
            return cost + linear(self.channels * self.patch**2, width, images * self.places, True)
        inputs, (height, across) = int(self.channels), self.size
        for i in range(int(math.log2(self.patch))):
            outputs, height, across = self.stem.channels * 2**i, height // 2, across // 2
            pixels = images * height * across
            one = linear(9 * inputs, outputs, pixels, True)
            cost += replace(one, parameters=one.parameters + 2 * outputs, saved=pixels * (4 * inputs + 2 * outputs))
            inputs = outputs
        return cost + linear(inputs, width, images * self.places, True)

    def faults(self, width: int) -> Iterator[Fault]:
        for name, n in (("image_height", self.image_height), ("image_width", self.image_width)):
            if n and n % self.patch:
                yield Fault(name, f"= {n}: must be a multiple of patch = {self.patch}")
        if isinstance(self.stem, ConvStem) and (self.patch < 2 or self.patch & (self.patch - 1)):
            yield Fault("stem", f"convolutions halve an image: patch = {self.patch} must be 2, 4, 8, ...")
        if isinstance(self.position, SinusoidalGrid) and width % 4:
            yield Fault("position", f"sines and cosines of two axes need a width that is a multiple of 4, not {width}")


class Spectrogram(Spec):
    """Sounds as log-mel frames, and convolutions over these (Whisper): the first keeps their number, each of the others
    halves it."""

    rate: Size = 16_000  # samples per second; files of another rate are an error
    window: Size = 400  # samples of a frame
    hop: Size = 160  # samples from one frame to the next
    mels: Size = 80  # numbers of a frame
    strided: Literal[1, 2, 3] = 1  # convolutions of stride 2, after one of stride 1

    @property
    def stride(self) -> int:
        """Frames per place in a row."""
        return 2**self.strided

    def places(self, frames: int) -> int:
        """Return how many places of a row a sound takes, from its number of frames."""
        return -(-frames // self.stride)

    def convolution_cost(self, width: int, places: int) -> Cost:
        cost = linear(3 * self.mels, width, places * self.stride, True)
        for i in range(self.strided):
            cost += linear(3 * width, width, places * 2 ** (self.strided - 1 - i), True)
        return cost


class AudioSegment(Spectrogram):
    """Sounds between the tokens of a text."""

    both_ways: Flag = True  # in a decoder, frames of one sound attend to each other in both directions


class FeatureSegment(Spec):
    """Vectors of numbers: states of a trajectory, time series."""

    size: Size  # numbers of a vector
    values: Size | None = None  # the numbers are integers below this, each with its own vector; None: any numbers
    places: Size = 1  # places of a row that a vector takes, each with an equal part of its numbers; they see each other

    @property
    def both_ways(self) -> bool:
        """True if places of one vector attend to each other in both directions."""
        return self.places > 1

    def cost(self, width: int) -> Cost:
        size = self.size // self.places
        cost = linear(size, width, 0, True) if self.values is None else Cost(size * self.values * width)
        return cost + Cost(self.places * width if self.places > 1 else 0)

    def faults(self) -> Iterator[Fault]:
        if self.size % self.places:
            yield Fault("size", f"= {self.size}: must be a multiple of places = {self.places}")


class Media(Spec):
    """Kinds of segments that a stream may have besides tokens."""

    image: ImageSegment | None = None  # images; None: none
    audio: AudioSegment | None = None  # sounds; None: none
    features: FeatureSegment | None = None  # feature vectors; None: none
    types: Flag = True  # a learned vector for each kind, tokens included, added to its embeddings

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds that are there."""
        return tuple(kind for kind in MEDIA_KINDS if getattr(self, kind) is not None)

    def cost(self, width: int, b: int) -> Cost:
        """Return the cost of the segments: all weights, and the work for one image in each of b rows."""
        cost = Cost(width * (1 + len(self.kinds))) if self.types else Cost()
        if self.image is not None:
            cost += self.image.cost(width, b)
        if self.audio is not None:
            cost += self.audio.convolution_cost(width, 0)
        return cost if self.features is None else cost + self.features.cost(width)

    def faults(self, width: int) -> Iterator[Fault]:
        if not self.kinds:
            yield Fault("", "has no kind: set `image`, `audio` or `features`, or leave `media` out")
        if self.image is not None:
            yield from (fault.under("image") for fault in self.image.faults(width))
        if self.features is not None:
            yield from (fault.under("features") for fault in self.features.faults())


class NoResize(Spec):
    """Files keep their size: one that differs from the model's is an error."""

    kind: Literal["none"] = "none"


class ExactSize(Spec):
    """Resized to a height and a width, whatever the shape of the picture (ViT)."""

    kind: Literal["exact"] = "exact"
    height: Size  # height after resizing, in pixels
    width: Size  # width after resizing, in pixels


class ShortSide(Spec):
    """Resized so that the shorter side has a length; the shape is kept (CLIP)."""

    kind: Literal["short_side"] = "short_side"
    length: Size  # of the shorter side, in pixels


Resize = Annotated[NoResize | ExactSize | ShortSide, *BY_KIND]
Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]  # filters of Pillow, by number
ByChannel = Annotated[tuple[Number, ...], Field(min_length=1)]


class Pictures(Spec):
    """From picture files to the values that a model reads: resize, crop, and (scale · byte - mean) / deviation."""

    resize: Resize = NoResize()  # how files of another size are resized
    resample: Resample = "bilinear"  # filter of Pillow
    crop: Flag = False  # after resizing, cut out the centre in the model's size
    scale: Positive = 1 / 255  # factor of the bytes 0 to 255
    mean: ByChannel = (0.5,)  # of each channel, or one for all
    deviation: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.5,)  # of each channel, or one for all

    def faults(self, channels: int) -> Iterator[Fault]:
        """Yield what does not fit images with this number of channels."""
        for name, values in (("mean", self.mean), ("deviation", self.deviation)):
            if len(values) not in (1, channels):
                yield Fault(name, f"has {len(values)} values, and an image has {channels} channels")
