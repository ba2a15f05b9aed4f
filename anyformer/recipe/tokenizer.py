"""Tokenizers: trained on the data, read from a file, or taken from a run or from shards. Imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, Spec
from anyformer.config.spec import BY_KIND, Flag

Vocabulary = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]  # `tokenizers` allocates memory for all of them


SPECIAL = ("<pad>", "<bos>", "<eos>", "<sep>", "<unk>", "<mask>")  # ids 0 to 5 of every trained tokenizer


class Characters(Spec):
    """One token per character, or per symbol of several characters."""

    kind: Literal["chars"] = "chars"
    lowercase: Flag = False  # turns text into lower case
    decompose: Flag = False  # NFD: Hangul syllables become letters, é becomes e + accent; `decode` does not undo it
    symbols: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # strings that are one token each, such as "t͡ɕ"

    @model_validator(mode="after")
    def _check_symbols(self) -> Self:
        faults = [
            Fault(f"symbols.{i}", f"= {symbol!r}: is a special token, which no text contains: spell it in another way")
            for i, symbol in enumerate(self.symbols)
            if symbol in SPECIAL
        ]
        if faults:
            raise ConfigError(faults)
        return self


class Bytes(Spec):
    """One token per byte: 256 tokens cover any text."""

    kind: Literal["bytes"] = "bytes"


class LearnedVocabulary(Spec):
    """A vocabulary of at most `size` tokens that is learnt from the data."""

    kind: str
    size: Vocabulary  # size of the vocabulary
    lowercase: Flag = False  # turns text into lower case


class Words(LearnedVocabulary):
    """One token per word, split at whitespace."""

    kind: Literal["words"] = "words"
    size: Vocabulary = 50_000  # most words of the vocabulary; others are unknown


class BPE(LearnedVocabulary):
    """Byte-level byte-pair encoding: no text is unknown."""

    kind: Literal["bpe"] = "bpe"


class Unigram(LearnedVocabulary):
    """The unigram language model of SentencePiece (Kudo 2018)."""

    kind: Literal["unigram"] = "unigram"


class WordPiece(LearnedVocabulary):
    """The WordPiece tokenizer of BERT."""

    kind: Literal["wordpiece"] = "wordpiece"


class TokenizerFile(Spec):
    """A `tokenizer.json`, a folder with one, or GPT-2's `vocab.bpe` and `encoder.json`; relative to `data.root`."""

    kind: Literal["file"] = "file"
    path: str  # the file or folder


class RunTokenizer(Spec):
    """The tokenizer of the run `train.init_from`; without one, that of `train.teacher`."""

    kind: Literal["run"] = "run"


class DataTokenizer(Spec):
    """The tokenizer of the training shards."""

    kind: Literal["data"] = "data"


Tokenizer = Annotated[Characters | Bytes | Words | BPE | Unigram | WordPiece | TokenizerFile, *BY_KIND]
AnyTokenizer = Annotated[
    Characters | Bytes | Words | BPE | Unigram | WordPiece | TokenizerFile | RunTokenizer | DataTokenizer, *BY_KIND
]
