"""A view of the page from outside the package: how long words are, how sure the model is, and a drawing of both."""

import zlib
from struct import pack
from typing import Any, Literal

from anyformer.config.spec import Size
from anyformer.explore.requests import TextRequest
from anyformer.explore.trace import Trace
from anyformer.explore.view import TextView, png
from anyformer.runs.run import Run


class LengthsRequest(TextRequest):
    """A text, and how many words are listed."""

    most: Size = 3


class Lengths(TextView):
    """The lengths of words."""

    kind: Literal["lengths"] = "lengths"
    request = LengthsRequest
    group, title = "prediction", "Longueurs 낱말"

    def fits(self, run: Run) -> bool:
        return run.config.decoder is not None

    def answer(self, trace: Trace, request: LengthsRequest) -> dict[str, Any]:
        words = trace.reading.text.split()
        norms = trace.activations["decoder.final"][0].norm(dim=-1)
        return {
            "words": [{"word": word, "length": len(word)} for word in words[: request.most]],
            "count": len(words),
            "norms": norms.tolist(),
            "drawing": png(_grey([[255 - 9 * len(word)] * 12 for word in words])),
        }


def _grey(rows: list[list[int]]) -> bytes:
    """Return a PNG of rows of grey values."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))

    size = pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
