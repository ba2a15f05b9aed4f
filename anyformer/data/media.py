"""References to images, sounds and feature vectors in texts, and what they stand for in a batch.

    <image:cat.png> what is this?        an image, then a question
    <audio:seven.wav+one.wav>            two sounds, joined to one
    <features:0.5 -1 2>                  a vector of three numbers
    <image:digits.npz#images/17>         an entry of an array

A store gives each reference a number n. In the ids of a text, all its places have the id -n - 1, so that examples,
plans, packing and padding treat it like tokens. `attach` turns a batch of such ids into the tensors that a model reads.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anyformer.config import (
    ConfigError,
    Fault,
    ImageSegment,
    Media,
    MediaKind,
    ModelConfig,
    Patches,
    Pictures,
    Tokens,
)
from anyformer.config.spec import visible
from anyformer.conventions import PLAIN
from anyformer.data.batch import Batch
from anyformer.data.media_files import (
    BadFile,
    fit_features,
    fit_image,
    is_media_file,
    read_features,
    read_image,
    read_sound,
)
from anyformer.data.spectrogram import log_mel
from anyformer.media_batch import MediaBatch

REFERENCE = re.compile(r"<(image|audio|features):([^<>\n]+)>")
WAYS: Mapping[str, MediaKind] = {".wav": "audio"}  # kind of a bare path by its suffix; all others are images

Part = str | tuple[MediaKind, str]  # of a text: plain text, or the kind and the name of a reference
Augment = Callable[[MediaKind, np.ndarray, np.random.Generator], np.ndarray]
"""Changes an image [c, h, w], uint8, or the frames of a sound [frames, mels], in training."""


class MediaStore:
    """Segments by number, decoded once and held in memory: pixels as bytes, sounds as log-mel frames."""

    def __init__(
        self,
        spec: Media,
        in_decoder: bool,
        augment: Augment | None = None,
        pictures: Pictures | None = None,
        alone: bool = False,
    ):
        self.spec, self.in_decoder, self.augment = spec, in_decoder, augment
        self.pictures = pictures or Pictures()
        self.alone = alone  # a text with an image is that image, in one place, and nothing else
        self._numbers: dict[tuple[MediaKind, str], int] = {}
        self._kinds: list[MediaKind] = []
        self._values: list[np.ndarray] = []

    @classmethod
    def of(
        cls, config: ModelConfig, augment: Augment | None = None, pictures: Pictures | None = None
    ) -> "MediaStore | None":
        """Return a store for the segments that a model reads; None for a model that reads tokens only."""
        read = config.source if config.encoder is not None else config.target
        if isinstance(read, Tokens) and read.media is not None:
            return cls(read.media, config.encoder is None, augment, pictures)
        patches = read if config.image_tower is None else config.image_tower.source
        if isinstance(patches, Patches) and patches.channels in (1, 3):
            return cls(Media(image=_segment(patches)), False, augment, pictures, alone=True)
        return None

    # -- texts to ids -------------------------------------------------------------------------------------------------

    def encode(self, texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]]) -> list[list[int]]:
        """Return the ids of texts; `encode` does so for the parts between references."""
        try:
            parts = [self._split(text) for text in texts]
            plain = iter(encode([part for row in parts for part in row if isinstance(part, str)]))
            return [
                [id for part in row for id in (next(plain) if isinstance(part, str) else self._ids(*part))]
                for row in parts
            ]
        except BadFile as error:
            raise ConfigError([Fault("", str(error))]) from None

    def _split(self, text: str) -> "list[Part]":
        """Return the texts and references of a text; raise `BadFile` for an image that must be alone and is not."""
        parts = _parts(text)
        if self.alone and len(parts) > 1:
            raise BadFile(f"{visible(text)}: this model reads a text or one image, not both in one")
        return parts

    def _ids(self, kind: MediaKind, name: str) -> list[int]:
        number = self.number(kind, name)
        return [-number - 1] * self.places(number)

    def number(self, kind: MediaKind, name: str) -> int:
        """Return the number of a segment, which is read the first time. Raise `BadFile` if it cannot be read."""
        key = kind, name
        if key not in self._numbers:
            self._numbers[key] = self._append(kind, self._read(kind, name))
        return self._numbers[key]

    def add(self, value: np.ndarray, name: str) -> int:
        """Return the number of a new segment: an image [h, w, channels] if the model reads images, or a vector.

        Raise `BadFile`, with its name, if it does not fit the model.
        """
        if self.spec.image is not None and value.ndim > 1:
            return self._append("image", fit_image(value, self.spec.image, name))
        if self.spec.features is not None:
            return self._append("features", fit_features(value.ravel(), self.spec.features, name))
        raise BadFile(f"{name}: {list(value.shape)} numbers, and this model reads {' and '.join(self.spec.kinds)}")

    def _append(self, kind: MediaKind, value: np.ndarray) -> int:
        self._kinds.append(kind)
        self._values.append(value)
        return len(self._values) - 1

    def _read(self, kind: MediaKind, name: str) -> np.ndarray:
        image, audio, features = self.spec.image, self.spec.audio, self.spec.features
        match kind:
            case "image" if image is not None:
                return read_image(name, image, self.pictures)
            case "audio" if audio is not None:
                return log_mel(read_sound(name, audio), audio)
            case "features" if features is not None:
                return read_features(name, features)
            case _:
                kinds = " and ".join(self.spec.kinds)
                raise BadFile(f"<{kind}:{name}>: this model reads {kinds} segments, not {kind}")

    def places(self, number: int) -> int:
        """Return how many places of a row a segment takes."""
        match self._kinds[number]:
            case "image":
                assert self.spec.image is not None
                return 1 if self.alone else self.spec.image.places
            case "audio":
                assert self.spec.audio is not None
                return self.spec.audio.places(len(self._values[number]))
            case "features":
                assert self.spec.features is not None
                return self.spec.features.places

    def fault(self, text: str) -> str:
        """Return why a reference of a text cannot be read; empty if all can."""
        try:
            for kind, name in (part for part in self._split(text) if not isinstance(part, str)):
                self.number(kind, name)
        except BadFile as error:
            return str(error)
        return ""

    # -- ids to tensors -----------------------------------------------------------------------------------------------

    def attach(self, batch: Batch, seed: Sequence[int] | None = None) -> Batch:
        """Return a batch with its segments as tensors; with a seed they are augmented, depending on it alone."""
        ids = batch.ids if batch.source is None else batch.source
        changed, media, marks = self.read(ids, batch.marks, seed)
        if media is None:
            return batch
        batch = batch._replace(ids=changed) if batch.source is None else batch._replace(source=changed)
        return batch._replace(media=media, marks=marks)

    def read(
        self, ids: Tensor, marks: Tensor | None = None, seed: Sequence[int] | None = None
    ) -> tuple[Tensor, MediaBatch | None, Tensor | None]:
        """Return ids [b, t] without references, the segments that these stand for, and marks of groups."""
        raw = ids.cpu().numpy()
        if raw.min(initial=0) >= 0:
            return ids, None, marks
        rng = None if seed is None else np.random.Generator(np.random.PCG64([*seed, 3]))
        found = self._runs(raw)
        fields: dict[str, Tensor] = {}
        for kind in self.spec.kinds:
            runs = [run for run in found if self._kinds[run.number] == kind]
            if runs:
                fields |= self._tensors(kind, runs, raw.shape, rng)
        media = MediaBatch(**{name: x.to(ids.device) for name, x in fields.items()})
        if self.in_decoder:
            marks = self._marks(found, raw.shape, marks)
        return ids.clamp(min=0), media, marks

    def _runs(self, ids: np.ndarray) -> "list[_Run]":
        """Return the segments of all rows, in order."""
        out = list[_Run]()
        for row, line in enumerate(ids):
            edges = np.flatnonzero(np.diff(line, prepend=0, append=0))
            for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                if line[start] < 0:
                    number = int(-line[start] - 1)
                    size = self.places(number)  # the same segment may stand twice in succession
                    out += [_Run(number, row, at, at + size) for at in range(start, stop, size)]
        return out

    def _tensors(
        self, kind: MediaKind, runs: "list[_Run]", shape: tuple[int, ...], rng: np.random.Generator | None
    ) -> dict[str, Tensor]:
        values = [self._values[run.number] for run in runs]
        if rng is not None and self.augment is not None:
            values = [self.augment(kind, value, rng) for value in values]
        at = np.full(shape, -1, dtype=np.int64)
        match kind:
            case "image":
                made, step = {"images": self._values_of(np.stack(values))}, self.places(runs[0].number)
            case "audio":
                assert self.spec.audio is not None
                longest = max(map(len, values))
                step = self.spec.audio.places(longest)
                frames = np.zeros((len(values), step * self.spec.audio.stride, self.spec.audio.mels), dtype=np.float32)
                for i, value in enumerate(values):
                    frames[i, : len(value)] = value
                sizes = torch.tensor([len(value) for value in values])
                made = {"sounds": torch.from_numpy(frames), "frames": sizes}
            case "features":
                assert self.spec.features is not None
                made = {"features": torch.from_numpy(np.stack(values).astype(np.float32))}
                step = self.spec.features.places
        for i, run in enumerate(runs):
            at[run.row, run.start : run.stop] = i * step + np.arange(run.stop - run.start)
        return made | {f"{kind}_at": torch.from_numpy(at)}

    def _values_of(self, pixels: np.ndarray) -> Tensor:
        """Return the values that a model reads, [n, c, h, w], from bytes of the same shape."""
        mean, deviation = (
            np.array(x, dtype=np.float32)[:, None, None] for x in (self.pictures.mean, self.pictures.deviation)
        )
        scaled = pixels.astype(np.float32) * np.float32(self.pictures.scale)
        return torch.from_numpy((scaled - mean) / deviation)

    def images(self, texts: Sequence[str]) -> Tensor:
        """Return the images that texts name, [n, c, h, w]: each is one path or reference."""
        found, faults = list[np.ndarray](), list[Fault]()
        for i, text in enumerate(texts, 1):
            parts = _parts(text)
            try:
                if len(parts) != 1 or isinstance(parts[0], str):
                    raise BadFile(f"{visible(text)} is not the path of a picture: the model reads one image")
                found.append(self._values[self.number(*parts[0])])
            except BadFile as error:
                faults.append(Fault(f"text {i}", str(error)))
        if faults:
            raise ConfigError(faults)
        return self._values_of(np.stack(found))

    def _marks(self, runs: "list[_Run]", shape: tuple[int, ...], marks: Tensor | None) -> Tensor | None:
        """Return marks that group the places of each segment whose places see each other."""
        grouped = [kind for kind in self.spec.kinds if getattr(getattr(self.spec, kind), "both_ways", False)]
        chosen = [(i, run) for i, run in enumerate(runs) if self._kinds[run.number] in grouped]
        if not chosen:
            return marks
        new = np.zeros(shape, dtype=np.int64) if marks is None else marks.cpu().numpy().copy()
        for i, run in chosen:
            part = new[run.row, run.start : run.stop]
            part[part == PLAIN] = -i - 1
        return torch.from_numpy(new) if marks is None else torch.from_numpy(new).to(marks.device)


class _Run:
    """A segment in a batch: its number, its row, and its places."""

    def __init__(self, number: int, row: int, start: int, stop: int):
        self.number, self.row, self.start, self.stop = number, row, start, stop


def _segment(read: Patches) -> ImageSegment:
    """Return the images that patches are cut from."""
    channels, height, width = read.shape
    return ImageSegment(
        image_height=height, image_width=width, patch=read.patch, channels=1 if channels == 1 else 3, both_ways=False
    )


def _parts(text: str) -> list[Part]:
    """Return the texts and references of a text, in order; a bare path of a media file is a reference."""
    if is_media_file(text.strip()) and Path(text.strip().partition("#")[0]).exists():
        name = text.strip()
        return [(WAYS.get(Path(name).suffix.lower(), "image"), name)]
    parts, at = list[Part](), 0
    for found in REFERENCE.finditer(text):
        parts += [text[at : found.start()].strip()] if text[at : found.start()].strip() else []
        kind: MediaKind = found[1]  # type: ignore[assignment]
        parts.append((kind, found[2]))
        at = found.end()
    rest = text[at:]
    return [*parts, rest.strip() if parts else rest] if rest.strip() or not parts else parts


def without_references(text: str) -> str:
    """Return a text without references, for the training of a tokenizer."""
    return " ".join(part for part in _parts(text) if isinstance(part, str))
