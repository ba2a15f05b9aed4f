"""Tokenizers of public folders, from every set of files that they have had."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.spec import visible
from anyformer.data.chat_template import DEFAULT, ChatTemplate
from anyformer.data.sentencepiece import Coded
from anyformer.data.tokenizer import CHAT, FILE, PAIRS, ROLES, TextTokenizer
from anyformer.interop import slow_tokenizers
from anyformer.interop.family import Framing
from anyformer.interop.tokenizer_settings import SETTINGS, SPECIAL, Settings
from anyformer.interop.weight_files import write_json, wrong
from anyformer.recipe import Encoder, LanguageModel, MaskedLanguageModel
from anyformer.runs.run import Run, must_be_file

WORDPIECE = "vocab.txt"
JINJA, JINJA_MORE = "chat_template.jinja", "chat_templates"  # a file, and a folder of files with other names
# The keys of a role in their settings. BERT names the tokens before and after a text differently.
NAMES = {
    "pad": ("pad_token",),
    "bos": ("bos_token", "cls_token"),
    "eos": ("eos_token", "sep_token"),
    "sep": ("sep_token",),
    "unk": ("unk_token",),
    "mask": ("mask_token",),
}
MAX_UNREACHABLE = 0.1  # largest share of tokens that no text has, without a warning
MIN_USED = 0.9  # least share of a table's rows that must have a token; a few more make its size a round number


def read(path: Path, how: Framing, config: dict[str, Any]) -> TextTokenizer:
    """Read the tokenizer of a folder, or of a single file; of two, the one for the target."""
    folder = path if path.is_dir() else path.parent
    settings, reader = Settings(folder), None
    chat: dict[str, str] | None = read_chat(folder, settings)
    if _is_json(path):
        loaded = TextTokenizer.load(path if path.is_file() else folder / FILE, foreign=True)
        inner, reader, chat = loaded.inner, loaded.reader, chat or loaded.chat
    elif found := slow_tokenizers.find(path, config):
        return _checked(_slow(path, *found, config).with_chat(chat), folder)
    else:
        inner = _older(path, folder, settings)
    roles = _roles(inner, settings, config, folder)
    if inner.post_processor is None:
        frame(inner, *([roles[role] for role in side if role in roles] for side in (how.before, how.after)))
    return _checked(TextTokenizer(inner, roles, reader, chat), folder)


def _checked(text: TextTokenizer, folder: Path) -> TextTokenizer:
    """Return a tokenizer whose chat templates compile; else raise a `ConfigError` that names their file."""
    ChatTemplate.of(text, visible(str(folder / JINJA if (folder / JINJA).exists() else folder / SETTINGS)))
    return text


def read_chat(folder: Path, settings: Settings) -> dict[str, str]:
    """Read the chat templates of a folder by name: .jinja files, or those in tokenizer_config.json."""
    files = {DEFAULT: folder / JINJA} | {path.stem: path for path in sorted((folder / JINJA_MORE).glob("*.jinja"))}
    try:
        found = {name: must_be_file(path).read_bytes().decode() for name, path in files.items() if path.exists()}
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(folder / JINJA, f"cannot be read: {error}") from None
    if found or CHAT not in settings:
        return found
    if settings.holds(CHAT, str):
        return {DEFAULT: settings(CHAT, str, "")}
    for one in settings(CHAT, list, []):
        match one:
            case {"name": str(name), "template": str(text)}:
                found[name] = text
            case _:
                raise settings.wrong(CHAT, "must be a template, or a list of tables with a name and a template")
    return found


def read_source(path: Path, config: dict[str, Any]) -> TextTokenizer | None:
    """Read the tokenizer of the source, where a folder has one for each language (Marian)."""
    folder = path if path.is_dir() else path.parent
    if _is_json(path) or not (found := slow_tokenizers.find(path, config)):
        return None
    return (
        _slow(path, found[0], folder / slow_tokenizers.SOURCE, config)
        if found[1].name == slow_tokenizers.TARGET
        else None
    )


def lowered(text: TextTokenizer) -> TextTokenizer:
    """Return the same tokenizer, with texts in lower case first."""
    if text.reader is None:
        steps = [normalizers.Lowercase(), *filter(None, [text.inner.normalizer])]
        text.inner.normalizer = normalizers.Sequence(steps)
    return text if text.reader is None else text.with_reader(replace(text.reader, lowercase=True))


def _is_json(path: Path) -> bool:
    return (path / FILE).is_file() if path.is_dir() else path.suffix == ".json"


def nothing() -> TextTokenizer:
    """Return the tokenizer of a model that reads no text."""
    return TextTokenizer(Tokenizer(models.BPE()))


def _slow(path: Path, name: str, model: Path, config: dict[str, Any]) -> TextTokenizer:
    found = slow_tokenizers.read(path, name, model, config)
    folder = path if path.is_dir() else path.parent
    frame(found.inner, found.layout.before, found.layout.after, found.layout.pair)
    return TextTokenizer(found.inner, _roles(found.inner, found.settings, config, folder), found.reader)


def _older(path: Path, folder: Path, settings: Settings) -> Tokenizer:
    """Read vocab.txt, or GPT-2's two files."""
    if (folder / WORDPIECE).is_file():
        inner = _wordpiece(folder / WORDPIECE, settings)
    elif any((folder / vocab).exists() and (folder / merges).exists() for vocab, merges in PAIRS):
        inner = TextTokenizer.load(folder, foreign=True).inner
    else:
        pairs = ", ".join(f"{vocab} with {merges}" for vocab, merges in PAIRS)
        marian = f"{slow_tokenizers.SOURCE} and {slow_tokenizers.TARGET} with {slow_tokenizers.VOCAB}"
        known = f"{FILE}, {WORDPIECE}, {pairs}, a SentencePiece .model, {marian}"
        raise wrong(path, f"holds no tokenizer: it needs one of {known}")
    slow_tokenizers.add_tokens(inner, settings, folder)
    return inner


def _wordpiece(path: Path, settings: Settings) -> Tokenizer:
    """Read BERT's vocabulary: a token a line, `##` before those that continue a word."""
    try:
        lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(path, f"cannot be read: {error}") from None
    vocab = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    unknown = settings.token("unk_token") or "[UNK]"
    if len(vocab) != len(lines) or unknown not in vocab:
        raise wrong(
            path,
            "is no vocabulary of word pieces: "
            + (f"it has no {unknown}" if unknown not in vocab else "a token is there twice"),
        )
    lowercase = settings("do_lower_case", bool, True)
    strips, chinese = settings("strip_accents", bool, lowercase), settings("tokenize_chinese_chars", bool, True)
    _warn_of_unreachable(path, vocab, normalizers.BertNormalizer(False, False, strips, lowercase))
    return word_pieces(vocab, unknown, lowercase, strips, chinese)


def _warn_of_unreachable(path: Path, vocab: dict[str, int], normalizer: normalizers.Normalizer) -> None:
    """Warn if the texts that a normalizer returns have none of many tokens, such as capitals."""
    words = (token for token in vocab if not (token.startswith("[") and token.endswith("]")))
    lost = [word for word in words if normalizer.normalize_str(word) != word]
    if len(lost) > MAX_UNREACHABLE * len(vocab):
        what = f"{len(lost) / len(vocab):.0%} of the vocabulary, such as '{visible(lost[0])}', cannot be reached"
        why = "texts are changed to lower case and lose their accents first"
        fix = f'if they should not, set "do_lower_case": false in {SETTINGS} beside it'
        warnings.warn(f"{path}: {what}: {why}; {fix}", stacklevel=5)


def word_pieces(
    vocab: dict[str, int], unknown: str, lowercase: bool, strip_accents: bool, chinese: bool = True
) -> Tokenizer:
    """Return BERT's tokenizer of a vocabulary; with `chinese`, each Chinese character is a word."""
    inner = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    inner.add_special_tokens([name for names in ROLES.values() for name in names if name in vocab])
    return inner


def _roles(inner: Tokenizer, settings: Settings, config: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the token of each role: from the settings, or else by the ids of config.json or the usual names."""
    usual = TextTokenizer(inner)
    found: dict[str, str] = {}
    for role, names in NAMES.items():
        id = config.get(f"{role}_token_id")
        id = id[0] if isinstance(id, list) and id else id
        named = next((token for name in names if (token := settings.token(name))), None)
        if named is not None and inner.token_to_id(named) is None:
            warnings.warn(f"{folder / SETTINGS}: {names[0]} = {named!r}: the tokenizer has no such token", stacklevel=4)
        elif named is not None:
            found[role] = named
        elif names[0] in settings:  # as null
            continue
        elif (token := inner.id_to_token(id) if type(id) is int and 0 <= id < 1 << 32 else None) is not None:
            found[role] = token
        elif (guess := getattr(usual, role)) is not None:
            found[role] = str(inner.id_to_token(guess))
    return found


def frame(inner: Tokenizer, before: list[str], after: list[str], pair: list[str] | None = None) -> None:
    """Add special tokens around a text, and around two where a template is given."""
    if before or after:
        known = [(token, inner.token_to_id(token)) for token in dict.fromkeys((*before, *after))]
        more = {"pair": pair} if pair else {}
        inner.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], **more, special_tokens=known
        )


def check_size(found: TextTokenizer, config: ModelConfig, path: Path) -> None:
    """Check that every token of a text has a row in the table, and nearly every row a token."""
    rows = config.vocab
    declared = {i for i, token in found.inner.get_added_tokens_decoder().items() if token.special}
    beyond = [i for i in found.inner.get_vocab().values() if i >= rows and i not in declared]
    roles = [
        i for i in (found.pad, found.bos, found.eos, found.sep, found.unk, found.mask) if i is not None and i >= rows
    ]
    if beyond or roles or found.size < MIN_USED * rows:
        raise wrong(path, f"its tokenizer has {found.size:,} tokens, and the model's table {rows:,} rows")
    if found.size < rows:
        warnings.warn(f"{path}: {rows - found.size:,} of {rows:,} rows of the table have no token", stacklevel=3)


# -- writing ----------------------------------------------------------------------------------------------------------


def must_be_public(tokenizer: TextTokenizer) -> None:
    """Refuse to write a tokenizer for other programs, which do not have the code of a part."""
    if tokenizer.part is not None:
        what = "has its own code, which no public format has"
        raise ConfigError([Fault("tokenizer", f"= '{tokenizer.part.kind}': {what}")])


def write(folder: Path, run: Run) -> None:
    """Write a tokenizer.json and the names of its special tokens; of two tokenizers, the files of Marian."""
    must_be_public(run.tokenizer)
    inner, source = Tokenizer.from_str(run.tokenizer.inner.to_str()), run.task.source_tokenizer
    roles = {role: str(inner.id_to_token(i)) for role in NAMES if (i := getattr(run.tokenizer, role)) is not None}
    special = {NAMES[role][0]: token for role, token in roles.items()}
    length = min((limit for stack in run.config.stacks.values() if (limit := stack.limit) is not None), default=None)
    limits = {} if length is None else {"model_max_length": length}
    if source is not None:
        _write_marian(folder, run.tokenizer, source)
        write_json(folder / SETTINGS, {"tokenizer_class": "MarianTokenizer", **special, **limits})
        return
    if run.tokenizer.reader is not None:
        what = "holds the nearest form of a SentencePiece model: on rare texts its ids differ from the run's"
        warnings.warn(f"{folder.name}/{FILE} {what}", stacklevel=2)
    with_images = run.config.image_tower is not None
    is_plain = isinstance(run.spec, LanguageModel) or (run.config.encoder is None and not with_images)
    if inner.post_processor is None and not is_plain:
        framed = with_images or isinstance(run.spec, Encoder | MaskedLanguageModel)
        before = [roles["bos"]] if framed and "bos" in roles else []
        frame(inner, before, [roles["eos"]] if "eos" in roles else [])
    inner.save(str(folder / FILE))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / SETTINGS, {**settings, **special, **limits, **_write_chat(folder, run.tokenizer.chat or {})})
    write_json(folder / SPECIAL, special)


def _write_chat(folder: Path, chat: dict[str, str]) -> dict[str, Any]:
    """Write the one chat template as a file; return several as a field of tokenizer_config.json."""
    if chat.keys() == {DEFAULT}:
        (folder / JINJA).write_bytes(chat[DEFAULT].encode())
        return {}
    return {CHAT: [{"name": name, "template": text} for name, text in chat.items()]} if chat else {}


def _write_marian(folder: Path, target: TextTokenizer, source: TextTokenizer) -> None:
    """Write two SentencePiece models with one vocabulary."""
    both = {slow_tokenizers.SOURCE: source.reader, slow_tokenizers.TARGET: target.reader}
    vocab = target.inner.get_vocab(with_added_tokens=False)
    if source.inner.get_vocab() != target.inner.get_vocab() or len(vocab) < target.size:
        raise wrong(folder.name, "a public folder has one vocabulary for source and target, and these differ")
    for name, reader in both.items():
        if reader is None or not isinstance(reader.prepare, Coded):
            raise wrong(folder.name, "source and target have different tokenizers: only Marian's folders hold two")
        (folder / name).write_bytes(reader.model)
    write_json(folder / slow_tokenizers.VOCAB, dict(sorted(vocab.items(), key=lambda item: item[1])))
