"""The files of a tokenizer: a `tokenizer.json`, or GPT-2's two files. Imports no torch."""

import json
import os
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anyformer import recipe
from anyformer.config.parse import build
from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.sentencepiece_tokenizer import PieceReader
from anyformer.data.tokenizer_trial import try_tokenizer
from anyformer.data.vocabulary import BYTES

# The names of each role: our own, then those of public tokenizers. Where several are there, the first counts.
ROLES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "bos": ("<bos>", "<s>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "[CLS]", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|end_of_text|>", "[SEP]", "<|endoftext|>"),
    "sep": ("<sep>", "[SEP]", "<|sep|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}

FILE = "tokenizer.json"
NAMED, READER, PART, CHAT = (
    "roles",
    "sentencepiece",
    "part",
    "chat_template",
)  # our own keys, which come first
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # GPT-2's two files, under both their names

Reader = PieceReader | recipe.Segmented
Loaded = tuple[Tokenizer, dict[str, str] | None, Reader | None, dict[str, str] | None]


def load_file(path: Path, foreign: bool) -> Loaded:
    """Load a `tokenizer.json`, a folder with one, or a folder with GPT-2's two files."""
    file = path / FILE if os.path.isdir(path) else path  # os.path's, unlike Path's, answers for any name
    if file == path or os.path.exists(file):
        return parse(_read(file), file, foreign)
    for vocab, merges in PAIRS:
        if os.path.exists(path / vocab) and os.path.exists(path / merges):
            return _byte_pairs(path / vocab, path / merges), None, None, None
    known = ", nor ".join(f"{vocab} with {merges}" for vocab, merges in PAIRS)
    more = "vocab.txt and SentencePiece .model files are read with a model, by anyformer import"
    raise wrong(path, f"holds no tokenizer: no {FILE}, nor {known} ({more})")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
    except FileNotFoundError:
        what = "no such file or folder"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    except ValueError as error:  # a name with a zero in it
        what = f"cannot be read: {error}"
    raise wrong(path, what)


def parse(text: str, name: str | Path, foreign: bool = False) -> Loaded:
    """Parse the text of a `tokenizer.json`; a foreign one is tried in a child process first."""
    ours: dict[str, Any] = {}
    try:
        while begin := re.match(rf'\s*{{\s*"({NAMED}|{READER}|{PART}|{CHAT})"\s*:\s*', text):
            ours[begin[1]], end = json.JSONDecoder().raw_decode(text, begin.end())
            text = "{" + text[end:].lstrip().removeprefix(",")
        reader: Reader | None = PieceReader.from_json(ours[READER]) if READER in ours else None
        if PART in ours:
            reader = _part(ours[PART])
        chat = ours.get(CHAT)
        if chat is not None and not (isinstance(chat, dict) and all(isinstance(one, str) for one in chat.values())):
            raise ValueError(f"{CHAT} must be a table of templates")
        if foreign:
            try_tokenizer(text, name)
        return Tokenizer.from_str(text), ours.get(NAMED), reader, chat
    except ConfigError:
        raise
    except BaseException as error:  # the library's own errors have no narrower type
        if not isinstance(error, Exception) and not panicked(error):
            raise
        raise wrong(name, f"is no {FILE}: {first_line(error)}") from None


def _part(stored: Any) -> recipe.Segmented:
    """Return the part whose settings a file stores; its class is one that is known already, never one that it names."""
    kind = str(stored.get("kind") if isinstance(stored, dict) else stored)
    if (cls := recipe.trainable().get(kind)) is None or not issubclass(cls, recipe.Segmented):
        raise ValueError(f"needs the tokenizer {kind!r}: give its file with --import FILE")
    return build(cls, stored)


def _byte_pairs(vocab: Path, merges: Path) -> Tokenizer:
    """Read byte-level BPE (Radford et al. 2019): a vocabulary of byte strings, and the pairs to merge, in order."""
    lines = _read(merges).replace("\r\n", "\n").split("\n")
    pairs = []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#version"):
            left, _, right = line.partition(" ")
            if not left or not right or " " in right:
                raise wrong(merges, f"line {number}: must be two tokens with a space between them")
            pairs.append((left, right))
    text = _read(vocab)
    try:
        ids = dict(json.loads(text))
        if lost := next((pair for pair in pairs if not {*pair, "".join(pair)} <= ids.keys()), None):
            raise wrong(vocab, f"does not belong to {merges.name}: no token for {' + '.join(lost)}")
        inner = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise wrong(vocab, f"is no vocabulary: {first_line(error)}") from None
    if not ids.keys() >= BYTES.keys():
        raise wrong(vocab, "is no byte-level vocabulary: some bytes have no token")
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([name for names in ROLES.values() for name in names if name in ids])
    return inner


def panicked(error: BaseException) -> bool:
    """Return whether this is a panic of the library, which has no exception type that can be imported."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    return visible(str(error)).partition("\n")[0]


def wrong(path: str | Path, message: str) -> ConfigError:
    return ConfigError([Fault(visible(str(path)), message)])
