"""The grammar of tokenizers: what a token is, and where its vocabulary comes from. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import Spec
from anyformer.config.spec import BY_KIND, Flag

Vocabulary = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]  # the library reserves memory for all of them


class Characters(Spec):
    """One token per character."""

    kind: Literal["chars"] = "chars"
    lowercase: Flag = False
    decompose: Flag = False  # a syllable of Hangul is its letters, é an e and an accent; `decode` leaves it so


class Bytes(Spec):
    """256 tokens, and any text at all."""

    kind: Literal["bytes"] = "bytes"


class Words(Spec):
    """What stands between spaces."""

    kind: Literal["words"] = "words"
    size: Vocabulary = 50_000
    lowercase: Flag = False


class BPE(Spec):
    """Byte-pair encoding over bytes: nothing is unknown."""

    kind: Literal["bpe"] = "bpe"
    size: Vocabulary
    lowercase: Flag = False


class Unigram(Spec):
    """SentencePiece's unigram model."""

    kind: Literal["unigram"] = "unigram"
    size: Vocabulary
    lowercase: Flag = False


class WordPiece(Spec):
    """BERT's."""

    kind: Literal["wordpiece"] = "wordpiece"
    size: Vocabulary
    lowercase: Flag = False


class TokenizerFile(Spec):
    """A `tokenizer.json`, or a folder that holds one, or GPT-2's `vocab.bpe` and `encoder.json`; under `data.root`."""

    kind: Literal["file"] = "file"
    path: str


class RunTokenizer(Spec):
    """That of the run which `train.init_from` names."""

    kind: Literal["run"] = "run"


class DataTokenizer(Spec):
    """That of the shards which are trained on."""

    kind: Literal["data"] = "data"


Tokenizer = Annotated[Characters | Bytes | Words | BPE | Unigram | WordPiece | TokenizerFile, *BY_KIND]
AnyTokenizer = Annotated[
    Characters | Bytes | Words | BPE | Unigram | WordPiece | TokenizerFile | RunTokenizer | DataTokenizer, *BY_KIND
]
