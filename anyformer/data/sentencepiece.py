"""SentencePiece models (Kudo & Richardson 2018): the pieces of a .model file, and texts segmented by the library.

The `tokenizers` library segments rare texts in another way: combining marks, repeated characters. Needs the extra
`sentencepiece` where a model is read.
"""

from functools import cached_property
from typing import Any, NamedTuple

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
UNIGRAM, BPE = 1, 2
SPACE = "▁"
BYTE_PIECES = tuple(f"<0x{i:02X}>" for i in range(256))


class VocabularyPiece(NamedTuple):
    text: str
    score: float
    type: int


def new_model(data: bytes = b"") -> Any:
    """Return a model as the protocol buffer that a .model file is; raises ValueError where it is none."""
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except ImportError:
        raise ValueError("is a SentencePiece model, which needs: pip install 'anyformer[sentencepiece]'") from None
    try:
        return ModelProto.FromString(data)
    except DecodeError:
        raise ValueError("is no SentencePiece model, or damaged") from None


class SentencePieces:
    """A model: `pieces(text)` is what the library returns, unknown runs as their text."""

    def __init__(self, data: bytes):
        """Read a .model file; raises ValueError where it is damaged or of another kind."""
        self._model = new_model(data)
        self.table = [VocabularyPiece(piece.piece, piece.score, piece.type) for piece in self._model.pieces]
        if not self.table:
            raise ValueError("is no SentencePiece model: it has no pieces")
        training, rules = self._model.trainer_spec, self._model.normalizer_spec
        if training.model_type not in (UNIGRAM, BPE):
            raise ValueError(f"is of the algorithm {training.model_type}: only unigram (1) and BPE (2) are read")
        if training.treat_whitespace_as_suffix or not rules.escape_whitespaces:
            raise ValueError("marks spaces in another way than by ▁ before a word")
        self.unigram, self.byte_fallback = training.model_type == UNIGRAM, training.byte_fallback
        self.dummy_prefix, self.collapse = rules.add_dummy_prefix, rules.remove_extra_whitespaces
        self.charsmap = rules.precompiled_charsmap
        self._check()

    def _check(self) -> None:
        texts = [piece.text for piece in self.table if piece.type in (NORMAL, USER, UNUSED)]
        if len(set(texts)) < len(texts) or "" in texts:
            raise ValueError("is damaged: a piece is empty or there twice")
        if sum(piece.type == UNKNOWN for piece in self.table) != 1:
            raise ValueError("is damaged: it must have one unknown piece")
        if self.byte_fallback and not set(BYTE_PIECES) <= {p.text for p in self.table if p.type == BYTE}:
            raise ValueError("is damaged: it falls back to bytes, and some have no piece")

    @property
    def unknown(self) -> int:
        """The index of the unknown piece."""
        return next(i for i, piece in enumerate(self.table) if piece.type == UNKNOWN)

    def pieces(self, text: str, dummy_prefix: bool | None = None) -> list[str]:
        """Segment a text. `dummy_prefix` overrides whether a space is added before it."""
        prefixed = self.dummy_prefix if dummy_prefix is None else dummy_prefix
        found: list[str] = (self._prefixed if prefixed else self._bare).encode(text, out_type=str)
        return found

    @cached_property
    def _prefixed(self) -> Any:
        return self._processor(True)

    @cached_property
    def _bare(self) -> Any:
        return self._processor(False)

    def _processor(self, dummy_prefix: bool) -> Any:
        from sentencepiece import SentencePieceProcessor

        self._model.normalizer_spec.add_dummy_prefix = dummy_prefix
        try:
            return SentencePieceProcessor(model_proto=self._model.SerializeToString())
        except RuntimeError as error:
            raise ValueError(f"is damaged: {error}") from None
