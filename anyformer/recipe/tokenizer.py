"""Tokenizers: trained on the data, read from a file, or taken from a run or from shards. Imports no torch.

A tokenizer is one class: its fields, and the methods of its family. To add one, derive a class from `Segmented` and
give it a `kind`: here, or in a file of your own (docs/extending.md).
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, Spec
from anyformer.config.outside import find
from anyformer.config.part import BY_KIND_OF_FAMILY, Part, kind_of
from anyformer.config.spec import Flag, faults_under
from anyformer.recipe.source import Root

if TYPE_CHECKING:
    import tokenizers

    from anyformer.data.tokenizer import TextTokenizer

Vocabulary = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]  # `tokenizers` allocates memory for all of them


SPECIAL = ("<pad>", "<bos>", "<eos>", "<sep>", "<unk>", "<mask>")  # ids 0 to 5 of every trained tokenizer


class Tokenizer(Part):
    """How texts become ids."""

    is_ready: ClassVar[bool] = False  # needs no training

    @abstractmethod
    def make(self, texts: Iterable[str], data: Root | None) -> "TextTokenizer":
        """Return the tokenizer, trained on texts, which are read once; paths are relative to the root of the data."""

    def ids(self) -> int | None:
        """Return the number of ids; None if it follows from the texts."""
        return None


class Trained(Tokenizer):
    """A tokenizer that is trained on the data."""

    @abstractmethod
    def learn(self, texts: Iterable[str]) -> "tokenizers.Tokenizer":
        """Return a tokenizer of the library, learnt from texts; special tokens are added to it."""

    def make(self, texts: Iterable[str], data: Root | None) -> "TextTokenizer":
        from anyformer.data.tokenizer import TextTokenizer
        from anyformer.data.vocabulary import some_texts, with_special

        return TextTokenizer(with_special(self.learn(some_texts(texts))))


class Characters(Trained):
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

    def learn(self, texts: Iterable[str]) -> "tokenizers.Tokenizer":
        from anyformer.data.vocabulary import characters

        return characters(self, texts)


class Bytes(Tokenizer):
    """One token per byte: 256 tokens cover any text."""

    kind: Literal["bytes"] = "bytes"

    def make(self, texts: Iterable[str], data: Root | None) -> "TextTokenizer":
        from anyformer.data.tokenizer import TextTokenizer
        from anyformer.data.vocabulary import all_bytes, checked, with_special

        for text in texts:  # nothing to train; they are only checked
            checked(text)
        return TextTokenizer(with_special(all_bytes()))

    def ids(self) -> int:
        return 256 + len(SPECIAL)


class LearnedVocabulary(Trained):
    """A vocabulary of at most `size` tokens that is learnt from the data."""

    size: Vocabulary  # size of the vocabulary
    lowercase: Flag = False  # turns text into lower case

    def ids(self) -> int | None:
        return self.size


class Words(LearnedVocabulary):
    """One token per word, split at whitespace."""

    kind: Literal["words"] = "words"
    size: Vocabulary = 50_000  # most words of the vocabulary; others are unknown

    def ids(self) -> None:  # `size` is only a limit
        return None

    def learn(self, texts: Iterable[str]) -> "tokenizers.Tokenizer":
        from anyformer.data.vocabulary import words

        return words(self, texts)


class BPE(LearnedVocabulary):
    """Byte-level byte-pair encoding: no text is unknown."""

    kind: Literal["bpe"] = "bpe"

    def learn(self, texts: Iterable[str]) -> "tokenizers.Tokenizer":
        from anyformer.data.vocabulary import byte_pairs

        return byte_pairs(self, texts)


class Unigram(LearnedVocabulary):
    """The unigram language model of SentencePiece (Kudo 2018)."""

    kind: Literal["unigram"] = "unigram"

    def learn(self, texts: Iterable[str]) -> "tokenizers.Tokenizer":
        from anyformer.data.vocabulary import unigrams

        return unigrams(self, texts)


class WordPiece(LearnedVocabulary):
    """The WordPiece tokenizer of BERT."""

    kind: Literal["wordpiece"] = "wordpiece"

    def learn(self, texts: Iterable[str]) -> "tokenizers.Tokenizer":
        from anyformer.data.vocabulary import word_pieces

        return word_pieces(self, texts)


class Segmented(LearnedVocabulary):
    """Base of tokenizers whose code cuts texts into tokens; the most frequent ones, at most `size`, have ids.

    Texts of a run with such a tokenizer can only be read where its class is known.
    """

    @abstractmethod
    def segment(self, text: str) -> list[str]:
        """Return the tokens of a text; joined, they are the text that is decoded."""

    def learn(self, texts: Iterable[str]) -> "tokenizers.Tokenizer":
        from anyformer.data.vocabulary import segments

        return segments(self, texts)

    def make(self, texts: Iterable[str], data: Root | None) -> "TextTokenizer":
        return super().make(texts, data).with_reader(self)

    def ids(self) -> None:
        return None


class TokenizerFile(Tokenizer):
    """A `tokenizer.json`, a folder with one, or GPT-2's `vocab.bpe` and `encoder.json`; relative to `data.root`."""

    kind: Literal["file"] = "file"
    path: str  # the file or folder
    is_ready = True

    def make(self, texts: Iterable[str], data: Root | None) -> "TextTokenizer":
        from anyformer.data.files import locate
        from anyformer.data.tokenizer import TextTokenizer

        if data is None:
            return TextTokenizer.load(self.path, foreign=True)
        with faults_under("path"):
            path = locate(self.path, data)
        try:
            return TextTokenizer.load(path, foreign=True)
        except ConfigError as error:
            raise ConfigError(Fault("path", f"= {self.path!r}: {fault}") for fault in error.faults) from None

    def ids(self) -> int:
        return self.make((), None).size


class RunTokenizer(Spec):
    """The tokenizer of the run `train.init_from`; without one, that of `train.teacher`."""

    kind: Literal["run"] = "run"
    is_ready: ClassVar[bool] = True


class DataTokenizer(Spec):
    """The tokenizer of the training shards."""

    kind: Literal["data"] = "data"
    is_ready: ClassVar[bool] = True


def trainable() -> dict[str, type[Tokenizer]]:
    """Return the tokenizers that are made from texts, by their kind."""
    find()
    return {kind_of(part): part for part in Tokenizer.choices() if issubclass(part, Tokenizer) and not part.is_ready}


AnyTokenizer = Annotated[Tokenizer | RunTokenizer | DataTokenizer, BY_KIND_OF_FAMILY]
