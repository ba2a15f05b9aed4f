"""Input layers: from token ids, features or images to vectors [b, t, d].

Every input is an `InputModule`: `measure` returns the batch size and length of an input or raises a clear error,
`check` validates its values, and `forward`, in which the function `embed` adds positions, returns vectors.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.layout import Layout, check
from anyformer.attention.media_batch import MediaBatch
from anyformer.config import (
    Audio,
    ByteSpelling,
    ConfigError,
    FactorisedTable,
    Fault,
    Features,
    Patches,
    Tokens,
    factor,
)
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.dropout import Dropout
from anyformer.nn.media import MediaEmbedding, SoundEmbedding, cut_patches, embedding
from anyformer.nn.norm import normed

Embed = Callable[[Tensor], Tensor]
BYTES = 257  # values of a spelled byte: 0 is padding, byte b is b + 1


class Inputs(NamedTuple):
    """Everything that the encoder or the decoder reads."""

    ids: Tensor  # int [b, t]; or features [b, t, size], or images [b, c, h, w], where the config reads them
    layout: Layout | None = None  # None: one segment per row, from position 0 or where a cache or past ends
    types: Tensor | None = None  # int [b, t]: token types
    spelled: Tensor | None = None  # int [b, t, longest]: the bytes of each token's word, as byte + 1; 0 is padding
    media: MediaBatch | None = None  # images, sounds and feature vectors, and their places; ids are not read there


class ByteWords(nn.Module):
    """Vector of each token's word from its bytes; byte b is stored as b + 1, and an all-padding word embeds to zero."""

    def __init__(self, spec: ByteSpelling, width: int):
        super().__init__()
        self.longest, self.margins = spec.longest, ((spec.kernel - 1) // 2, spec.kernel // 2)
        self.table = embedding(BYTES, spec.width)
        self.conv = nn.Conv1d(spec.width, spec.channels, spec.kernel)
        self.linear = nn.Linear(spec.channels, width, bias=False)

    def forward(self, spelled: Tensor) -> Tensor:
        """[b, t, longest] to [b, t, width]"""
        is_byte = spelled > 0
        x = self.table(F.pad(spelled, self.margins)).flatten(0, 1).transpose(1, 2)  # padding beyond both ends
        x = self.conv(x).unflatten(0, spelled.shape[:2])  # [b, t, channels, longest]
        x = x.masked_fill(~is_byte[:, :, None], torch.finfo(x.dtype).min).amax(dim=-1)
        return self.linear(torch.where(is_byte.any(dim=-1, keepdim=True), x, 0))


class InputModule(nn.Module):
    """Base of inputs. This one reads token ids below `vocab`; `vectors` are those of the ids, before positions."""

    table: nn.Embedding | None  # which the head, or the other side's input, may share
    media: MediaEmbedding | None  # what it reads besides tokens
    norm: nn.Module
    dropout: nn.Module

    def __init__(self, inner_width: int, vocab: int = 0):
        super().__init__()
        self.inner_width, self.vocab = inner_width, vocab
        self.table = self.media = None

    def measure(self, ids: Tensor) -> tuple[int, int]:
        """[b, t]"""
        if not isinstance(ids, Tensor):
            raise ValueError(f"ids must be a tensor [batch, length], got {type(ids).__name__}")
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids must be integers [batch, length], got {ids.dtype} {list(ids.shape)}")
        _check_not_empty(ids, "ids")
        return ids.shape[0], ids.shape[1]

    def check(self, inputs: Inputs) -> None:
        """Check that ids are in range, and refuse what only some inputs read."""
        if inputs.types is not None:
            raise ValueError("this model has no token types: leave `types` out")
        if inputs.spelled is not None:
            raise ValueError("this model reads no words: leave `spelled` out")
        if inputs.media is not None:
            raise ValueError("`media` are for models that read tokens: leave it out")
        if self.vocab:
            _check_range(inputs.ids, self.vocab, "id", f"vocabulary of {self.vocab}")

    def vectors(self, x: Tensor) -> Tensor:
        """Return the vectors [b, t, d] of what the model reads, before positions."""
        raise NotImplementedError

    def forward(
        self, inputs: Inputs, table: Tensor | None, embed: Embed, layout: Layout, aux: AuxOutputs | None = None
    ) -> Tensor:
        """Return the vectors [b, t, d] that the first block reads; `table` is the one that two inputs may share."""
        return embed(self.vectors(inputs.ids))

    def last_linear(self) -> nn.Linear | None:
        """Return the linear layer after positions and norm, if there is one."""
        return None


class TokenInput(InputModule):
    """Token embedding: lookup, scale, spelling, other modalities, positions, types, norm, dropout.

    The table may belong to another module (weight tying), so it is an argument of `forward`.
    """

    def __init__(self, spec: Tokens, width: int, own_table: bool):
        super().__init__(spec.inner_width(width), spec.rows)
        e, self.pad = spec.table_width(width), spec.pad
        self.table = embedding(spec.rows, e, spec.pad) if own_table else None
        self.types = embedding(spec.types, self.inner_width) if spec.types else None
        table = spec.table if isinstance(spec.table, FactorisedTable) else None
        self.project = nn.Linear(e, width, table.bias) if table else None
        self.early = table is not None and table.project == "before_position"
        self.spelling = spec.spelling.build(self.inner_width)
        self.media = None if spec.media is None else MediaEmbedding(spec.media, self.inner_width)
        self.norm = spec.norm.build(self.inner_width)
        self.dropout = Dropout(spec.dropout)
        self.scale = factor(spec.scale, width)

    def check(self, inputs: Inputs) -> None:
        """Check that ids, types and bytes are in range, and that the model has all these inputs."""
        ids, types, spelled = inputs.ids, inputs.types, inputs.spelled
        if types is not None and self.types is None:
            raise ValueError("this model has no token types: leave `types` out")
        _check_range(ids, self.vocab, "id", f"vocabulary of {self.vocab}")
        if types is not None and self.types is not None:
            check(*ids.shape, types=types)
            _check_range(types, self.types.num_embeddings, "type", f"{self.types.num_embeddings} token types")
        if self.spelling is not None or spelled is not None:
            self._check_spelled(ids, spelled)
        if self.media is None and inputs.media is not None:
            raise ValueError("this model reads tokens only: leave `media` out")
        if spelled is not None:
            _check_range(spelled, BYTES, "spelled", f"{BYTES} values of a byte")

    def _check_spelled(self, ids: Tensor, spelled: Tensor | None) -> None:
        """Check that `spelled` is there if the model needs it, and only then."""
        if self.spelling is None:
            if spelled is not None:
                raise ValueError("this model reads no spelled words: leave `spelled` out")
            return
        shape = [*ids.shape, self.spelling.longest]
        if spelled is None:
            what = f"is required: the model also reads the bytes of each token's word, integers {shape}"
            raise ConfigError([Fault("spelled", what)])
        if list(spelled.shape) != shape or spelled.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"spelled must be integers {shape}, got {spelled.dtype} {list(spelled.shape)}")

    def forward(
        self, inputs: Inputs, table: Tensor | None, embed: Embed, layout: Layout, aux: AuxOutputs | None = None
    ) -> Tensor:
        """[b, t] ids to [b, t, d]"""
        assert table is not None
        x = self.look_up(inputs.ids, table) * self.scale
        if self.project is not None and self.early:
            x = self.project(x)
        if self.spelling is not None:
            assert inputs.spelled is not None
            x = x + self.spelling(inputs.spelled)
        if self.media is not None:
            x = self.media(x, inputs.media)
        x = embed(x)
        if self.types is not None:
            # all of the first type: the gradient is then a sum, where a lookup would scatter row by row
            x = x + (self.types.weight[0] if inputs.types is None else self.types(inputs.types))
        x = self.dropout(normed(self.norm, x, layout, aux))
        return x if self.project is None or self.early else self.project(x)

    def last_linear(self) -> nn.Linear | None:
        return None if self.early else self.project

    def look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        """Return the rows of the table, [b, t, e]."""
        return F.embedding(ids, table, padding_idx=self.pad)


class FeatureInput(InputModule):
    """Feature vectors [b, t, size]: projection, positions, norm, dropout."""

    def __init__(self, spec: Features | Patches, width: int):
        super().__init__(width)
        self.size = spec.size
        self.project = nn.Linear(spec.size, width, spec.bias)
        self.norm, self.dropout = spec.norm.build(width), Dropout(spec.dropout)

    def measure(self, x: Tensor) -> tuple[int, int]:
        """[b, t]"""
        _check_numbers(x, "features", (None, None, self.size), f"[batch, length, {self.size}]")
        return x.shape[0], x.shape[1]

    def vectors(self, x: Tensor) -> Tensor:
        """[b, t, size] to [b, t, d], before positions."""
        return self.project(x.to(self.project.weight.dtype))

    def forward(
        self, inputs: Inputs, table: Tensor | None, embed: Embed, layout: Layout, aux: AuxOutputs | None = None
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
        self.norm, self.dropout = spec.norm.build(width), Dropout(spec.dropout)

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
    _check_not_empty(x, name)


def _check_not_empty(x: Tensor, name: str) -> None:
    if not x.numel():
        raise ValueError(f"{name} are empty, {list(x.shape)}: pass at least one row of at least one token")


def _check_range(ids: Tensor, size: int, name: str, whole: str) -> None:
    # on the CPU only: reading ids on a GPU would synchronise
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            raise ValueError(f"{name} {low if low < 0 else high} is outside the {whole}")
