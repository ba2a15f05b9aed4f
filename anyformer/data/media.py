"""References to images, sounds and feature vectors in texts, and their tensors in a batch.

    <image:cat.png> what is this?        an image, then a question
    <audio:seven.wav+one.wav>            two sounds, joined to one
    <features:0.5 -1 2>                  a vector of three numbers
    <image:digits.npz#images/17>         an entry of an array

A store gives each reference a number n. In the ids of a text, all its places have the id -n - 1, so that examples,
plans, packing and padding treat it like tokens. `attach` turns a batch of such ids into the tensors that a model reads.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer.attention.media_batch import MediaBatch
from anyformer.config import (
    ConfigError,
    Fault,
    Media,
    MediaKind,
    ModelConfig,
    Pictures,
)
from anyformer.config.spec import visible
from anyformer.data.augment import Augmentation
from anyformer.data.batch import Batch
from anyformer.data.media_files import (
    BadFile,
    FeatureReader,
    check_folders,
    files_of,
    fit_features,
    fit_image,
    is_media_file,
    log_mel,
    read_image,
    read_sound,
)
from anyformer.kernels.conventions import PLAIN

REFERENCE = re.compile(r"<(image|audio|features):([^<>\n]+)>")
WAYS: Mapping[str, MediaKind] = {".wav": "audio"}  # kind of a bare path by its suffix; all others are images

Part = str | tuple[MediaKind, str]  # of a text: plain text, or the kind and the name of a reference


class Segment(NamedTuple):
    """A segment of a row: its kind, its first place, rows and columns of its places, and its value."""

    kind: MediaKind
    start: int
    grid: tuple[int, int]
    value: np.ndarray  # pixels [c, h, w], uint8; log-mel frames of all places [frames, mels]; a vector [size]

    @property
    def stop(self) -> int:
        rows, columns = self.grid
        return self.start + rows * columns


class MediaStore:
    """Segments by number, decoded once and held in memory: pixels as bytes, sounds as log-mel frames."""

    def __init__(
        self,
        spec: Media,
        in_decoder: bool,
        augment: Augmentation | None = None,
        pictures: Pictures | None = None,
        alone: bool = False,
    ):
        self.spec, self.in_decoder, self.augment = spec, in_decoder, augment
        self.pictures = pictures or Pictures()
        self.alone = alone  # a text with an image is that image, in one place, and nothing else
        self.required = False  # every training row had a segment
        self.folders: Sequence[Path] | None = None  # files are read from these alone; None: from anywhere
        self._features = None if spec.features is None else FeatureReader(spec.features)
        self._numbers: dict[tuple[MediaKind, str], int] = {}
        self._kinds: list[MediaKind] = []
        self._values: list[np.ndarray] = []
        self._known: tuple[np.ndarray, np.ndarray] = np.zeros(0), np.zeros(0)  # see `_facts`

    @classmethod
    def of(
        cls, config: ModelConfig, augment: Augmentation | None = None, pictures: Pictures | None = None
    ) -> "MediaStore | None":
        """Return a store for the segments that a model reads; None for a model that reads tokens only."""
        read = config.source if config.encoder is not None else config.target
        if read is not None and read.stream is not None:
            return cls(read.stream, config.encoder is None, augment, pictures)
        patches = read if config.image_tower is None else config.image_tower.source
        if patches is not None and patches.picture is not None:
            return cls(Media(image=patches.picture), False, augment, pictures, alone=True)
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
        image, audio = self.spec.image, self.spec.audio
        if self.folders is not None:
            check_folders(files_of(kind, name), self.folders)
        match kind:
            case "image" if image is not None:
                return read_image(name, image, self.pictures)
            case "audio" if audio is not None:
                return log_mel(read_sound(name, audio), audio)
            case "features" if self._features is not None:
                return self._features.read(name)
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

    def segments(self, ids: Sequence[int]) -> list[Segment]:
        """Return the segments of one row of ids, in order."""
        found, at = list[Segment](), 0
        while at < len(ids):
            if (number := -ids[at] - 1) < 0:
                at += 1
                continue
            kind, value, grid = self._kinds[number], self._values[number], (1, self.places(number))
            if kind == "image" and self.spec.image is not None and not self.alone:
                grid = self.spec.image.grid
            if kind == "audio" and self.spec.audio is not None:  # the last place may end after the sound
                after = grid[1] * self.spec.audio.stride - len(value)
                value = np.pad(value, ((0, after), (0, 0)), constant_values=value.min())
            found.append(Segment(kind, at, grid, value))
            at = found[-1].stop
        return found

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
        """Return a batch with its segments as tensors; with a seed they are augmented, depending on it alone.

        `MediaBatch.decode` turns the images, which are bytes, into those that a model reads.
        """
        ids = batch.ids if batch.source is None else batch.source
        changed, media, marks = self._read_segments(ids, batch.marks, seed)
        if media is None:
            return batch
        batch = batch._replace(ids=changed) if batch.source is None else batch._replace(source=changed)
        return batch._replace(media=media, marks=marks)

    def read(
        self, ids: Tensor, marks: Tensor | None = None, seed: Sequence[int] | None = None
    ) -> tuple[Tensor, MediaBatch | None, Tensor | None]:
        """Return ids [b, t] without references, the segments that they name, and marks of groups."""
        ids, media, marks = self._read_segments(ids, marks, seed)
        return ids, None if media is None else media.decode(), marks

    def _read_segments(
        self, ids: Tensor, marks: Tensor | None, seed: Sequence[int] | None
    ) -> tuple[Tensor, MediaBatch | None, Tensor | None]:
        raw = ids.cpu().numpy()
        if raw.min(initial=0) >= 0:
            return ids, None, marks
        rng = None if seed is None else np.random.Generator(np.random.PCG64([*seed, 3]))
        found = self._find(raw)
        fields: dict[str, Tensor] = {}
        for kind in self.spec.kinds:
            if len(numbers := found.numbers[found.kinds == kind]):
                made, step = self._tensors(kind, numbers.tolist(), rng)
                fields |= made | {f"{kind}_at": torch.from_numpy(found.at(kind, step))}
        media = MediaBatch(**{name: x.to(ids.device) for name, x in fields.items()})
        if self.in_decoder:
            marks = self._marks(found, marks)
        return ids.clamp(min=0), media, marks

    def _facts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of places and the kind of all segments, which are kept until another one is read."""
        if len(self._known[0]) < len(self._values):
            self._known = np.array([self.places(n) for n in range(len(self._values))]), np.array(self._kinds)
        return self._known

    def _find(self, ids: np.ndarray) -> "_Found":
        """Return the segments of all rows, in order."""
        columns = np.arange(ids.shape[1])
        begins = np.diff(ids, axis=1, prepend=0) != 0
        first = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)  # of the run of equal ids
        numbers = -ids - 1
        sizes, kinds = self._facts()
        # the same segment may occur twice in succession
        offset = np.where(ids < 0, (columns - first) % sizes[np.maximum(numbers, 0)], -1)
        starts = offset == 0
        chosen = numbers[starts]
        return _Found(chosen, kinds[chosen], offset, starts.cumsum().reshape(ids.shape) - 1)

    def _tensors(
        self, kind: MediaKind, numbers: list[int], rng: np.random.Generator | None
    ) -> tuple[dict[str, Tensor], int]:
        """Return the tensors of all segments of a kind, and the number of vectors that the model makes of each."""
        values = [self._values[number] for number in numbers]
        match kind:
            case "image":
                fields = self._bytes(values)
                if self.augment is not None and rng is not None:
                    fields |= self.augment.images(tuple(fields["images"].shape), rng)
                return fields, self.places(numbers[0])
            case "audio":
                assert self.spec.audio is not None
                if self.augment is not None and rng is not None:
                    values = self.augment.sounds(values, rng)
                step = self.spec.audio.places(max(map(len, values)))
                frames = np.zeros((len(values), step * self.spec.audio.stride, self.spec.audio.mels), dtype=np.float32)
                for i, value in enumerate(values):
                    frames[i, : len(value)] = value
                sizes = torch.tensor([len(value) for value in values])
                return {"sounds": torch.from_numpy(frames), "frames": sizes}, step
            case "features":
                assert self.spec.features is not None
                vectors = torch.from_numpy(np.stack(values).astype(np.float32))
                return {"features": vectors}, self.spec.features.places

    def _bytes(self, values: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return images as fields of `MediaBatch` that it can decode."""
        images = torch.from_numpy(np.stack(values))
        levels = [
            torch.tensor(x).expand(images.shape[1])
            for x in (self.pictures.scale, self.pictures.mean, self.pictures.deviation)
        ]
        return {"images": images, "levels": torch.stack(levels)[:, :, None, None]}

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
        images = MediaBatch(**self._bytes(found)).decode().images
        assert images is not None
        return images

    def _marks(self, found: "_Found", marks: Tensor | None) -> Tensor | None:
        """Return marks that group the places of each segment whose places see each other."""
        grouped = [kind for kind in self.spec.kinds if getattr(getattr(self.spec, kind), "both_ways", False)]
        is_grouped = np.isin(found.kinds, grouped)
        if not is_grouped.any():
            return marks
        new = np.zeros(found.offset.shape, dtype=np.int64) if marks is None else marks.cpu().numpy().copy()
        inside = (found.offset >= 0) & is_grouped[np.maximum(found.segment, 0)] & (new == PLAIN)
        new[inside] = -found.segment[inside] - 1
        return torch.from_numpy(new) if marks is None else torch.from_numpy(new).to(marks.device)


class _Found(NamedTuple):
    """The segments of a batch, row by row."""

    numbers: np.ndarray  # [n]: of each segment in the store
    kinds: np.ndarray  # [n]
    offset: np.ndarray  # [b, t]: of a place within its segment; -1 for tokens
    segment: np.ndarray  # [b, t]: of the segment at a place; for tokens, of the last one before it

    def at(self, kind: MediaKind, step: int) -> np.ndarray:
        """Return the index of each place among the vectors of a kind, `step` for each segment; -1 elsewhere."""
        is_kind = self.kinds == kind
        order = is_kind.cumsum() - 1
        index = np.maximum(self.segment, 0)
        return np.where((self.offset >= 0) & is_kind[index], order[index] * step + self.offset, -1)


def _parts(text: str) -> list[Part]:
    """Return the texts and references of a text, in order.

    A bare path of a media file is a reference, too: alone, or separated from a text by a tab.
    """
    if not text.startswith("<"):
        cells = [cell.strip() for cell in text.split("\t")]
        if any(map(_is_path, cells)):
            named = (part for cell in cells for part in ([_reference(cell)] if _is_path(cell) else _parts(cell)))
            return [part for part in named if part]
    parts, at = list[Part](), 0
    for found in REFERENCE.finditer(text):
        parts += [text[at : found.start()].strip()] if text[at : found.start()].strip() else []
        kind: MediaKind = found[1]  # type: ignore[assignment]
        parts.append((kind, found[2]))
        at = found.end()
    rest = text[at:]
    return [*parts, rest.strip() if parts else rest] if rest.strip() or not parts else parts


def _is_path(cell: str) -> bool:
    """Return whether a cell is the path of a media file: one that exists, or one without spaces."""
    return is_media_file(cell) and (len(cell.split()) == 1 or os.path.exists(cell.partition("#")[0]))


def _reference(path: str) -> tuple[MediaKind, str]:
    return WAYS.get(Path(path).suffix.lower(), "image"), path


def files_in(text: str) -> list[str]:
    """Return the files that a text names."""
    return [file for part in _parts(text) if not isinstance(part, str) for file in files_of(*part)]


def references_end(text: str) -> int:
    """Return where the last reference of a text ends; 0 if it has none."""
    parts = _parts(text)
    if all(isinstance(part, str) for part in parts):
        return 0
    return len(text.rstrip()) - len(parts[-1].rstrip()) if isinstance(parts[-1], str) else len(text)


def without_references(text: str) -> str:
    """Return a text without references, for the training of a tokenizer."""
    return " ".join(part for part in _parts(text) if isinstance(part, str))
