"""Picture files: depth of 16 bits, orientation, transparency, files without a range, damaged and huge ones."""

import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from anyformer.data.media_files import BadFile, open_picture

Image = pytest.importorskip("PIL.Image")
ORIENTATION = 0x0112  # of EXIF
HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
def test_a_picture_of_16_bits_is_that_of_8(tmp_path: Path, suffix: str):
    pixels = random_pixels(5, 7)
    path = str(tmp_path / f"deep.{suffix}")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(path)
    assert np.array_equal(np.asarray(open_picture(path)), pixels)
    assert np.array_equal(np.asarray(open_picture(path, grey=False)), np.repeat(pixels[:, :, None], 3, 2))


def test_a_ramp_of_16_bits_uses_all_levels_equally(tmp_path: Path):
    ramp = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    levels = np.asarray(open_picture(str(tmp_path / "ramp.png"))).ravel()
    assert (np.diff(levels.astype(int)) >= 0).all()
    assert np.abs(levels / 255 - ramp.ravel() / 65535).max() <= 0.5 / 255 + 1e-9


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_values_without_a_range_are_refused(tmp_path: Path, kind: type):
    path = str(tmp_path / "values.tiff")
    Image.fromarray(np.linspace(0, 1, 16).reshape(4, 4).astype(kind)).save(path)
    with pytest.raises(BadFile, match=r"values\.tiff has values of 32 bits without a range: save it with 8 or 16 bits"):
        open_picture(path)


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_read_upright(tmp_path: Path, orientation: int, mode: str):
    upright = Image.fromarray(random_pixels(4, 6, 3)).convert(mode)
    how = Image.Transpose
    turned = [(), (how.FLIP_LEFT_RIGHT,), (how.ROTATE_180,), (how.FLIP_TOP_BOTTOM,)]
    turned += [(how.TRANSPOSE,), (how.ROTATE_90,), (how.TRANSVERSE,), (how.ROTATE_270,)]
    stored, exif = upright, Image.Exif()
    for step in turned[orientation - 1]:
        stored = stored.transpose(step)
    exif[ORIENTATION] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(np.asarray(open_picture(str(tmp_path / "a.png"))), np.asarray(upright))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Possibly corrupt EXIF", "ignore:Tag ")
@HERE
@given(exif=st.binary(max_size=60), tiff=st.booleans())
def test_damaged_exif_is_no_traceback(tmp_path: Path, exif: bytes, tiff: bool):
    pixels = random_pixels(3, 5, 3)
    header = b"Exif\0\0" + (b"II*\0\x08\0\0\0" if tiff else b"")
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=header + exif)
    with suppress(BadFile):  # and no other error
        assert open_picture(str(tmp_path / "a.png")).mode == "RGB"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_blended_on_white(tmp_path: Path, mode: str):
    path = str(tmp_path / "a.png")
    pixels = random_pixels(6, 6, 4)
    opacity = pixels[:, :, 3].copy()
    alpha = opacity[:, :, None] / 255
    match mode:
        case "RGBA":
            Image.fromarray(pixels).save(path)
        case "LA":
            pixels = np.repeat(pixels[:, :, :1], 3, 2)
            Image.merge("LA", [Image.fromarray(pixels[:, :, 0]), Image.fromarray(opacity)]).save(path)
        case "P":  # one colour of the palette is transparent
            indices = random_pixels(6, 6) % 3
            palette = random_pixels(3, 3, seed=1)
            stored = Image.fromarray(indices)
            stored.putpalette(palette.tobytes())
            stored.save(path, transparency=1)
            pixels, alpha = palette[indices], (indices != 1)[:, :, None].astype(float)
    wanted = pixels[:, :, :3] * alpha + 255 * (1 - alpha)
    assert np.abs(np.asarray(open_picture(path, grey=False)) - wanted).max() <= 1


def test_the_transparent_level_of_16_bits_is_white(tmp_path: Path):
    path = str(tmp_path / "a.png")
    Image.fromarray(np.array([[0, 257, 514]], np.uint16)).save(path, transparency=257)
    assert np.asarray(open_picture(path)).tolist() == [[0, 255, 2]]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("side", "why"), [(13_000, "unpacks to 484 MiB: over 100 times"), (60_000, "exceeds limit")])
def test_a_decompression_bomb_is_one_line(tmp_path: Path, side: int, why: str):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    with pytest.raises(BadFile, match=rf"bomb\.png .*{why}"):
        open_picture(str(tmp_path / "bomb.png"))


@HERE
@given(at=st.integers(0, 200), byte=st.integers(0, 255), suffix=st.sampled_from(["png", "bmp", "gif", "webp", "jpg"]))
def test_a_damaged_picture_is_no_traceback(tmp_path: Path, at: int, byte: int, suffix: str):
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(random_pixels(9, 9, 3)).save(path)
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] = byte
    path.write_bytes(raw)
    with suppress(BadFile):  # and no other error
        open_picture(str(path))
