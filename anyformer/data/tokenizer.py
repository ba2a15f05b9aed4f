"""Text to ids and back, on the `tokenizers` library. Imports no torch.

    decode(encode(text)) == text    for bytes, bpe and unigram; for chars, where all characters were seen in training

up to case where `lowercase` is set. Words and wordpiece keep one space between words; these two and chars have an
unknown token. Nothing is ever pickled: a tokenizer is one `tokenizer.json`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tokenizers import AddedToken, Tokenizer, models

from anyformer import recipe
from anyformer.config.io import write_file
from anyformer.config.parse import to_data
from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.sentencepiece import PieceReader
from anyformer.data.tokenizer_files import (
    CHAT as CHAT,
    FILE as FILE,
    NAMED,
    PAIRS as PAIRS,
    PART,
    READER,
    ROLES as ROLES,
    Reader,
    first_line,
    load_file,
    panicked as panicked,
    parse,
    wrong,
)
from anyformer.data.vocabulary import BYTES, checked
from anyformer.recipe.source import Root

if TYPE_CHECKING:
    from anyformer.data.media import MediaStore

SENTINEL = "<extra_id_{}>"


class TextTokenizer:
    """A vocabulary of `size` ids; `pad`, `bos`, `eos`, `sep`, `unk` and `mask` are special ones, None if missing.

    Text never becomes a special id: `"<pad>"` in a text is five characters like any others. `roles` names the token of
    each role; a role that it does not name is missing. Without it the usual names are searched. A `reader` segments
    texts in the place of the library's own model: a SentencePiece model, or a part with its own code. `chat` are
    the chat templates by name (see `data/chat_template.py`). With `media`, references to images and sounds in texts
    become negative ids (see `data/media.py`).
    """

    media: "MediaStore | None" = None

    def __init__(
        self,
        inner: Tokenizer,
        roles: Mapping[str, str] | None = None,
        reader: Reader | None = None,
        chat: Mapping[str, str] | None = None,
    ):
        inner.no_padding()  # some public files switch these on
        inner.no_truncation()
        inner.encode_special_tokens = True  # that is, as plain text
        _forget_texts(inner)
        self._inner, self._roles, self._reader = inner, None if roles is None else dict(roles), reader
        self.chat = dict(chat) if chat else None
        self._vocab = vocab = inner.get_vocab()
        self.size = max(vocab.values(), default=-1) + 1
        declared = {token.content: i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        named = declared or {name: vocab[name] for names in ROLES.values() for name in names if name in vocab}
        if roles is not None:
            if lost := [token for token in roles.values() if token not in vocab]:
                raise ConfigError([Fault("roles", f"the tokenizer has no {visible(lost[0])}")])
            named |= {token: vocab[token] for token in roles.values()}
        usual = ROLES if roles is None else {role: (roles[role],) if role in roles else () for role in ROLES}
        self.pad, self.bos, self.eos, self.sep, self.unk, self.mask = (
            next((named[name] for name in names if name in named), None) for names in usual.values()
        )
        names = takewhile(named.__contains__, map(SENTINEL.format, count()))
        self.sentinels = tuple(named[name] for name in names)  # T5's sentinels, which replace spans of a text
        self._special = frozenset(named.values())
        self._control = self._special - {self.unk}
        self._hidden = self._control - {*self.sentinels}
        self._byte_level = "ByteLevel" in repr(inner.decoder)
        self._byte_fallback = "ByteFallback" in repr(inner.decoder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(size={self.size})"

    def __reduce__(self) -> tuple[Any, ...]:  # a copy, or one for a worker process, comes by way of the JSON
        return type(self).from_json, (self.to_json(),)

    @classmethod
    def load(cls, path: str | Path, *, foreign: bool = False) -> Self:
        """Load a `tokenizer.json`, a folder that holds one, or a folder that holds GPT-2's two files.

        A `foreign` file, from another program, is tried in a child process first.
        """
        return cls(*load_file(Path(path), foreign))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return a tokenizer from the output of `to_json`."""
        return cls(*parse(text, "the tokenizer"))

    def to_json(self) -> str:
        """Return the text of a `tokenizer.json`; our own keys come before those of the library."""
        text = self._inner.to_str(pretty=True) + "\n"
        reader, part = self.reader and self.reader.to_json(), self.part and to_data(self.part)
        ours = {NAMED: self._roles, READER: reader, PART: part, CHAT: self.chat}
        added = (
            f'\n  "{key}": {json.dumps(value, ensure_ascii=False)},' for key, value in ours.items() if value is not None
        )
        return "{" + "".join(added) + text.removeprefix("{")

    def with_sentinels(self, least: int) -> Self:
        """Return the tokenizer with at least `count` sentinels; new ones have new ids."""
        return self.with_special([SENTINEL.format(i) for i in range(len(self.sentinels), least)])

    def with_special(self, names: Sequence[str]) -> Self:
        """The same with some more special tokens; those that are new have new ids."""
        inner = Tokenizer.from_str(self._inner.to_str())
        inner.add_special_tokens(list(names))
        return type(self)(inner, self._roles, self._reader, self.chat)

    def with_reader(self, reader: Reader) -> Self:
        """Return the same vocabulary with another reader of texts."""
        return type(self)(self._inner, self._roles, reader, self.chat)

    def with_chat(self, chat: Mapping[str, str] | None) -> Self:
        """Return the same with other chat templates."""
        return type(self)(self._inner, self._roles, self._reader, chat)

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return a tokenizer in which tokens have second names: in a text these are read as tokens, the first are not.

        A second name has a new id.
        """
        data = json.loads(self._inner.to_str())
        flags: dict[str, dict[str, bool]] = {}
        for token in data["added_tokens"]:
            if token["content"] in names:
                token["special"] = True
                known = ("lstrip", "rstrip", "single_word", "normalized")
                flags[token["content"]] = {key: token[key] for key in known}
        inner = Tokenizer.from_str(json.dumps(data))
        plain = {"normalized": False, "special": False}
        inner.add_tokens([AddedToken(other, **(plain | flags.get(name, {}))) for name, other in names.items()])
        reader = self.reader and replace(self.reader, added=(*self.reader.added, *names.values()))
        return type(self)(inner, self._roles, reader)

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token by its name."""
        found = self._inner.token_to_id(name)
        return found if found in self._special else None

    @property
    def special(self) -> frozenset[int]:
        """Ids that are never part of an encoded text, and the id of unknown text."""
        return self._special

    @cached_property
    def spaced(self) -> bool:
        """True if tokens include the space before a word."""
        return any(len(found) > 1 and found[:1] == b" " for found in map(self._bytes_of, range(self.size)))

    @property
    def inner(self) -> Tokenizer:
        """The tokenizer of the library."""
        return self._inner

    @property
    def reader(self) -> PieceReader | None:
        """The SentencePiece model that segments texts, if there is one."""
        return self._reader if isinstance(self._reader, PieceReader) else None

    @property
    def part(self) -> recipe.Segmented | None:
        """The part that segments texts by its own code, if there is one."""
        return None if isinstance(self._reader, PieceReader) else self._reader

    def save(self, path: str | Path) -> None:
        """Write a .json file, or `tokenizer.json` in a folder, atomically."""
        path = file_of(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, self.to_json().encode())
        except OSError as error:
            raise wrong(path, f"cannot be written: {error.strerror}") from None

    # -- text to ids --------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added."""
        with _told():
            return self._plain(self._ids(checked(text)))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all cores."""
        if isinstance(texts, str):
            raise ConfigError([Fault("", "encode_batch takes a list of texts; for one text there is encode")])
        return self._encode_texts(texts) if self.media is None else self.media.encode(texts, self._encode_texts)

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        with _told():
            if self._reader is not None:
                return [self._plain(self._ids(checked(text))) for text in texts]
            found = self._inner.encode_batch_fast([checked(text) for text in texts], add_special_tokens=False)
            return [self._plain(encoding.ids) for encoding in found]

    def _ids(self, text: str) -> list[int]:
        if self.part is not None:
            unknown = self._vocab["<unk>"]
            return [self._vocab.get(token, unknown) for token in self.part.segment(text)]
        if self.reader is not None:
            return self.reader.encode(text, self._vocab)
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_offsets(self, text: str) -> list[tuple[int, int, int]]:
        """Return the ids of a text, each with its first character and the one after its last.

        A tokenizer of SentencePiece that has no `tokenizer.json` has no offsets, and is refused.
        """
        if self._reader is not None:
            why = "a SentencePiece model needs a tokenizer.json" if self.reader else "its code gives tokens alone"
            raise ConfigError([Fault("tokenizer", f"has no offsets: {why}")])
        with _told():
            found = self._inner.encode(checked(text), add_special_tokens=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [(spelt, start, end) for id, (start, end) in pairs for spelt in self._plain([id])]

    def encode_words(self, sentences: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        """Return the ids of each word of sentences, as in a text with a space before every word but the first."""
        space = "" if self.encode("a a") == 2 * self.encode("a") else " "  # what words have before them is theirs
        written = [[space * (i > 0) + word for i, word in enumerate(words)] for words in sentences]
        known = list(dict.fromkeys(word for words in written for word in words))
        ids = dict(zip(known, self.encode_batch(known), strict=True))
        return [[ids[word] for word in words] for words in written]

    def _plain(self, ids: list[int]) -> list[int]:
        """The ids, with special ones spelt out: some public models hold `</s>` among their words."""
        if self._control.isdisjoint(ids):
            return ids
        return [spelt for i in ids for spelt in (self._spell(i) if i in self._control else [i])]

    def _spell(self, i: int) -> list[int]:
        return [token.id for c in self._inner.id_to_token(i) or "" for token in self._inner.model.tokenize(c)]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Special tokens that a public file puts before and after a text, such as [CLS] and [SEP]."""
        if self._inner.post_processor is None:
            return [], []
        with _told():
            found = self._inner.encode("a", add_special_tokens=True)
        added = found.special_tokens_mask
        plain = added.index(0) if 0 in added else len(added)
        behind = len(added) - added[::-1].index(0) if 0 in added else len(added)
        return found.ids[:plain], found.ids[behind:]

    @cached_property
    def around_pair(self) -> tuple[list[int], list[int], list[int], int]:
        """Special tokens before, between and after two texts, and the token type of the second."""
        if self._inner.post_processor is None:
            return [], [], [], 0
        with _told():
            found = self._inner.encode("a", "b", add_special_tokens=True)
        of = found.sequence_ids
        if 0 not in of or 1 not in of:
            return [], [], [], 0
        first, second = of.index(0), of.index(1)
        ends = len(of) - of[::-1].index(0), len(of) - of[::-1].index(1)
        return found.ids[:first], found.ids[ends[0] : second], found.ids[ends[1] :], found.type_ids[second]

    # -- ids to text --------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Ids that no token has are left out, and so are special ones, save the unknown and sentinels:
        a user sees the <unk> that a model says, and a score counts it as a wrong word.

        Bytes that make no whole character, as where a model stops inside one, become U+FFFD; whole characters beside
        them stay as they are.
        """
        kept = [i for i in map(int, ids) if 0 <= i < self.size and i not in self._hidden]
        text = self._inner.decode(kept, skip_special_tokens=False)
        if self._byte_fallback and "\ufffd" in text:  # the library gives up a whole run of bytes for one that is wrong
            text = self._inner.decoder.decode(_mend(self._inner.id_to_token(i) or "" for i in kept))
        return text

    def decode_batch(self, rows: Iterable[Iterable[int]]) -> list[str]:
        """The text of each row of ids."""
        return [self.decode(ids) for ids in rows]

    def token(self, i: int) -> str:
        """One token, to be looked at: spaces as ▁, what has no shape as \\n or \\u200d, half a character as <0xE2>."""
        token = self._inner.id_to_token(i) if 0 <= i < self.size else None
        if token is None or i in self._special:
            return f"<{i}>" if token is None else token
        if self._byte_level and BYTES.keys() >= set(token):
            token = bytes(BYTES[c] for c in token).decode("utf-8", "surrogateescape")
        return "".join(map(_shape, token))

    # -- ids to bytes -------------------------------------------------------------------------------------------------

    def vocabulary_bytes(self) -> list[bytes]:
        """Return the bytes that each id adds to a text, for constrained decoding; b"" for special and unused ids.

            b"".join(table[i] for i in encode(text)) == (lead + decode(encode(text))).encode()

        for a text of at least one token, all of them known. A token may be a part of a character. Tokens at the
        beginning of a word include the space before it.
        """
        return [self._bytes_of(i) for i in range(self.size)]

    @property
    def lead(self) -> str:
        """Return the prefix of a text's bytes: the space that `decode` removes from the first token, or nothing."""
        plain = (self._inner.id_to_token(i) for i in range(self.size) if self._bytes_of(i).startswith(b" "))
        shown = (self._joined([token]) for token in plain if token)
        return "" if next(shown, " ").startswith(" ") else " "

    def _bytes_of(self, i: int) -> bytes:
        token = self._inner.id_to_token(i)
        if token is None or i in self._special:
            return b""
        if self._byte_level:
            return bytes(BYTES[c] for c in token) if BYTES.keys() >= set(token) else token.encode()
        if self._byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        # Decoded between two other tokens, to which the surrounding text belongs.
        behind = self._joined(["x", "x"])[1:]
        return self._joined(["x", token, "x"])[1:].removesuffix(behind).encode()

    def _joined(self, tokens: list[str]) -> str:
        return self._inner.decoder.decode(tokens) if self._inner.decoder else " ".join(tokens)


def train_tokenizer(spec: recipe.Tokenizer, texts: Iterable[str], data: Root | None = None) -> TextTokenizer:
    """Return the tokenizer of a spec: trained on texts, read once, or loaded from a file under `data.root`."""
    return spec.make(texts, data)


def file_of(path: str | Path) -> Path:
    """Where a tokenizer saved as `path` lies."""
    path = Path(path)
    return path if path.suffix.lower() == ".json" else path / FILE


def _mend(tokens: Iterable[str]) -> list[str]:
    """Tokens, with each run of byte tokens as the text that it is."""
    found: list[str] = []
    run = bytearray()
    for token in (*tokens, ""):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            run.append(int(token[3:5], 16))
        else:
            found += [run.decode("utf-8", "replace"), token]
            run.clear()
    return found


def _shape(c: str) -> str:
    if "\udc80" <= c <= "\udcff":
        return f"<0x{ord(c) - 0xDC00:02X}>"
    return "▁" if c == " " else c if c.isprintable() else c.encode("unicode_escape").decode()


@contextmanager
def _told() -> Iterator[None]:
    """Raise errors and panics of the library, such as a missing unknown token, as `ConfigError`."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not panicked(error):
            raise
        instead = "leave out characters that are not in its vocabulary; the tokenizer `bytes` reads every text"
        raise ConfigError([Fault("", f"the tokenizer cannot read this text: {first_line(error)}; {instead}")]) from None


def _forget_texts(inner: Tokenizer) -> None:
    """Switch off the library's cache of 10,000 words where a word is a whole text: it would keep 1 kB of each text."""
    model, splitter = inner.model, inner.pre_tokenizer
    whole = splitter is None or len(splitter.pre_tokenize_str("a b, c")) == 1
    if whole and isinstance(model, models.BPE | models.Unigram):
        model._resize_cache(0)
        model._clear_cache()
