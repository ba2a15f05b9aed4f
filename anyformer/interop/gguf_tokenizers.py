"""Read the tokenizers of GGUF files: `tokenizer.ggml.*`, or a whole `tokenizer.huggingface.json`.

`tokenizer.ggml.model` is the algorithm: gpt2 (BPE over bytes), llama (SentencePiece's BPE) or bert (word pieces). The
tokens are by id, each with a type, whose numbers are SentencePiece's.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from anyformer.config import ConfigError
from anyformer.config.spec import did_you_mean, visible
from anyformer.data.chat_template import DEFAULT, ChatTemplate
from anyformer.data.sentencepiece import BPE, BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER, PieceReader, new_model
from anyformer.data.tokenizer import TextTokenizer, panicked
from anyformer.data.tokenizer_files import parse, try_tokenizer
from anyformer.interop.config_fields import shown
from anyformer.interop.gguf_file import GgufFile
from anyformer.interop.public_tokenizers import frame, word_pieces
from anyformer.interop.sentencepiece_conversion import library_form
from anyformer.interop.weight_files import wrong

T = TypeVar("T")
BEFORE, CHAT, JSON = "tokenizer.ggml.", "tokenizer.chat_template", "tokenizer.huggingface.json"
IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # spelt so
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message


@dataclass(frozen=True)
class Splitting:
    """How a text is cut into words before BPE: one of llama.cpp's `tokenizer.ggml.pre`."""

    steps: tuple[pre_tokenizers.PreTokenizer, ...]
    begins: bool = False  # with `bos`, where the file does not say
    whole_words: bool = False  # a word that is a token is not merged from its parts


def _split(*patterns: str) -> tuple[pre_tokenizers.PreTokenizer, ...]:
    splits = (pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns)
    return *splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _split(SHORT + r"\p{N}{1,3}" + REST), _split(SHORT + r"\p{N}" + REST)
DIGITS = (pre_tokenizers.Digits(individual_digits=True), GPT2)
SPLITTINGS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "modern-bert"), Splitting((GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), Splitting(DIGITS)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), Splitting(LLAMA3, True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting(LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), Splitting(QWEN2)),
    "default": Splitting(
        (
            *(pre_tokenizers.Split(Regex(r"[\p{P}\$\+<=>\^~\|]+"), "isolated"), GPT2),
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (r"\p{N}+", "[0-9][0-9][0-9]")),
        )
    ),
}


class Entries:
    """The metadata of a tokenizer: values of the right type, or a `ConfigError`."""

    def __init__(self, file: GgufFile):
        self.path, self._data = file.path, file.metadata

    def __call__(self, name: str, default: T) -> T:
        value = self._data.get(BEFORE + name, default)
        if type(value) is not type(default):
            raise self.wrong(name, f"= {shown(value)}: must be of type {type(default).__name__}")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; empty if it is missing."""
        found = self._data.get(BEFORE + name, [])
        if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
            raise self.wrong(name, "must be a list of texts, none of them empty")
        return found

    def numbered(self, name: str, count: int, kind: type[T], default: T) -> list[T]:
        """Return a list with a value for each token."""
        found = self(name, [default] * count)
        if len(found) != count or not all(type(value) is kind for value in found):
            raise self.wrong(name, f"must be {count:,} values of type {kind.__name__}")
        return found

    def id(self, name: str, default: int | None = None) -> int | None:
        """Return the id of a special token, None if there is none."""
        found = self._data.get(BEFORE + name, default)
        count = len(self.texts("tokens"))
        if found is not None and (type(found) is not int or found < 0):
            raise self.wrong(name, f"= {shown(found)}: must be the id of a token")
        return found if found is not None and found < count else None

    def wrong(self, name: str, message: str) -> ConfigError:
        return wrong(self.path, f"{BEFORE}{name} {message}")


USUAL_IDS = {  # where a file has no entry
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "bert": {"bos": 101, "eos": 102, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
}


def ids(file: GgufFile) -> dict[str, Any]:
    """Return the special ids as fields of config.json: bos, pad, and all that end a text."""
    entries = Entries(file)
    usual = USUAL_IDS.get(entries("model", ""), {})
    ends = [entries.id(name, usual.get("eos") if name == ENDS[0] else None) for name in ENDS]
    known = list(dict.fromkeys(id for id in ends if id is not None))
    found = {f"{role}_token_id": entries.id(IDS[role], usual.get(role)) for role in ("bos", "pad")}
    return found | {"eos_token_id": known or None}


def read(file: GgufFile) -> TextTokenizer:
    """Return the tokenizer of a file, with its chat templates."""
    entries = Entries(file)
    kind, tokens = entries("model", ""), entries.texts("tokens")
    if not tokens:
        raise entries.wrong("tokens", "is missing: give another tokenizer with --tokenizer")
    if len(set(tokens)) < len(tokens):
        raise entries.wrong("tokens", "has a token twice")
    usual, chat = USUAL_IDS.get(kind, {}), _chat(file)
    found = {role: entries.id(name, usual.get(role)) for role, name in IDS.items()}
    roles = {role: tokens[id] for role, id in found.items() if id is not None}
    if isinstance(text := file.metadata.get(JSON), str):
        inner, own_roles, reader, own_chat = parse(text, f"{file.path}: {JSON}", foreign=True)
        return _checked(TextTokenizer(inner, own_roles or roles, reader, chat or own_chat), file)
    if kind not in READERS:
        what = f"= {shown(kind)}: {did_you_mean(kind, READERS)}; give another tokenizer with --tokenizer"
        raise entries.wrong("model", what)
    types = entries.numbered("token_type", len(tokens), int, NORMAL)
    try:
        inner, reader = READERS[kind](entries, tokens, types, roles)
    except ConfigError:
        raise
    except BaseException as error:  # the library's own errors have no narrower type
        if not isinstance(error, Exception) and not panicked(error):
            raise
        raise wrong(file.path, f"its tokenizer is damaged: {visible(str(error)).partition(chr(10))[0]}") from None
    return _checked(TextTokenizer(inner, roles, reader, chat), file)


def _chat(file: GgufFile) -> dict[str, str]:
    """Return the chat templates by name."""
    found = {DEFAULT: file.metadata.get(CHAT)}
    found |= {key.removeprefix(f"{CHAT}."): v for key, v in file.metadata.items() if key.startswith(f"{CHAT}.")}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _checked(text: TextTokenizer, file: GgufFile) -> TextTokenizer:
    """Return a tokenizer whose chat templates compile."""
    ChatTemplate.of(text, visible(f"{file.path}: {CHAT}"))
    return text


# -- the three algorithms ---------------------------------------------------------------------------------------------

Built = tuple[Tokenizer, PieceReader | None]


def _byte_pairs(entries: Entries, tokens: list[str], types: list[int], roles: dict[str, str]) -> Built:
    kind, merges = entries("pre", "default"), entries.texts("merges")
    if kind not in SPLITTINGS:
        raise entries.wrong("pre", f"= {shown(kind)}: {did_you_mean(kind, SPLITTINGS)}")
    how = SPLITTINGS[kind]
    pairs = [(pair[:at], pair[at + 1 :]) for pair in merges if (at := pair.find(" ", 1)) > 0]
    if len(pairs) < len(merges):
        raise entries.wrong("merges", "must be pairs of tokens with a space between them")
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab, pairs, ignore_merges=how.whole_words))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence(list(how.steps)), decoders.ByteLevel()
    _add(inner, tokens, types)
    _frame(inner, entries, roles, how.begins)
    try_tokenizer(inner.to_str(), entries.path)
    return inner, None


def _sentencepiece(entries: Entries, tokens: list[str], types: list[int], roles: dict[str, str]) -> Built:
    scores = entries.numbered("scores", len(tokens), float, 0.0)
    model = model_file(list(zip(tokens, scores, types, strict=True)), entries("add_space_prefix", True))
    reader = PieceReader(model, tokens[types.index(UNKNOWN)] if UNKNOWN in types else tokens[0])
    inner = library_form(entries.path, reader, tokens)
    _frame(inner, entries, roles, True)
    return inner, reader


def _word_pieces(entries: Entries, tokens: list[str], types: list[int], roles: dict[str, str]) -> Built:
    """Read words, which begin with ▁, and the pieces that continue them."""

    def spelt(token: str, type: int) -> str:
        if type in (CONTROL, UNKNOWN) or token in roles.values() or (token[:1], token[-1:]) == ("[", "]"):
            return token
        return token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"

    vocab = {spelt(token, type): i for i, (token, type) in enumerate(zip(tokens, types, strict=True))}
    lowercase = entries("normalizer.lowercase", True)
    inner = word_pieces(vocab, roles.get("unk", "[UNK]"), lowercase, entries("normalizer.strip_accents", lowercase))
    before, after = roles.get("bos"), roles.get("sep") or roles.get("eos")
    frame(inner, [before] if before else [], [after] if after else [])
    return inner, None


READERS = {"gpt2": _byte_pairs, "llama": _sentencepiece, "bert": _word_pieces}


def _add(inner: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add control tokens as special ones, and tokens of the publisher as parts of texts."""
    inner.add_special_tokens([token for token, type in zip(tokens, types, strict=True) if type in (CONTROL, UNKNOWN)])
    user = (token for token, type in zip(tokens, types, strict=True) if type == USER)
    inner.add_tokens([AddedToken(token, normalized=False) for token in user])


def _frame(inner: Tokenizer, entries: Entries, roles: dict[str, str], begins: bool) -> None:
    """Put the tokens around a text that the file requires."""
    sides = (("bos", entries("add_bos_token", begins)), ("eos", entries("add_eos_token", False)))
    before, after = ([roles[role]] if wanted and role in roles else [] for role, wanted in sides)
    frame(inner, before, after)


def model_file(pieces: list[tuple[str, float, int]], dummy_prefix: bool) -> bytes:
    """Return a .model file of BPE with these pieces."""
    model = new_model()
    for text, score, type in pieces:
        model.pieces.add(piece=text, score=score, type=type)
    model.trainer_spec.model_type = BPE
    model.trainer_spec.byte_fallback = any(type == BYTE for *_, type in pieces)
    model.normalizer_spec.add_dummy_prefix = dummy_prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    data: bytes = model.SerializeToString()
    return data
