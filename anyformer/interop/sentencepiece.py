"""SentencePiece's .model files (Kudo & Richardson 2018), read without its library. Imports no torch.

A file is a protocol buffer: a list of fields, each with a number and one of four forms. Of a model, field 1 is a piece
(1 text, 2 score, 3 type), 2 says how it was trained (3 algorithm, 35 bytes for what is unknown, 40 unknown id), 3 how
text is normalised (2 table of characters, 3 a space before the text, 4 no more than one space).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from anyformer.interop.files import wrong

UNKNOWN, CONTROL, USER = 2, 3, 4  # types of pieces
UNIGRAM, BPE = 1, 2
SPACE = "▁"

Value = int | float | bytes


class Piece(NamedTuple):
    text: str
    score: float
    type: int


def read(path: Path, extra: tuple[str, ...] = ()) -> Tokenizer:
    """The tokenizer of a file, with some special tokens behind its own."""
    try:
        top = _fields(path.read_bytes())
        pieces = [_piece(_fields(part)) for number, part in top if number == 1 and isinstance(part, bytes)]
        training, rules = (
            dict(_fields(b"".join(p for n, p in top if n == i and isinstance(p, bytes)))) for i in (2, 3)
        )
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, struct.error):
        raise wrong(path, "is no SentencePiece model, or damaged") from None
    if not pieces:
        raise wrong(path, "is no SentencePiece model: it has no pieces")
    algorithm, fallback = training.get(3, UNIGRAM), bool(training.get(35, 0))
    unknown = next((i for i, piece in enumerate(pieces) if piece.type == UNKNOWN), 0)
    try:
        if algorithm == UNIGRAM:
            scored = [(piece.text, piece.score) for piece in pieces]
            inner = Tokenizer(models.Unigram(scored, unk_id=unknown, byte_fallback=fallback))
        elif algorithm == BPE:
            inner = Tokenizer(_bpe(pieces, pieces[unknown].text, fallback))
        else:
            raise wrong(path, f"is of the algorithm {algorithm!r}: only unigram (1) and BPE (2) are read")
        inner.normalizer = _normalizer(rules)
    except BaseException as error:  # the library's own are of no narrower type, and its panics are of none at all
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise wrong(path, f"is damaged: {error}") from None
    steps = [decoders.Replace(SPACE, " "), *([decoders.ByteFallback()] if fallback else []), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if rules.get(3, 1) else steps)
    inner.add_special_tokens([piece.text for piece in pieces if piece.type in (UNKNOWN, CONTROL)])
    inner.add_tokens([AddedToken(piece.text, normalized=False) for piece in pieces if piece.type == USER])
    inner.add_special_tokens(list(extra))
    return inner


def _bpe(pieces: list[Piece], unknown: str, fallback: bool) -> models.BPE:
    """The best of two neighbours is merged first: a merge for each way to cut a piece into two, by the score."""
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    merges = [
        (piece.text[:at], piece.text[at:])
        for piece in sorted((piece for piece in pieces if piece.type == 1), key=lambda piece: -piece.score)
        for at in range(1, len(piece.text))
        if piece.text[:at] in ids and piece.text[at:] in ids
    ]
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback)


def _normalizer(rules: dict[int, Value]) -> normalizers.Normalizer:
    """Absent fields are true."""
    steps: list[normalizers.Normalizer] = []
    if (table := rules.get(2)) and isinstance(table, bytes):
        steps.append(normalizers.Precompiled(table))
    if rules.get(4, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" +"), " ")]
    if rules.get(3, 1):
        steps.append(normalizers.Prepend(" "))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _piece(fields: list[tuple[int, Value]]) -> Piece:
    found = dict(fields)
    text, score, type = found.get(1, b""), found.get(2, 0.0), found.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(score, float) or not isinstance(type, int):
        raise ValueError("a piece of other fields")
    return Piece(text.decode(), score, type)


def _fields(data: bytes) -> list[tuple[int, Value]]:
    return list(_walk(data))


def _walk(data: bytes) -> Iterator[tuple[int, Value]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value: Value
        match key & 7:
            case 0:
                value, at = _varint(data, at)
            case 1:
                (value,), at = struct.unpack_from("<d", data, at), at + 8
            case 2:
                size, at = _varint(data, at)
                if at + size > len(data):
                    raise ValueError("cut short")
                value, at = data[at : at + size], at + size
            case 5:
                (value,), at = struct.unpack_from("<f", data, at), at + 4
            case _:
                raise ValueError("no protocol buffer")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number without an end")
