"""Embeddings of images, sounds and feature vectors, and their places among the tokens of a row."""

import math
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.media_batch import MediaBatch
from anyformer.config import (
    ConvStem,
    FeatureSegment,
    ImageSegment,
    LearnedGrid,
    Media,
    MediaKind,
    NoGrid,
    NoStem,
    Sinusoidal,
    SinusoidalGrid,
    Spectrogram,
)


def embedding(rows: int, width: int, pad: int | None = None) -> nn.Embedding:
    """Return an uninitialised embedding: to draw values on the meta device, torch would import its compiler."""
    return nn.Embedding(rows, width, padding_idx=pad, _weight=torch.empty(rows, width))


def cut_patches(images: Tensor, side: int) -> Tensor:
    """[n, c, h, w] to [n, patches, c·side·side], row by row."""
    return F.unfold(images, side, stride=side).transpose(1, 2)


class ImageEmbedding(nn.Module):
    """Images [n, c, h, w] to [n, patches, d]: stem or patches, a projection, positions of rows and columns."""

    def __init__(self, spec: ImageSegment, width: int):
        super().__init__()
        self.spec, self.width = spec, width
        self.stem, inputs = _build_stem(spec)
        self.project = nn.Linear(inputs, width)
        rows, columns = spec.grid
        learned = isinstance(spec.position, LearnedGrid)
        self.rows = embedding(rows, width) if learned else None
        self.columns = embedding(columns, width) if learned else None

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(self.project.weight.dtype)
        if self.stem is None:
            x = cut_patches(images, self.spec.patch)  # [n, patches, c·p·p]
        else:
            x = self.stem(images).flatten(2).transpose(1, 2)
        return self._placed(self.project(x))

    def _placed(self, x: Tensor) -> Tensor:
        rows, columns = self.spec.grid
        match self.spec.position:
            case NoGrid():
                return x
            case LearnedGrid():
                assert self.rows is not None
                assert self.columns is not None
                grid = self.rows.weight[:, None] + self.columns.weight[None]
            case SinusoidalGrid():
                half = self.width // 2
                row, column = (_waves(n, half, x.device) for n in (rows, columns))
                grid = torch.cat((row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)), dim=-1)
            case _:
                assert_never(self.spec.position)
        return x + grid.flatten(0, 1).to(x.dtype)


def _waves(n: int, width: int, device: torch.device) -> Tensor:
    """Return sines and cosines of 0, ..., n - 1, [n, width]."""
    return Sinusoidal().embed(torch.zeros(n, width, device=device), torch.arange(n, device=device), {})


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel of [n, c, h, w]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def _build_stem(spec: ImageSegment) -> tuple[nn.Sequential | None, int]:
    """Return the layers before the projection, and the number of inputs of that."""
    match spec.stem:
        case NoStem():
            return None, spec.channels * spec.patch**2
        case ConvStem(channels=channels):
            layers: list[nn.Module] = []
            inputs = int(spec.channels)
            for i in range(int(math.log2(spec.patch))):
                outputs = channels * 2**i
                layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), ChannelNorm(outputs), nn.GELU()]
                inputs = outputs
            return nn.Sequential(*layers), inputs
        case _:
            assert_never(spec.stem)


class SoundEmbedding(nn.Module):
    """Log-mel frames [n, frames, mels] to [n, places, d]: convolutions with GELU, each over 3 frames.

    Frames after the end of a sound are zero for every convolution, as they are for a sound alone.
    """

    def __init__(self, spec: Spectrogram, width: int):
        super().__init__()
        strides = (1, *[2] * spec.strided)
        inputs = (spec.mels, *[width] * spec.strided)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(n, width, 3, stride=stride, padding=1) for n, stride in zip(inputs, strides, strict=True)
        )
        self.strides = strides

    def forward(self, sounds: Tensor, frames: Tensor | None = None) -> Tensor:
        first = self.convolutions[0]
        assert isinstance(first, nn.Conv1d)
        x = sounds.to(first.weight.dtype).transpose(1, 2)
        for convolution, stride in zip(self.convolutions, self.strides, strict=True):
            x = F.gelu(convolution(_cut_off(x, frames)))
            frames = None if frames is None else -(-frames // stride)
        return x.transpose(1, 2)  # [n, d, places] -> [n, places, d]


def _cut_off(x: Tensor, frames: Tensor | None) -> Tensor:
    """Set frames after the end of each sound to zero; x is [n, channels, frames]."""
    if frames is None:
        return x
    is_sound = torch.arange(x.shape[-1], device=x.device) < frames[:, None]
    return x * is_sound[:, None].to(x.dtype)


class IntegerEmbedding(nn.Module):
    """Vectors of integers [n, size] to [n, d]: the sum of a learned vector for each value at each index.

    That is a linear layer over one-hot vectors of size · values elements, without these.
    """

    def __init__(self, size: int, values: int, width: int):
        super().__init__()
        self.values = values
        self.table = embedding(size * values, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.long() + self.values * torch.arange(x.shape[1], device=x.device)
        return self.table(rows).sum(dim=1)


class FeatureEmbedding(nn.Module):
    """Vectors [n, size] to [n · places, d]: equal parts by the same weights, and a learned vector for each part."""

    def __init__(self, spec: FeatureSegment, width: int):
        super().__init__()
        size, self.places = spec.size // spec.places, spec.places
        self.embed = nn.Linear(size, width) if spec.values is None else IntegerEmbedding(size, spec.values, width)
        many = spec.places > 1
        self.parts = embedding(spec.places, width) if many else None

    def forward(self, features: Tensor) -> Tensor:
        x = features.reshape(len(features) * self.places, -1)  # [n · places, size / places]
        x = self.embed(x.to(self.embed.weight.dtype) if isinstance(self.embed, nn.Linear) else x)
        return x if self.parts is None else x + self.parts.weight.repeat(len(features), 1)


class MediaEmbedding(nn.Module):
    """Puts the vectors of segments at their places among the embeddings of tokens."""

    def __init__(self, spec: Media, width: int):
        super().__init__()
        self.spec = spec
        self.image = ImageEmbedding(spec.image, width) if spec.image else None
        self.audio = SoundEmbedding(spec.audio, width) if spec.audio else None
        self.features = FeatureEmbedding(spec.features, width) if spec.features else None
        count = 1 + len(spec.kinds)
        self.types = embedding(count, width) if spec.types else None

    def forward(self, x: Tensor, media: MediaBatch | None) -> Tensor:
        """[b, t, d] embeddings of tokens to those of the whole stream."""
        if self.types is not None:
            x = x + self.types.weight[0]
        if media is None:
            return x
        for i, kind in enumerate(self.spec.kinds, 1):
            at, vectors = media.at(kind), self._vectors(kind, media)
            if at is None or vectors is None:
                continue
            vectors = vectors if self.types is None else vectors + self.types.weight[i]
            x = torch.where((at >= 0)[:, :, None], vectors[at.clamp(min=0)].to(x.dtype), x)
        return x

    def _vectors(self, kind: MediaKind, media: MediaBatch) -> Tensor | None:
        """Return the vectors of all segments of a kind, [n, d]."""
        match kind:
            case "image" if self.image is not None and media.images is not None:
                return self.image(media.images).flatten(0, 1)
            case "audio" if self.audio is not None and media.sounds is not None:
                return self.audio(media.sounds, media.frames).flatten(0, 1)
            case "features" if self.features is not None and media.features is not None:
                return self.features(media.features)
            case _:
                return None

    def check(self, media: MediaBatch | None, shape: tuple[int, ...]) -> None:
        """Refuse segments that the model cannot read, or that have other shapes than its config."""
        if media is None:
            return
        image, audio, features = self.spec.image, self.spec.audio, self.spec.features
        expected: dict[str, tuple[Tensor | None, tuple[int | None, ...] | None]] = {
            "images": (media.images, None if image is None else (image.channels, *image.size)),
            "sounds": (media.sounds, None if audio is None else (None, audio.mels)),
            "features": (media.features, None if features is None else (features.size,)),
        }
        for name, (x, sizes) in expected.items():
            if x is None:
                continue
            if sizes is None:
                raise ValueError(f"this model reads no {name}: its config has no such `media`")
            fits = x.dim() == len(sizes) + 1 and all(w in (None, n) for n, w in zip(x.shape[1:], sizes, strict=True))
            if not fits or not x.is_floating_point():
                wanted = ["n", *("frames" if size is None else size for size in sizes)]
                raise ValueError(
                    f"{name} must be floating-point [{', '.join(map(str, wanted))}], got {x.dtype} {list(x.shape)}"
                )
        for kind in self.spec.kinds:
            at = media.at(kind)
            if at is not None and at.shape != shape:
                raise ValueError(f"{kind}_at has shape {list(at.shape)}, expected {list(shape)} like the ids")

    def coordinates(self, media: MediaBatch | None, positions: Tensor) -> Tensor | None:
        """Return time, row and column of every place, int [b, t, 3]; None where there is no image.

        A token has its position three times. A patch has the position of the first patch of its image; its row and
        column are added to the other two.
        """
        if media is None or media.image_at is None or self.spec.image is None:
            return None
        columns, patches = self.spec.image.grid[1], self.spec.image.places
        is_patch = media.image_at >= 0
        patch = torch.where(is_patch, media.image_at % patches, 0)
        first = positions - patch
        row, column = patch // columns, patch % columns
        return torch.stack((first, first + row, first + column), dim=-1)
