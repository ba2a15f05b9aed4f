"""Files of images, sounds and numbers, and arrays of many of them in one `.npz` or `.npy` file.

A place in an array is written after `#`: `digits.npz#images/17` is the 18th image of the array `images`. The array's
name may be left out where the file has only one. Nothing is ever unpickled.
"""

import lzma
import os
import struct
import wave
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import numpy as np

from anyformer.config import (
    ExactSize,
    FeatureSegment,
    ImageSegment,
    MediaKind,
    NoResize,
    Pictures,
    ShortSide,
    Spectrogram,
)
from anyformer.config.spec import visible
from anyformer.data.files import max_unpacked, unusual, usual_bytes
from anyformer.recipe import SCENE_PREFIX

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

ARRAYS = (".npz", ".npy")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
SOUNDS = (".wav",)
GREY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N", "F")  # of Pillow
FORMATS_16_BITS = ("PNG", "PPM")  # whose mode I has values of 16 bits
BAD_WAV = (wave.Error, EOFError)
ARRAY_RATIO = 1000  # a .npz of a game's frames is up to 900 times as large when unpacked


class BadFile(ValueError):
    """A file that cannot be read, or does not fit the model; the message names it."""


def read_image(name: str, spec: ImageSegment, pictures: Pictures) -> np.ndarray:
    """Return the pixels of an image, uint8 [channels, height, width]; only picture files are resized and cropped."""
    if name.startswith(SCENE_PREFIX):
        pixels = _draw_scene(name)
    else:
        pixels = read_array(name) if is_array(name) else _fit_picture(name, spec, pictures)
    return fit_image(pixels, spec, name)


def fit_image(pixels: np.ndarray, spec: ImageSegment, name: str) -> np.ndarray:
    """Return pixels [height, width, channels] as [channels, height, width]; raise `BadFile` if they do not fit."""
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        raise BadFile(f"{visible(name)} is no image: {pixels.dtype} {list(pixels.shape)}, not uint8 [height, width, 3]")
    height, width, channels = pixels.shape
    if (height, width) != spec.size:
        wanted = f"{spec.size[1]}×{spec.size[0]}"
        raise BadFile(f"{visible(name)} has {width}×{height} pixels, and the model reads {wanted}: resize it")
    if channels != spec.channels:
        raise BadFile(f"{visible(name)} has {channels} channels, and the model reads {spec.channels}")
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _draw_scene(name: str) -> np.ndarray:
    from anyformer.data.scenes import draw

    try:
        return draw(name)
    except ValueError as error:
        raise BadFile(f"{visible(name)} {error}") from None


def read_sound(names: str, spec: Spectrogram) -> np.ndarray:
    """Return the samples of sounds in [-1, 1], float32; several files are joined: `a.wav+b.wav`."""
    return np.concatenate([_decode_wav(name, spec) for name in names.split("+")])


class FeatureReader:
    """Feature vectors by reference: an array is checked and converted once, not for each of its rows."""

    def __init__(self, spec: FeatureSegment):
        self.spec = spec
        self._tables: dict[str, np.ndarray] = {}

    def read(self, text: str) -> np.ndarray:
        """Return a vector of numbers [size]: written out, or a row of an array."""
        array, _, row = text.rpartition("/")
        if array not in self._tables:
            self._tables[array] = self._read_table(array)
        table = self._tables[array]
        if row.isdecimal() and int(row) < len(table):
            return table[int(row)]
        return fit_features(read_numbers(text), self.spec, text)

    def _read_table(self, name: str) -> np.ndarray:
        """Return all rows of an array; none if there is a fault, which is then reported for each row."""
        file, _, key = name.partition("#")
        with suppress(BadFile):
            if key and is_array(file) and (array := find_array(file, key)).size:
                return fit_features(array.reshape(len(array), -1), self.spec, name)
        return np.zeros((0, self.spec.size))


def read_numbers(text: str) -> np.ndarray:
    """Return numbers [n] that are written out, or a row of an array."""
    if is_array(text):
        return read_array(text).ravel()
    try:
        return np.array([float(word) for word in text.replace(",", " ").split()], dtype=np.float32)
    except ValueError:
        raise BadFile(f"{visible(text)} is not a list of numbers, and not a row of a .npz or .npy file") from None


def fit_features(values: np.ndarray, spec: FeatureSegment, name: str) -> np.ndarray:
    """Return vectors [..., size] as the model reads them, float32 or small integers; raise `BadFile` if one differs."""
    if values.shape[-1] != spec.size:
        raise BadFile(f"{visible(name)} has {values.shape[-1]} numbers, and the model reads {spec.size}")
    if spec.values is None:
        return values.astype(np.float32)
    is_whole = values.dtype.kind in "ui" or bool((values == np.floor(values)).all())
    if not is_whole or values.min() < 0 or values.max() >= spec.values:
        raise BadFile(f"{visible(name)} has other numbers than 0, 1, ..., {spec.values - 1}, which the model reads")
    return values.astype(np.min_scalar_type(spec.values - 1))


def files_of(kind: MediaKind, name: str) -> list[str]:
    """Return the files that a reference names."""
    if kind == "audio":
        names = name.split("+")
    else:
        names = [name] if is_array(name) or (kind == "image" and not name.startswith(SCENE_PREFIX)) else []
    return [one.partition("#")[0] if is_array(one) else one for one in names]


def check_folders(files: Sequence[str], folders: Sequence[Path]) -> None:
    """Raise `BadFile` for a file that is in none of some folders; a link is where it leads to."""
    for file in files:
        try:
            path = Path(file).resolve()
        except (OSError, ValueError, RuntimeError):  # a NUL in its name, or links in a circle
            raise BadFile(f"{visible(file)} cannot be the name of a file") from None
        if not any(path.is_relative_to(folder.resolve()) for folder in folders):
            raise BadFile(f"{visible(file)} is outside of {folders[0]} and of the run's data: copy it there")


def is_array(name: str) -> bool:
    return name.partition("#")[0].lower().endswith(ARRAYS)


def read_array(name: str) -> np.ndarray:
    """Return one entry of an array."""
    file, _, place = name.partition("#")
    key, _, number = place.rpartition("/")
    array = find_array(file, key)
    if not number.isdecimal() or int(number) >= len(array):
        raise BadFile(f"{visible(name)}: the array has {len(array)} entries, counted from 0")
    entry: np.ndarray = array[int(number)]
    return entry


def find_array(file: str, key: str) -> np.ndarray:
    """Return an array of a file by its name, which may be empty if there is only one."""
    arrays = load_arrays(file)
    if not key and len(arrays) != 1:
        raise BadFile(f"{visible(file)} has the arrays {', '.join(arrays)}: name one, as in {visible(file)}#NAME/0")
    array = arrays.get(key) if key else next(iter(arrays.values()))
    if array is None:
        raise BadFile(f"{visible(file)} has no array {key!r}, but {', '.join(arrays)}")
    return array


def load_arrays(file: str) -> dict[str, np.ndarray]:
    """Return all arrays of a `.npz` or `.npy` file by name; they are held in memory as long as the file is the same."""
    try:
        changed = os.stat(file).st_mtime_ns
    except OSError:
        raise BadFile(f"{visible(file)} does not exist") from None
    return _load_arrays(file, changed)


@lru_cache(maxsize=8)
def _load_arrays(file: str, changed: int) -> dict[str, np.ndarray]:
    try:
        with open(file, "rb") as raw:  # closed here also if it is no array file
            found = np.load(raw, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {"array": found}
            size = sum(member.file_size for member in found.zip.infolist())
            if size > usual_bytes(os.fstat(raw.fileno()).st_size, ARRAY_RATIO):
                raise _too_large(file, size, unusual("save it by numpy.savez, which does not compress", ARRAY_RATIO))
            return {key: found[key] for key in found.files}
    except BadFile:
        raise
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, lzma.LZMAError, zlib.error) as error:
        raise BadFile(f"{visible(file)} is no readable array file ({first_line(error)})") from None


def _fit_picture(name: str, spec: ImageSegment, pictures: Pictures) -> np.ndarray:
    picture = _resize(open_picture(name, grey=spec.channels == 1), pictures)
    return np.asarray(_crop(picture, *spec.size) if pictures.crop else picture)


def open_picture(name: str, grey: bool | None = None) -> "PillowImage":
    """Return a decoded picture in grey or in RGB, upright; without an argument, in grey if its file is.

    Values of 16 bits are scaled to 8, and transparent pixels are blended on white.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise BadFile(f"{visible(name)}: reading pictures needs Pillow: pip install 'anyformer[vision]'") from None
    bad = (OSError, ValueError, SyntaxError, NotImplementedError, Image.DecompressionBombError)
    try:
        with Image.open(name) as picture:
            size = picture.width * picture.height * len(picture.getbands())
            most, why = max_unpacked(os.path.getsize(name), "save it without compression")
            if size > most:
                raise _too_large(name, size, why)
            picture.load()
            is_grey = picture.mode in GREY_MODES if grey is None else grey
            upright: PillowImage = picture
            with suppress(SyntaxError, struct.error):  # EXIF that cannot be read
                upright = ImageOps.exif_transpose(picture)
            return _blend(_scale(upright, name, picture.format)).convert("L" if is_grey else "RGB")
    except FileNotFoundError:
        raise BadFile(f"{visible(name)} does not exist") from None
    except BadFile:
        raise
    except bad as error:
        raise BadFile(f"{visible(name)} is no readable picture ({first_line(error)})") from None


def _too_large(name: str, size: int, why: str) -> BadFile:
    return BadFile(f"{visible(name)} unpacks to {size / 2**20:,.0f} MiB: {why}")


def _scale(picture: "PillowImage", name: str, kind: str | None) -> "PillowImage":
    """Scale values of 16 bits to 8; refuse those of 32 bits, whose range no file states."""
    from PIL import Image

    if picture.mode[0] not in "IF":
        return picture
    if picture.mode in ("I", "F") and kind not in FORMATS_16_BITS:
        raise BadFile(f"{visible(name)} has values of 32 bits without a range: save it with 8 or 16 bits")
    values = np.asarray(picture).astype(np.int64)
    values[values == picture.info.get("transparency", -1)] = 2**16 - 1
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _blend(picture: "PillowImage") -> "PillowImage":
    """Blend transparent pixels on white."""
    from PIL import Image

    if not picture.has_transparency_data:
        return picture
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)


def _resize(picture: "PillowImage", how: Pictures) -> "PillowImage":
    from PIL.Image import Resampling

    match how.resize:
        case NoResize():
            return picture
        case ExactSize(height=height, width=width):
            size = width, height
        case ShortSide(length=length):
            short, long = sorted(picture.size)
            far = int(length * long / short)
            size = (length, far) if picture.width <= picture.height else (far, length)
        case _:
            assert_never(how.resize)
    return picture.resize(size, Resampling[how.resample.upper()])


def _crop(picture: "PillowImage", height: int, width: int) -> "PillowImage":
    """Cut out the centre; a smaller picture stays as it is."""
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture if left < 0 or top < 0 else picture.crop((left, top, left + width, top + height))


def _decode_wav(name: str, spec: Spectrogram) -> np.ndarray:
    try:
        with wave.open(name, "rb") as file:
            channels, width, rate, count = (
                file.getnchannels(),
                file.getsampwidth(),
                file.getframerate(),
                file.getnframes(),
            )
            raw = file.readframes(count)
    except FileNotFoundError:
        raise BadFile(f"{visible(name)} does not exist") from None
    except (OSError, *BAD_WAV) as error:
        raise BadFile(f"{visible(name)} is no readable WAV file ({first_line(error)})") from None
    if rate != spec.rate:
        raise BadFile(f"{visible(name)} has {rate} samples per second, and the model reads {spec.rate}: resample it")
    if channels != 1:
        raise BadFile(f"{visible(name)} has {channels} channels, and the model reads one: mix it down")
    if not raw:
        raise BadFile(f"{visible(name)} is silent: it has no samples")
    match width:
        case 1:
            return (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
        case 2:
            return np.frombuffer(raw[: len(raw) // 2 * 2], "<i2").astype(np.float32) / 2**15
        case 4:
            return np.frombuffer(raw[: len(raw) // 4 * 4], "<i4").astype(np.float32) / 2**31
        case _:
            raise BadFile(f"{visible(name)} has {8 * width} bits per sample: 8, 16 and 32 can be read")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_media_file(name: str) -> bool:
    """Return whether a path names an image, a sound or an array, by its suffix."""
    return name.partition("#")[0].lower().endswith((*PICTURES, *SOUNDS, *ARRAYS))


# -- log-mel spectrograms of sounds, as Whisper computes them (Radford et al. 2022) ------------------------------------


def log_mel(samples: np.ndarray, spec: Spectrogram) -> np.ndarray:
    """Return the log-mel frames [frames, mels] of samples in [-1, 1]; there is a frame for each hop.

    Power of a Fourier transform over Hann windows, centred on each hop, in mel bands; then log10, at most 8 below the
    loudest band, and scaled to about [-1, 1].
    """
    n, half = spec.window, spec.window // 2
    frames = max(1, len(samples) // spec.hop)
    padded = np.pad(samples.astype(np.float64), (half, half), mode="reflect" if len(samples) > half else "constant")
    padded = np.pad(padded, (0, max(0, (frames - 1) * spec.hop + n - len(padded))))
    starts = np.arange(frames)[:, None] * spec.hop + np.arange(n)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n) / n)
    power = np.abs(np.fft.rfft(padded[starts] * hann, axis=1)) ** 2
    logs = np.log10(np.maximum(power @ mel_filters(spec.rate, n, spec.mels).T, 1e-10))
    return ((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).astype(np.float32)


@cache
def mel_filters(rate: int, window: int, mels: int) -> np.ndarray:
    """Return triangular bands [mels, window // 2 + 1], evenly spaced on Slaney's mel scale, each of unit area."""
    edges = _hertz(np.linspace(0.0, _mel(rate / 2), mels + 2))
    bins = np.linspace(0.0, rate / 2, window // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]


LINEAR = 200.0 / 3  # hertz per mel below KNEE; above it mels are logarithmic
KNEE = 1000.0
LOG_STEP = np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    return hertz / LINEAR if hertz < KNEE else KNEE / LINEAR + float(np.log(hertz / KNEE)) / LOG_STEP


def _hertz(mels: np.ndarray) -> np.ndarray:
    knee = KNEE / LINEAR
    return np.where(mels < knee, mels * LINEAR, KNEE * np.exp(LOG_STEP * (mels - knee)))
