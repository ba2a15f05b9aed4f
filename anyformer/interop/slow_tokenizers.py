"""SentencePiece folders without a tokenizer.json, read as the slow tokenizers of `transformers` 4.x read them.

A tokenizer class there says which ids pieces have, which tokens come before and after a text, and how a text is
prepared. A class that is not known here is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from anyformer.config.spec import did_you_mean, visible
from anyformer.data.sentencepiece import (
    Cleaned,
    Coded,
    PieceReader,
    Prefixed,
    Preparation,
    SentencePieces,
    UnchangedText,
)
from anyformer.interop import language_codes
from anyformer.interop.sentencepiece_conversion import library_form, parse
from anyformer.interop.tokenizer_settings import Settings
from anyformer.interop.weight_files import read_json, wrong

SOURCE, TARGET, VOCAB = "source.spm", "target.spm", "vocab.json"
MAX_EXTRA_IDS = 10_000  # where config.json does not give the rows of the table
FAIRSEQ = dict.fromkeys(("bos_token", "cls_token"), "<s>") | dict.fromkeys(("eos_token", "sep_token"), "</s>")
FAIRSEQ |= {"unk_token": "<unk>", "pad_token": "<pad>"}
MASKED = FAIRSEQ | {"mask_token": "<mask>"}
BRACKETS = dict.fromkeys(("bos_token", "cls_token"), "[CLS]") | dict.fromkeys(("eos_token", "sep_token"), "[SEP]")


@dataclass(frozen=True)
class Folder:
    """A folder, or a .model file by itself, with its settings and its config.json."""

    path: Path
    root: Path
    settings: Settings
    config: dict[str, Any]
    model: Path  # the .model file
    pieces: SentencePieces

    @property
    def texts(self) -> list[str]:
        return [piece.text for piece in self.pieces.table]

    @property
    def unknown(self) -> str:
        return self.texts[self.pieces.unknown]

    def begins(self, *tokens: str) -> list[str]:
        """Return the pieces after these, which must be the first."""
        if tuple(self.texts[: len(tokens)]) != tokens:
            raise wrong(self.model, f"must begin with {', '.join(tokens)} for this tokenizer class")
        return self.texts[len(tokens) :]


@dataclass(frozen=True)
class TokenizerLayout:
    """Ids, framing and text preparation of a tokenizer class."""

    tokens: list[str]  # by id
    unknown: str
    before: list[str] = field(default_factory=list)  # tokens around a text
    after: list[str] = field(default_factory=list)
    pair: list[str] = field(default_factory=list)  # around two texts, in the library's notation
    special: list[str] = field(default_factory=list)  # tokens that a text never becomes
    prepare: Preparation = field(default_factory=UnchangedText)


@dataclass(frozen=True)
class TokenizerClass:
    """One tokenizer class: the names of its files and special tokens, and its layout."""

    layout: Callable[[Folder], TokenizerLayout]
    file: str
    tokens: dict[str, str]


# -- classes ----------------------------------------------------------------------------------------------------------


def _fairseq(folder: Folder, more: tuple[str, ...] = ()) -> list[str]:
    """The ids of fairseq: <pad> is added, and <unk> comes fourth."""
    return ["<s>", "<pad>", "</s>", "<unk>", *folder.begins("<unk>", "<s>", "</s>"), *more]


def _xlm_roberta(folder: Folder) -> TokenizerLayout:
    cls, sep = _named(folder, "cls_token"), _named(folder, "sep_token")
    pair = [cls, "$A", sep, sep, "$B", sep]
    return TokenizerLayout(_fairseq(folder, ("<mask>",)), _named(folder, "unk_token"), [cls], [sep], pair)


def _mbart(codes: tuple[str, ...], folder: Folder) -> TokenizerLayout:
    language, eos = _language(folder, codes, "en_XX"), _named(folder, "eos_token")
    ends = ([language], [eos]) if codes is language_codes.MBART50 else ([], [eos, language])
    return TokenizerLayout(_fairseq(folder, (*codes, "<mask>")), _named(folder, "unk_token"), *ends, special=[*codes])


def _nllb(folder: Folder) -> TokenizerLayout:
    settings, eos = folder.settings, _named(folder, "eos_token")
    codes = () if settings("additional_special_tokens", list, []) else language_codes.NLLB
    language = settings("src_lang", str, "eng_Latn")
    ends = ([], [eos, language]) if settings("legacy_behaviour", bool, False) else ([language], [eos])
    return TokenizerLayout(_fairseq(folder), _named(folder, "unk_token"), *ends, special=[*settings.special(), *codes])


def _pegasus(folder: Folder) -> TokenizerLayout:
    settings = folder.settings
    pad, eos, unknown = (_named(folder, f"{role}_token") for role in ("pad", "eos", "unk"))
    offset, mask = settings("offset", int, 103), _named(folder, "mask_token")
    sentence = settings.token("mask_token_sent") if "mask_token_sent" in settings else "<mask_1>"
    if not (offset == 0 or (sentence is not None and 2 <= offset <= MAX_EXTRA_IDS)):
        raise settings.wrong("offset", f"must be 0, or from 2 to {MAX_EXTRA_IDS:,} with a mask_token_sent")
    rest = folder.begins(pad, eos)
    added = [] if offset == 0 else [str(sentence), mask, *(f"<unk_{i}>" for i in range(2, offset))]
    return TokenizerLayout([pad, eos, *added, *rest], unknown, after=[eos], special=added)


def _m2m100(folder: Folder) -> TokenizerLayout:
    known = {"m2m100": language_codes.M2M100, "wmt21": language_codes.WMT21}
    name = folder.settings("language_codes", str, "m2m100")
    if name not in known:
        raise folder.settings.wrong("language_codes", did_you_mean(name, known))
    codes = [f"__{code}__" for code in known[name]]
    language = f"__{_language(folder, known[name], 'en')}__"
    tokens, unknown = _vocabulary(folder.root / VOCAB), _named(folder, "unk_token")
    return TokenizerLayout(
        _checked(folder, [*tokens, *codes], unknown), unknown, [language], [_named(folder, "eos_token")], [], codes
    )


def _marian(folder: Folder) -> TokenizerLayout:
    if folder.settings("separate_vocabs", bool, False):
        raise folder.settings.wrong("separate_vocabs", "only one vocabulary for both languages is read")
    unknown = _named(folder, "unk_token")
    tokens = _checked(folder, _vocabulary(folder.root / VOCAB), unknown, _named(folder, "pad_token"))
    return TokenizerLayout(tokens, unknown, after=[_named(folder, "eos_token")], prepare=Coded())


def _t5(folder: Folder) -> TokenizerLayout:
    settings, rows = folder.settings, folder.config.get("vocab_size")
    usual = 0 if folder.config.get("model_type") == "mt5" else 100
    count, most = settings("extra_ids", int, usual), rows if type(rows) is int and rows > 0 else MAX_EXTRA_IDS
    if not 0 <= count <= most:
        raise settings.wrong("extra_ids", f"must be from 0 to {most:,}, the rows of the model's table")
    extra = [f"<extra_id_{i}>" for i in reversed(range(count))]
    if (
        count
        and (more := settings("additional_special_tokens", list, []))
        and not set(extra) <= set(settings.special())
    ):
        raise settings.wrong(
            "additional_special_tokens", f"must name the {count} extra ids too, or none ({len(more)} are)"
        )
    eos = _named(folder, "eos_token")
    return TokenizerLayout([*folder.texts, *extra], folder.unknown, after=[eos], special=extra, prepare=_legacy(folder))


def _llama(folder: Folder) -> TokenizerLayout:
    return TokenizerLayout(folder.texts, folder.unknown, *_switched(folder), prepare=_legacy(folder))


def _gemma(folder: Folder) -> TokenizerLayout:
    return TokenizerLayout(folder.texts, folder.unknown, *_switched(folder))


def _albert(folder: Folder) -> TokenizerLayout:
    switches = (("do_lower_case", True), ("remove_space", True), ("keep_accents", False))
    return _bracketed(folder, Cleaned(*(folder.settings(name, bool, usual) for name, usual in switches)))


def _deberta(folder: Folder) -> TokenizerLayout:
    for name in ("do_lower_case", "split_by_punct"):
        if folder.settings(name, bool, False):
            raise folder.settings.wrong(name, "is not supported without a tokenizer.json: save one beside the model")
    return _bracketed(folder, UnchangedText())


def _bracketed(folder: Folder, prepare: Preparation) -> TokenizerLayout:
    cls, sep = _named(folder, "cls_token"), _named(folder, "sep_token")
    pair = [f"{cls}:0", "$A:0", f"{sep}:0", "$B:1", f"{sep}:1"]
    return TokenizerLayout(folder.texts, folder.unknown, [cls], [sep], pair, prepare=prepare)


def _named(folder: Folder, key: str) -> str:
    if (token := folder.settings.token(key)) is None:
        raise folder.settings.wrong(key, "must be a token for this tokenizer class")
    return token


def _language(folder: Folder, codes: tuple[str, ...], usual: str) -> str:
    if (code := folder.settings("src_lang", str, usual)) not in codes:
        raise folder.settings.wrong("src_lang", did_you_mean(code, codes))
    return code


def _legacy(folder: Folder) -> Preparation:
    if folder.settings("legacy", bool, True):
        return UnchangedText()
    return Prefixed(_named(folder, "unk_token"), folder.settings("add_prefix_space", bool, True))


def _switched(folder: Folder) -> tuple[list[str], list[str]]:
    begins, ends = folder.settings("add_bos_token", bool, True), folder.settings("add_eos_token", bool, False)
    return [_named(folder, "bos_token")] if begins else [], [_named(folder, "eos_token")] if ends else []


def _vocabulary(path: Path) -> list[str]:
    """Read a table from tokens to the ids 0, 1, 2, …"""
    ids = read_json(path)
    if not all(type(i) is int for i in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise wrong(path, "must be a table from tokens to the ids 0, 1, 2, … without gaps")
    return sorted(ids, key=lambda token: ids[token])


def _checked(folder: Folder, tokens: list[str], *needed: str) -> list[str]:
    if lost := [token for token in needed if token not in tokens]:
        raise wrong(folder.root / VOCAB, f"has no {lost[0]}")
    if len(set(tokens)) < len(tokens):
        raise wrong(folder.root / VOCAB, "holds a language code that the tokenizer class adds itself")
    return tokens


BPE_MODEL, T5_MODEL, LLAMA_MODEL = "sentencepiece.bpe.model", "spiece.model", "tokenizer.model"
CLASSES = {
    "XLMRobertaTokenizer": TokenizerClass(_xlm_roberta, BPE_MODEL, MASKED),
    "MBartTokenizer": TokenizerClass(partial(_mbart, language_codes.MBART), BPE_MODEL, MASKED),
    "MBart50Tokenizer": TokenizerClass(
        partial(_mbart, language_codes.MBART50), BPE_MODEL, {k: v for k, v in MASKED.items() if k != "bos_token"}
    ),
    "NllbTokenizer": TokenizerClass(_nllb, BPE_MODEL, MASKED),
    "M2M100Tokenizer": TokenizerClass(_m2m100, BPE_MODEL, {k: v for k, v in FAIRSEQ.items() if k != "cls_token"}),
    "MarianTokenizer": TokenizerClass(
        _marian, TARGET, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    ),
    "PegasusTokenizer": TokenizerClass(
        _pegasus,
        T5_MODEL,
        {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask_2>"},
    ),
    "T5Tokenizer": TokenizerClass(_t5, T5_MODEL, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}),
    "LlamaTokenizer": TokenizerClass(
        _llama, LLAMA_MODEL, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    ),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        LLAMA_MODEL,
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    ),
    "AlbertTokenizer": TokenizerClass(
        _albert, T5_MODEL, BRACKETS | {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "[MASK]"}
    ),
    "DebertaV2Tokenizer": TokenizerClass(
        _deberta, "spm.model", BRACKETS | {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    ),
}
MODEL_TYPES = {
    "deberta-v2": "DebertaV2Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "mbart": "MBartTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "marian": "MarianTokenizer",
    "pegasus": "PegasusTokenizer",
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3"), "LlamaTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
    "albert": "AlbertTokenizer",
}
GENERIC = ("PreTrainedTokenizer", "TokenizersBackend", "SentencePieceBackend")  # classes that say nothing


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer as its class lays it out."""

    inner: Tokenizer
    reader: PieceReader
    layout: TokenizerLayout
    settings: Settings  # with the special tokens of the class


def find(path: Path, config: dict[str, Any]) -> tuple[str, Path] | None:
    """Return the tokenizer class of a folder and its .model file; None where there is no such file."""
    folder = path if path.is_dir() else path.parent
    settings = Settings(folder)
    name = _class(path, settings, config)
    if name == "MarianTokenizer":
        return (name, folder / TARGET) if (folder / TARGET).is_file() or (folder / SOURCE).is_file() else None
    if path.suffix == ".model":
        found = [path]
    else:
        usual = folder / CLASSES[name].file if name in CLASSES else None
        found = [usual] if usual is not None and usual.is_file() else sorted(folder.glob("*.model"))
    if not found:
        return None
    if len(found) > 1:
        raise wrong(folder, f"holds several SentencePiece models: {', '.join(one.name for one in found)}")
    if name not in CLASSES:
        known = f"a SentencePiece model is read for one of {', '.join(CLASSES)}"
        if "tokenizer_class" in settings:
            raise settings.wrong("tokenizer_class", known)
        raise wrong(found[0], f"belongs to no known tokenizer_class: {known}")
    return name, found[0]


def _class(path: Path, settings: Settings, config: dict[str, Any]) -> str:
    for name in (settings("tokenizer_class", str, ""), config.get("tokenizer_class")):
        if isinstance(name, str) and (plain := name.removesuffix("Fast").replace("MT5", "T5")) and plain not in GENERIC:
            return plain
    return MODEL_TYPES.get(str(config.get("model_type")), "")


def read(path: Path, name: str, model: Path, config: dict[str, Any]) -> LoadedTokenizer:
    """Read a .model file as a tokenizer class does."""
    root = path if path.is_dir() else path.parent
    settings = Settings(root, CLASSES[name].tokens)
    data, pieces = parse(model)
    if settings("sp_model_kwargs", dict, {}):
        raise settings.wrong("sp_model_kwargs", "sampling is not supported: remove it")
    layout = CLASSES[name].layout(Folder(path, root, settings, config, model, pieces))
    if len(set(layout.tokens)) < len(layout.tokens):
        raise wrong(model, f"has a piece of the same name as a token that {name} adds")
    if layout.unknown not in layout.tokens:
        raise wrong(model, f"has no {layout.unknown}")
    inner = library_form(model, PieceReader(data, layout.unknown, layout.prepare), layout.tokens)
    inner.add_special_tokens([token for token in layout.special if token in set(layout.tokens)])
    plain = add_tokens(inner, settings, root)
    inner.add_special_tokens(list(dict.fromkeys((*settings.special(), *layout.special))))
    if lost := [token for token in (*layout.before, *layout.after) if inner.token_to_id(token) is None]:
        raise wrong(model, f"has no {lost[0]}, which {name} puts around a text")
    return LoadedTokenizer(inner, PieceReader(data, layout.unknown, layout.prepare, added=plain), layout, settings)


def add_tokens(inner: Tokenizer, settings: Settings, folder: Path) -> tuple[str, ...]:
    """Add the tokens of added_tokens_decoder or added_tokens.json at their ids; return those that a text can become."""
    plain = []
    for id, token, special, strips in settings.added():
        new = inner.token_to_id(token) is None
        if new:
            inner.add_tokens([AddedToken(token, normalized=False, special=special)])
        if inner.token_to_id(token) != id:
            where = f"the next id is {inner.token_to_id(token)}" if new else f"its id is {inner.token_to_id(token)}"
            raise wrong(folder / settings.added_in, f"{visible(token)} = {id}: {where}")
        if not special and strips:
            raise wrong(
                folder / settings.added_in, f"{visible(token)}: lstrip, rstrip and single_word are not supported"
            )
        plain += [] if special else [token]
    return tuple(plain)
