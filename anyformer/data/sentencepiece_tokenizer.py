"""Text to ids by a SentencePiece model, as the slow tokenizers of `transformers` 4.x do it. Imports no torch.

A reader is a .model file, the way in which a tokenizer class prepares a text for it, and the name of the unknown
token. The ids of pieces are those of the vocabulary around it.
"""

import base64
import binascii
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

from anyformer.data.sentencepiece import SPACE, SentencePieces


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
    """A SentencePiece model with what a tokenizer class adds to it."""

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
