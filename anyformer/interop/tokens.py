"""The tokenizers of public folders, under all the names that their files have had."""

import warnings
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from anyformer.config import ModelConfig
from anyformer.config.spec import visible
from anyformer.data.tokenizer import FILE, ROLES, TextTokenizer
from anyformer.interop import sentencepiece
from anyformer.interop.family import Text
from anyformer.interop.files import read_json, write_json, wrong
from anyformer.recipe import Encoder, LanguageModel, MaskedLanguageModel
from anyformer.run import Run

SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
WORDPIECE = "vocab.txt"
# What a role is called in their settings; BERT says where a text begins and ends by two names of its own.
NAMES = {
    "pad": ("pad_token",),
    "bos": ("bos_token", "cls_token"),
    "eos": ("eos_token", "sep_token"),
    "sep": ("sep_token",),
    "unk": ("unk_token",),
    "mask": ("mask_token",),
}
LEAST = 0.9  # of a table's rows that have a token: a few more make its size a round number


def read(path: Path, how: Text, config: dict[str, Any]) -> TextTokenizer:
    """The tokenizer of a folder, or one that a single file of these is."""
    folder = path if path.is_dir() else path.parent
    settings: dict[str, Any] = {}
    for name in (SPECIAL, SETTINGS):  # the second is right where both speak
        if (folder / name).is_file():
            settings |= read_json(folder / name)
    inner = _inner(path, folder, how, settings)
    roles = _roles(inner, settings, config, folder)
    if inner.post_processor is None:
        ends = [[roles[role] for role in side if role in roles] for side in (how.before, how.after)]
        _frame(inner, *ends)
    return TextTokenizer(inner, roles)


def nothing() -> TextTokenizer:
    """Of a model that reads no text."""
    return TextTokenizer(Tokenizer(models.BPE()))


def _inner(path: Path, folder: Path, how: Text, settings: dict[str, Any]) -> Tokenizer:
    """Newer files before older ones."""
    if path.suffix == ".json" or (folder / FILE).is_file():
        return TextTokenizer.load(path if path.is_file() else folder / FILE).inner
    pieces = [path] if path.suffix == ".model" else sorted(folder.glob("*.model"))
    if len(pieces) == 1:
        extra = tuple(f"<extra_id_{i}>" for i in reversed(range(settings.get("extra_ids", how.extra_ids))))
        inner = sentencepiece.read(pieces[0], extra)
    elif (folder / WORDPIECE).is_file():
        inner = _wordpiece(folder / WORDPIECE, settings)
    else:
        inner = TextTokenizer.load(folder).inner
    if (folder / ADDED).is_file():
        for token, i in sorted(read_json(folder / ADDED).items(), key=lambda item: item[1]):
            if inner.token_to_id(token) is None:
                inner.add_tokens([AddedToken(token, normalized=False, special=True)])
            if inner.token_to_id(token) != i:
                raise wrong(folder / ADDED, f"{visible(token)} = {i}: the next id is {inner.token_to_id(token)}")
    return inner


def _wordpiece(path: Path, settings: dict[str, Any]) -> Tokenizer:
    """BERT's: a token a line, `##` before those that go on a word."""
    try:
        lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(path, f"cannot be read: {error}") from None
    vocab = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    unknown = _content(settings.get("unk_token")) or "[UNK]"
    if len(vocab) != len(lines) or unknown not in vocab:
        raise wrong(
            path,
            "is no vocabulary of word pieces: "
            + (f"it has no {unknown}" if unknown not in vocab else "a token is there twice"),
        )
    inner = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    inner.add_special_tokens([name for names in ROLES.values() for name in names if name in vocab])
    return inner


def _roles(inner: Tokenizer, settings: dict[str, Any], config: dict[str, Any], folder: Path) -> dict[str, str]:
    """The token of each role, as settings say; where they are silent, by the ids of config.json or the usual names."""
    usual = TextTokenizer(inner)
    found: dict[str, str] = {}
    for role, names in NAMES.items():
        id = config.get(f"{role}_token_id")
        id = id[0] if isinstance(id, list) and id else id
        named = next((token for name in names if (token := _content(settings.get(name)))), None)
        if named is not None and inner.token_to_id(named) is None:
            warnings.warn(f"{folder / SETTINGS}: {names[0]} = {named!r}: the tokenizer has no such token", stacklevel=4)
        elif named is not None:
            found[role] = named
        elif names[0] in settings:  # as null
            continue
        elif (token := inner.id_to_token(id) if type(id) is int and id >= 0 else None) is not None:
            found[role] = token
        elif (guess := getattr(usual, role)) is not None:
            found[role] = str(inner.id_to_token(guess))
    return found


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _frame(inner: Tokenizer, before: list[str], after: list[str]) -> None:
    """Has the library put special tokens around a text."""
    if before or after:
        known = [(token, inner.token_to_id(token)) for token in dict.fromkeys((*before, *after))]
        inner.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=known)


def check_size(found: TextTokenizer, config: ModelConfig, path: Path) -> None:
    """Every token that a text can become has a row in the table, and nearly every row a token."""
    rows = config.vocab
    declared = {i for i, token in found.inner.get_added_tokens_decoder().items() if token.special}
    beyond = [i for i in found.inner.get_vocab().values() if i >= rows and i not in declared]
    roles = [
        i for i in (found.pad, found.bos, found.eos, found.sep, found.unk, found.mask) if i is not None and i >= rows
    ]
    if beyond or roles or found.size < LEAST * rows:
        raise wrong(path, f"its tokenizer has {found.size:,} tokens, and the model's table {rows:,} rows")
    if found.size < rows:
        warnings.warn(f"{path}: {rows - found.size:,} of {rows:,} rows of the table have no token", stacklevel=3)


# -- writing ----------------------------------------------------------------------------------------------------------


def write(folder: Path, run: Run) -> None:
    """A tokenizer.json that reads texts as the run does, and the names of its special tokens."""
    inner = Tokenizer.from_str(run.tokenizer.inner.to_str())
    roles = {role: str(inner.id_to_token(i)) for role in NAMES if (i := getattr(run.tokenizer, role)) is not None}
    if inner.post_processor is None and not (isinstance(run.spec, LanguageModel) or run.config.encoder is None):
        framed = isinstance(run.spec, Encoder | MaskedLanguageModel)
        before = [roles["bos"]] if framed and "bos" in roles else []
        _frame(inner, before, [roles["eos"]] if "eos" in roles else [])
    inner.save(str(folder / FILE))
    special = {NAMES[role][0]: token for role, token in roles.items()}
    length = min((limit for stack in run.config.stacks.values() if (limit := stack.limit) is not None), default=None)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    write_json(folder / SETTINGS, settings if length is None else settings | {"model_max_length": length})
    write_json(folder / SPECIAL, special)
