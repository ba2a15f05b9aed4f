"""SentencePiece models (Kudo & Richardson 2018): the pieces of a .model file, and texts segmented by the library.

The `tokenizers` library segments rare texts in another way: combining marks, repeated characters. Needs the extra
`sentencepiece` where a model is read.
"""

import base64
import binascii
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

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


# -- text to ids, as the slow tokenizers of `transformers` 4.x do it ---------------------------------------------------


@dataclass(frozen=True)
class UnchangedText:
    """The text as it is."""

    def start(self, text: str) -> str:
        return text

    def pieces(self, model: SentencePieces, text: str) -> list[str]:
        return model.pieces(text)


@dataclass(frozen=True)
class Prefixed:
    """T5's and Llama's `legacy = false`: ▁ before the text instead of the model's dummy prefix.

    The text is segmented after another one, the unknown token, so that the model does not strip its leading spaces.
    """

    after: str = "<unk>"
    add_prefix_space: bool = True

    def start(self, text: str) -> str:
        return (SPACE if self.add_prefix_space and text else "") + text.replace(SPACE, " ")

    def pieces(self, model: SentencePieces, text: str) -> list[str]:
        if not text.startswith((SPACE, " ")):
            return model.pieces(text, dummy_prefix=False)
        lead, found = (model.pieces(self.after + part, dummy_prefix=False) for part in ("", text))
        return found[len(lead) :] if len(found) >= len(lead) else found


@dataclass(frozen=True)
class Cleaned:
    """ALBERT's: lower case, one space between words, straight quotes, no accents; a comma after a digit stays alone."""

    lowercase: bool = True
    remove_space: bool = True
    keep_accents: bool = False

    def start(self, text: str) -> str:
        return "".join(c.lower() for c in text) if self.lowercase else text  # one by one: no final sigma

    def pieces(self, model: SentencePieces, text: str) -> list[str]:
        if self.remove_space:
            text = " ".join(text.split())
        text = text.replace("``", '"').replace("''", '"')
        if not self.keep_accents:
            text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
        if self.lowercase:
            text = text.lower()
        found: list[str] = []
        for piece in model.pieces(text):
            if len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit():
                found += [*self._digits(model, piece[:-1]), ","]
            else:
                found.append(piece)
        return found

    def _digits(self, model: SentencePieces, piece: str) -> list[str]:
        parts = model.pieces(piece.replace(SPACE, ""))
        if not piece.startswith(SPACE) and parts[0].startswith(SPACE):
            parts[:1] = [parts[0][1:]] if len(parts[0]) > 1 else []
        return parts


@dataclass(frozen=True)
class Coded:
    """Marian's: a language code such as >>deu<< at the beginning of a text is one token."""

    def start(self, text: str) -> str:
        return text

    def pieces(self, model: SentencePieces, text: str) -> list[str]:
        end = text.find("<<") if text.startswith(">>") else -1
        return model.pieces(text) if end < 0 else [text[: end + 2], *model.pieces(text[end + 2 :])]


Preparation = UnchangedText | Prefixed | Cleaned | Coded
KINDS: dict[str, type[Preparation]] = {"plain": UnchangedText, "prefixed": Prefixed, "cleaned": Cleaned, "coded": Coded}


@dataclass(frozen=True)
class PieceReader:
    """A SentencePiece model with what a tokenizer class adds to it.

    The ids of pieces are those of the vocabulary around it.
    """

    model: bytes
    unknown: str = "<unk>"
    prepare: Preparation = UnchangedText()
    lowercase: bool = False  # before all else (sentence-transformers)
    added: tuple[str, ...] = ()  # tokens outside the model that a text can become: it is split at them

    @cached_property
    def pieces(self) -> SentencePieces:
        """The parsed model; raises ValueError where it is damaged."""
        return SentencePieces(self.model)

    def encode(self, text: str, ids: Mapping[str, int]) -> list[int]:
        """Return the ids of a text: those of its pieces, and the unknown id for others."""
        unknown = ids[self.unknown]
        text = self.prepare.start(text.lower() if self.lowercase else text)
        found: list[str] = []
        for i, part in enumerate(self._split.split(text) if self._split else [text]):
            if part:
                found += [part] if i % 2 else self.prepare.pieces(self.pieces, part)
        return [ids.get(piece, unknown) for piece in found]

    @cached_property
    def _split(self) -> re.Pattern[str] | None:
        longest = sorted(self.added, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        kind = next(name for name, of in KINDS.items() if type(self.prepare) is of)
        model = base64.b64encode(self.model).decode()
        prepare = {"kind": kind, **asdict(self.prepare)}
        texts = {"lowercase": self.lowercase, "added": list(self.added)}
        return {"unknown": self.unknown, "prepare": prepare, **texts, "model": model}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Build a reader from `to_json`; raises ValueError where it is damaged."""
        try:
            given = dict(data["prepare"])
            model, prepare = base64.b64decode(data["model"], validate=True), KINDS[given.pop("kind")](**given)
            return cls(model, data["unknown"], prepare, data["lowercase"], tuple(data["added"]))
        except (KeyError, TypeError, binascii.Error) as error:
            raise ValueError(f"sentencepiece: is damaged: {error}") from None
