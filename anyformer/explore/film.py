"""A film of a training: pictures of a view at its steps, which the page has drawn, as one animated GIF."""

from base64 import b64decode
from binascii import Error
from io import BytesIO
from typing import TYPE_CHECKING

from anyformer.config import ConfigError, Fault
from anyformer.explore.requests import GifRequest

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_REQUEST_BYTES = 64 * 2**20
MAX_PIXELS = 2**27  # of all frames together
COLOURS = 255
LAST_FRAME_TIME = 3  # times as long as the others: the result is looked at


def gif(request: GifRequest) -> bytes:
    """Return an animated GIF that repeats without end; its last frame is shown longer."""
    frames = [_picture(i, text) for i, text in enumerate(request.frames)]
    if len({frame.size for frame in frames}) > 1:
        raise ConfigError([Fault("frames", "must all have one size")])
    if (pixels := len(frames) * frames[0].width * frames[0].height) > MAX_PIXELS:
        raise ConfigError([Fault("frames", f"have {pixels:,} pixels; the limit is {MAX_PIXELS:,}")])
    from PIL.Image import Dither

    palette = _montage(frames).quantize(COLOURS)
    first, *others = (frame.convert("RGB").quantize(palette=palette, dither=Dither.NONE) for frame in frames)
    times = [request.milliseconds] * len(frames)
    times[-1] *= LAST_FRAME_TIME
    out = BytesIO()
    first.save(out, "GIF", save_all=True, append_images=others, duration=times, loop=0)
    return out.getvalue()


def _picture(index: int, text: str) -> "Image":
    """Open a PNG without decoding its pixels."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError([Fault("gif", "a GIF needs Pillow: pip install 'anyformer[vision]'")]) from None
    try:
        return Image.open(BytesIO(b64decode(text, validate=True)), formats=["PNG"])
    except (Error, ValueError, OSError, Image.DecompressionBombError):
        raise ConfigError([Fault(f"frames[{index}]", "is not a PNG picture in base64")]) from None


def _montage(frames: list["Image"]) -> "Image":
    """Return every fourth pixel of all frames: their colours are those of the palette."""
    from PIL import Image

    width, height = (max(1, size // 2) for size in frames[0].size)
    montage = Image.new("RGB", (width, height * len(frames)))
    for i, frame in enumerate(frames):
        montage.paste(frame.convert("RGB").resize((width, height), Image.Resampling.NEAREST), (0, i * height))
    return montage
