"""Inputs: what a stack reads, and what it costs to embed it. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from anyformer.config.attention import SqrtWidth, Times, Unscaled, factor
from anyformer.config.cost import Cost, linear
from anyformer.config.families import IdInput as IdInput, Input as Input, Side
from anyformer.config.media import ImageSegment, Media, Spectrogram
from anyformer.config.norm import Norm
from anyformer.config.spec import BY_KIND, Count, Fault, Flag, Probability, Size, Spec

if TYPE_CHECKING:
    from torch import nn

InputScale = Annotated[Unscaled | Times | SqrtWidth, *BY_KIND]


class FullTable(Spec):
    """One vector of width d per token."""

    kind: Literal["full"] = "full"


class FactorisedTable(Spec):
    """Narrower vectors, and a linear layer to d: after the norm (ALBERT) or before positions are added (OPT)."""

    kind: Literal["factorised"] = "factorised"
    width: Size  # width of the table's vectors
    project: Literal["before_position", "after_norm"] = "after_norm"  # where the linear layer to d is
    bias: Flag = True  # a bias of that linear layer


Table = Annotated[FullTable | FactorisedTable, *BY_KIND]


class NoSpelling(Spec):
    """Tokens are read by their ids alone."""

    kind: Literal["none"] = "none"

    def build(self, width: int) -> None:
        return None

    def cost(self, width: int, rows: int) -> Cost:
        return Cost()


class ByteSpelling(Spec):
    """Each token is also read as the UTF-8 bytes of its word: embeddings, a convolution, the largest of each channel,
    and a linear layer (dos Santos & Zadrozny 2014). Of a longer word, its first bytes and its last are read."""

    kind: Literal["bytes"] = "bytes"
    width: Size = 32  # width of a byte's vector
    channels: Size = 128  # channels of the convolution
    kernel: Size = 3  # kernel width of the convolution, in bytes
    longest: Size = 16  # number of bytes that are read of a word

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.inputs import ByteWords

        return ByteWords(self, width)

    def cost(self, width: int, rows: int) -> Cost:
        w, c, k, n = self.width, self.channels, self.kernel, self.longest
        extra = Cost(saved=rows * (n * c + (k - 1) * w))  # channels of each byte, and the padding of the word
        convolution = replace(linear(k * w, c, rows * n, True), saved=rows * n * w)
        return Cost(257 * w) + convolution + extra + linear(c, width, rows, False)


Spelling = Annotated[NoSpelling | ByteSpelling, *BY_KIND]


class Tokens(IdInput):
    """A learned lookup: table, scale, spelling, segments of other modalities, positions, types, norm, dropout, in this
    order."""

    kind: Literal["tokens"] = "tokens"
    table: Table = FullTable()  # the embedding table
    types: Count = 0  # number of token types (BERT's sentence A and B); 0: none
    spelling: Spelling = NoSpelling()  # reads also the bytes of each word; for the task tag
    scale: InputScale = Unscaled()  # factor of the vectors from the table
    norm: Norm = Norm.none()  # norm of the embeddings
    dropout: Probability = 0.0  # on the embeddings
    pad: Count | None = None  # id of padding: its row of the table is zero and stays zero
    media: Media | None = None  # images, sounds and feature vectors between the tokens; None: tokens only

    def build(self, width: int, own_table: bool = True) -> "nn.Module":
        from anyformer.nn.inputs import TokenInput

        return TokenInput(self, width, own_table)

    def cost(self, width: int, b: int, t: int, own_table: bool = True) -> Cost:
        inner, rows, e = self.inner_width(width), b * t, self.table_width(width)
        cost = Cost(self.rows * e * own_table + self.types * inner) + self.norm.cost(inner, rows)
        cost += self.spelling.cost(inner, rows)
        if isinstance(self.table, FactorisedTable):
            cost += linear(e, width, rows, self.table.bias)
        return cost if self.media is None else cost + self.media.cost(inner, b)

    def table_width(self, width: int) -> int:
        return self.table.width if isinstance(self.table, FactorisedTable) else width

    def inner_width(self, width: int) -> int:
        late = isinstance(self.table, FactorisedTable) and self.table.project == "after_norm"
        return self.table_width(width) if late else width

    def faults(self, width: int, side: Side, pair: bool) -> Iterator[Fault]:
        if self.media is not None:
            yield from (fault.under("media") for fault in self.media.faults(self.inner_width(width)))
        if self.spelling.kind != "none" and pair:
            yield Fault("spelling", f"= '{self.spelling.kind}': is for models of one stack; leave it out")
        if self.vocab and self.pad is not None and self.pad >= self.vocab:
            yield Fault("pad", f"= {self.pad}: must be an id below vocab = {self.vocab}")

    @property
    def shared_table(self) -> object:
        return self.vocab, self.table, self.pad

    @property
    def padding(self) -> int | None:
        return self.pad

    @property
    def token_types(self) -> int:
        return self.types

    @property
    def spelled_bytes(self) -> int | None:
        return self.spelling.longest if isinstance(self.spelling, ByteSpelling) else None

    @property
    def stream(self) -> Media | None:
        return self.media

    def for_width(self, base: int) -> Self | None:
        if not isinstance(self.table, FullTable) or self.media is not None:
            return None
        fixed = Times(value=factor(self.scale, base)) if isinstance(self.scale, SqrtWidth) else self.scale
        return self.model_copy(update={"scale": fixed})

    def share(self, n: int) -> Self:
        return super().share(n).model_copy(update={"pad": None if self.pad is None else 0})


class Patches(Input):
    """Images [b, channels, height, width] in squares, each projected to d: a strided convolution (ViT).

    Projection, class token, positions, norm, dropout, in this order. Squares are read row by row.
    """

    kind: Literal["patches"] = "patches"
    image_height: Size = 224  # height of an image, in pixels
    image_width: Size | None = None  # width of an image, in pixels; None: its height
    patch: Size = 16  # side of a square patch, in pixels
    channels: Size = 3  # channels of an image
    class_token: Flag = True  # a learned vector, read first
    bias: Flag = True  # a bias of the projection
    norm: Norm = Norm.none()  # norm of the embeddings
    dropout: Probability = 0.0  # on the embeddings

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.channels, self.image_height, self.image_width or self.image_height

    @property
    def size(self) -> int:
        """Numbers in a patch."""
        return self.channels * self.patch**2

    @property
    def length(self) -> int:
        """Patches in an image, and the class token."""
        _, height, width = self.shape
        return (height // self.patch) * (width // self.patch) + self.class_token

    @property
    def picture(self) -> ImageSegment | None:
        channels, height, width = self.shape
        if channels not in (1, 3):
            return None
        kind: Literal[1, 3] = 1 if channels == 1 else 3
        return ImageSegment(image_height=height, image_width=width, patch=self.patch, channels=kind, both_ways=False)

    def build(self, width: int, own_table: bool = True) -> "nn.Module":
        from anyformer.nn.feature_inputs import PatchInput

        return PatchInput(self, width)

    def reads(self, b: int, t: int) -> tuple[int, ...]:
        return b, *self.shape

    def cost(self, width: int, b: int, t: int, own_table: bool = True) -> Cost:
        patches = linear(self.size, width, b * (t - self.class_token), self.bias)
        return patches + Cost(width * self.class_token) + self.norm.cost(width, b * t)

    def faults(self, width: int, side: Side, pair: bool) -> Iterator[Fault]:
        if side == "decoder":
            yield Fault("", "patches are read at once: only an encoder reads them")
        for name, n in (("image_height", self.image_height), ("image_width", self.image_width)):
            if side == "encoder" and n and n % self.patch:
                yield Fault(name, f"= {n}: must be a multiple of patch = {self.patch}")


class Features(Input):
    """Frames [b, t, size] of numbers, each projected to d: speech, trajectories, time series.

    Projection, positions, norm, dropout, in this order.
    """

    kind: Literal["features"] = "features"
    size: Size  # elements of a frame
    bias: Flag = True  # a bias of the projection
    norm: Norm = Norm.none()  # norm of the embeddings
    dropout: Probability = 0.0  # on the embeddings

    def build(self, width: int, own_table: bool = True) -> "nn.Module":
        from anyformer.nn.feature_inputs import FeatureInput

        return FeatureInput(self, width)

    def reads(self, b: int, t: int) -> tuple[int, ...]:
        return b, t, self.size

    def cost(self, width: int, b: int, t: int, own_table: bool = True) -> Cost:
        return linear(self.size, width, b * t, self.bias) + self.norm.cost(width, b * t)


class Audio(Input, Spectrogram):
    """Sounds [b, frames, mels] as log-mel frames, and convolutions over these (Whisper's encoder).

    Convolutions, positions, norm, dropout, in this order.
    """

    kind: Literal["audio"] = "audio"
    norm: Norm = Norm.none()  # norm of the embeddings
    dropout: Probability = 0.0  # on the embeddings

    def build(self, width: int, own_table: bool = True) -> "nn.Module":
        from anyformer.nn.feature_inputs import AudioInput

        return AudioInput(self, width)

    def reads(self, b: int, t: int) -> tuple[int, ...]:
        return b, t * self.stride, self.mels

    def cost(self, width: int, b: int, t: int, own_table: bool = True) -> Cost:
        return self.convolution_cost(width, b * t) + self.norm.cost(width, b * t)

    def faults(self, width: int, side: Side, pair: bool) -> Iterator[Fault]:
        if side == "decoder":
            yield Fault("", "sounds are read at once: only an encoder reads them")

    @property
    def sound(self) -> Spectrogram:
        return self
