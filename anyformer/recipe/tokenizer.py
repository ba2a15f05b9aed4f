"""Tokenizers: trained on the data, read from a file, or taken from a run or from shards. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import Spec
from anyformer.config.spec import BY_KIND, Flag

Vocabulary = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]  # `tokenizers` allocates memory for all of them


class Characters(Spec):
    """One token per character."""

    kind: Literal["chars"] = "chars"
    lowercase: Flag = False  # turns text into lower case
    decompose: Flag = False  # NFD: Hangul syllables become letters, é becomes e + accent; `decode` does not undo it


class Bytes(Spec):
    """One token per byte: 256 tokens cover any text."""

    kind: Literal["bytes"] = "bytes"


class Words(Spec):
    """One token per word, split at whitespace."""

    kind: Literal["words"] = "words"
    size: Vocabulary = 50_000  # most words of the vocabulary; others are unknown
    lowercase: Flag = False  # turns text into lower case


class BPE(Spec):
    """Byte-level byte-pair encoding: no text is unknown."""

    kind: Literal["bpe"] = "bpe"
    size: Vocabulary  # size of the vocabulary
    lowercase: Flag = False  # turns text into lower case


class Unigram(Spec):
    """The unigram language model of SentencePiece (Kudo 2018)."""

    kind: Literal["unigram"] = "unigram"
    size: Vocabulary  # size of the vocabulary
    lowercase: Flag = False  # turns text into lower case


class WordPiece(Spec):
    """The WordPiece tokenizer of BERT."""

    kind: Literal["wordpiece"] = "wordpiece"
    size: Vocabulary  # size of the vocabulary
    lowercase: Flag = False  # turns text into lower case


class TokenizerFile(Spec):
    """A `tokenizer.json`, a folder with one, or GPT-2's `vocab.bpe` and `encoder.json`; relative to `data.root`."""

    kind: Literal["file"] = "file"
    path: str  # the file or folder


class RunTokenizer(Spec):
    """The tokenizer of the run `train.init_from`."""

    kind: Literal["run"] = "run"


class DataTokenizer(Spec):
    """The tokenizer of the training shards."""

    kind: Literal["data"] = "data"


Tokenizer = Annotated[Characters | Bytes | Words | BPE | Unigram | WordPiece | TokenizerFile, *BY_KIND]
AnyTokenizer = Annotated[
    Characters | Bytes | Words | BPE | Unigram | WordPiece | TokenizerFile | RunTokenizer | DataTokenizer, *BY_KIND
]
