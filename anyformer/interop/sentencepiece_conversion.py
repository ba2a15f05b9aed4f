"""The `tokenizers` form of a SentencePiece model: its vocabulary, decoder and nearest segmentation. Imports no torch.

Texts are segmented by `data/sentencepiece.py`. The library's own segmentation is exported, and differs from it on rare
texts.
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from anyformer.data.sentencepiece import CONTROL, NORMAL, SPACE, UNKNOWN, USER, Cleaned, PieceReader, SentencePieces
from anyformer.data.tokenizer import panicked
from anyformer.data.tokenizer_files import try_tokenizer
from anyformer.interop.weight_files import wrong


def parse(path: Path) -> tuple[bytes, SentencePieces]:
    """Read a .model file."""
    try:
        data = path.read_bytes()
        return data, SentencePieces(data)
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise wrong(path, str(error)) from None


def library_form(path: Path, reader: PieceReader, tokens: Sequence[str]) -> Tokenizer:
    """Build the library's tokenizer with these tokens by id, tried in a child process first."""
    model = reader.pieces
    try:
        inner = Tokenizer(
            _unigram(model, tokens, reader.unknown) if model.unigram else _bpe(model, tokens, reader.unknown)
        )
        inner.normalizer = _normalizer(reader)
        steps = [decoders.Replace(SPACE, " "), *([decoders.ByteFallback()] if model.byte_fallback else [])]
        strip = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
        inner.decoder = decoders.Sequence([*steps, decoders.Fuse(), *strip])
        text = json.loads(inner.to_str())
        if model.charsmap:
            table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()}
            text["normalizer"]["normalizers"].insert(-_spaces(model), table)
        whole = json.dumps(text)
        try_tokenizer(whole, path)
        inner = Tokenizer.from_str(whole)
    except BaseException as error:  # the library's own errors have no narrower type
        if not isinstance(error, Exception) and not panicked(error):
            raise
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            raise
        raise wrong(path, f"is damaged: {error}") from None
    known = set(tokens)
    kinds = {piece.text: piece.type for piece in model.table if piece.text in known}
    inner.add_special_tokens([text for text, kind in kinds.items() if kind in (UNKNOWN, CONTROL)])
    inner.add_tokens([AddedToken(text, normalized=False) for text, kind in kinds.items() if kind == USER])
    return inner


def _unigram(model: SentencePieces, tokens: Sequence[str], unknown: str) -> models.Unigram:
    scores = {piece.text: piece.score for piece in model.table}
    lowest = min(scores.values())
    scored = [(token, scores.get(token, lowest)) for token in tokens]
    return models.Unigram(scored, unk_id=tokens.index(unknown), byte_fallback=model.byte_fallback)


def _bpe(model: SentencePieces, tokens: Sequence[str], unknown: str) -> models.BPE:
    """Merge the best of two neighbours first: a merge for each way to cut a piece into two, by its score."""
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [
        (piece.text[:at], piece.text[at:])
        for piece in sorted((piece for piece in model.table if piece.type == NORMAL), key=lambda piece: -piece.score)
        for at in range(1, len(piece.text))
        if piece.text in ids and piece.text[:at] in ids and piece.text[at:] in ids
    ]
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def _normalizer(reader: PieceReader) -> normalizers.Normalizer:
    """Build all steps but the character map; the last `_spaces` of them come after it."""
    steps: list[normalizers.Normalizer] = []
    if isinstance(clean := reader.prepare, Cleaned):
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        steps += [] if clean.keep_accents else [normalizers.NFKD(), normalizers.StripAccents()]
        steps += [normalizers.Lowercase()] if clean.lowercase else []
    if reader.pieces.collapse:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" +"), " ")]
    if reader.pieces.dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _spaces(model: SentencePieces) -> int:
    return 1 + 2 * model.collapse + model.dummy_prefix
