"""Input layers that read feature vectors, image patches or sounds in place of tokens."""

import torch
from torch import Tensor, nn

from anyformer.attention.layout import Layout
from anyformer.config import Audio, Features, Patches
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.inputs import EmbedIds, InputModule, Inputs, check_not_empty
from anyformer.nn.media import SoundEmbedding, cut_patches, embedding
from anyformer.nn.norm import normed


class FeatureInput(InputModule):
    """Feature vectors [b, t, size]: projection, positions, norm, dropout."""

    def __init__(self, spec: Features | Patches, width: int):
        super().__init__(width)
        self.size = spec.size
        self.project = nn.Linear(spec.size, width, spec.bias)
        self.norm, self.dropout = spec.norm.build(width), nn.Dropout(spec.dropout)

    def measure(self, x: Tensor) -> tuple[int, int]:
        """[b, t]"""
        _check_numbers(x, "features", (None, None, self.size), f"[batch, length, {self.size}]")
        return x.shape[0], x.shape[1]

    def vectors(self, x: Tensor) -> Tensor:
        """[b, t, size] to [b, t, d], before positions."""
        return self.project(x.to(self.project.weight.dtype))

    def forward(
        self, inputs: Inputs, table: Tensor | None, embed: EmbedIds, layout: Layout, aux: AuxOutputs | None = None
    ) -> Tensor:
        return self.dropout(normed(self.norm, embed(self.vectors(inputs.ids)), layout, aux))


class PatchInput(FeatureInput):
    """Image patches, row by row, after a learned class token."""

    def __init__(self, spec: Patches, width: int):
        super().__init__(spec, width)
        self.patch, self.shape, self.length = spec.patch, spec.shape, spec.length
        self.class_token = embedding(1, width) if spec.class_token else None

    def measure(self, x: Tensor) -> tuple[int, int]:
        c, h, w = self.shape
        _check_numbers(x, "images", (None, *self.shape), f"[batch, {c}, {h}, {w}]")
        return x.shape[0], self.length

    def vectors(self, x: Tensor) -> Tensor:
        x = super().vectors(self.cut(x))
        if self.class_token is None:
            return x
        return torch.cat((self.class_token.weight.expand(x.shape[0], 1, -1), x), dim=1)

    def cut(self, images: Tensor) -> Tensor:
        """[b, c, h, w] to [b, patches, c·p·p]"""
        return cut_patches(images, self.patch)


class AudioInput(FeatureInput):
    """Log-mel frames [b, frames, mels]: convolutions, positions, norm, dropout."""

    def __init__(self, spec: Audio, width: int):
        InputModule.__init__(self, width)
        self.spec, self.size = spec, spec.mels
        self.sound = SoundEmbedding(spec, width)
        self.norm, self.dropout = spec.norm.build(width), nn.Dropout(spec.dropout)

    def measure(self, x: Tensor) -> tuple[int, int]:
        batch, frames = super().measure(x)
        return batch, self.spec.places(frames)

    def vectors(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.sound(x)
        return vectors


def _check_numbers(x: Tensor, name: str, sizes: tuple[int | None, ...], shape: str) -> None:
    fits = x.dim() == len(sizes) and all(want in (None, n) for n, want in zip(x.shape, sizes, strict=True))
    if not fits or not x.is_floating_point():
        raise ValueError(f"{name} must be floating-point {shape}, got {x.dtype} {list(x.shape)}")
    check_not_empty(x, name)
