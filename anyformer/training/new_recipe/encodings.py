"""The encoding of a file, from its bytes. Imports no torch."""

import codecs
from collections.abc import Callable

SAMPLE = 2**20  # bytes that are compared with each encoding
MAX_DAMAGE = 0.02  # share of characters that are not UTF-8 in a file that is called UTF-8


def _is_hangul(c: str) -> bool:
    return "가" <= c <= "힣" or "ㄱ" <= c <= "ㆎ" or "\u3000" <= c <= "\u303f" or "\u2000" <= c <= "\u2fff"


def _is_kana(c: str) -> bool:
    return "\u3040" <= c <= "\u30ff"


def _is_common_han(c: str) -> bool:
    """Return whether a character is among the 3,755 of level 1 of GB 2312, or a full-width sign."""
    code = c.encode("gb2312", "ignore")
    return (len(code) == 2 and 0xB0 <= code[0] <= 0xD7) or "\u3000" <= c <= "\u303f" or "\uff00" <= c <= "\uffef"


def _is_common_big5(c: str) -> bool:
    code = c.encode("big5", "ignore")
    return len(code) == 2 and 0xA1 <= code[0] <= 0xC6


# Encodings in the order in which they are tried, with the characters that text in them consists of, and their least
# share. Korean bytes are also valid Chinese ones and the reverse: only the characters differ.
CANDIDATES: tuple[tuple[str, Callable[[str], bool], float], ...] = (
    ("cp949", _is_hangul, 0.85),
    ("cp932", _is_kana, 0.25),
    ("euc_jp", _is_kana, 0.25),
    ("gb18030", _is_common_han, 0.85),
    ("big5", _is_common_big5, 0.9),
)


def detect_encoding(raw: bytes) -> str:
    """Return the name of the encoding that some bytes are text in."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    text = raw.decode("utf-8", "replace")
    foreign = sum(not c.isascii() for c in text)
    if text.count("\ufffd") <= MAX_DAMAGE * foreign:
        return "utf-8"
    sample = raw[:SAMPLE].rpartition(b"\n")[0] or raw[:SAMPLE]
    for name, is_usual, least in CANDIDATES:
        try:
            found = [c for c in sample.decode(name) if not c.isascii()]
        except UnicodeDecodeError:
            continue
        if found and sum(map(is_usual, found)) >= least * len(found):
            return name
    try:
        raw.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252" if any(0x80 <= byte < 0xA0 for byte in raw) else "latin-1"
