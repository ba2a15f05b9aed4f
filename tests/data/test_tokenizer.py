"""Tokenizers: text comes back, texts cannot spell special ids, and the same texts train the same tokenizer."""

import copy
import json
import os
import subprocess
import sys
import tempfile
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers

from anyformer import recipe
from anyformer.config import ConfigError
from anyformer.data.tokenizer import PAIRS, ROLES, TextTokenizer, train_tokenizer

ROOT = Path(__file__).parent.parent.parent

TEXTS = [
    "the quick brown fox jumps over the lazy dogs, and the dogs sleep on.\n",
    "Wie heißt du? Ich heiße Jürgen!\n",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다. 여우가 빠른 개를 본다.\n",
    "敏捷的棕色狐狸跳过了懒狗。狐狸很敏捷，狗很懒。\n",
    "कुत्ता सो रहा है\tand 42 👩‍👩‍👧‍👦 more ❤️‍🔥 cafe\u0301\n",
    "def f(x):\n    return x ** 2  # <pad> <mask> [MASK]\n",
] * 3

SPECS: dict[str, recipe.Tokenizer] = {
    "chars": recipe.Characters(),
    "bytes": recipe.Bytes(),
    "words": recipe.Words(),
    "bpe": recipe.BPE(size=400),
    "unigram": recipe.Unigram(size=500),
    "wordpiece": recipe.WordPiece(size=400),
}
LOSSLESS = ("bytes", "bpe", "unigram")

# Any text, with what might upset a tokenizer in it.
AWKWARD = [
    "<pad>", "[PAD]", "<unk>", "<mask>", "</s>", "<0x41>", "##a", "▁", "Ġ", "the", "İ", "한국어", "ㅎㅏㄴ", "中文",
    "हिन्दी", "👩‍👩‍👧‍👦", "❤️", "e\u0301", "\u0301", " ", "  ", "\n", "\r\n", "\t", "\0", "\u2028", "\ufeff", "\ufffd",
    "\U0010ffff",
]  # fmt: skip
PIECES = st.one_of(st.sampled_from(AWKWARD), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
ANY_TEXT = st.lists(PIECES, max_size=8).map("".join)
SEEN_TEXT = st.text(sorted(set("".join(TEXTS))), max_size=30)


@cache
def made(kind: str) -> TextTokenizer:
    return train_tokenizer(SPECS[kind], iter(TEXTS))


def of(inner: Tokenizer) -> TextTokenizer:
    return TextTokenizer.from_json(inner.to_str())


def words(*vocab: str, unk: str | None = None) -> Tokenizer:
    """A tokenizer made elsewhere."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token=unk or vocab[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner


# -- text comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=ANY_TEXT)
def test_any_text_comes_back(kind: str, text: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.sep, tokenizer.unk, tokenizer.mask} & set(ids)


@given(text=SEEN_TEXT)
def test_seen_characters_come_back(text: str) -> None:
    ids = made("chars").encode(text)
    assert made("chars").decode(ids) == text
    assert len(ids) == len(text)


@given(text=SEEN_TEXT)
def test_word_pieces_come_back_up_to_spaces(text: str) -> None:
    """Save characters that BERT's cleaning takes away (joiners), and those unknown at their place in a word."""
    tokenizer = made("wordpiece")
    ids = tokenizer.encode(text)
    if tokenizer.unk not in ids:
        kept = text.replace("\u200d", "")
        assert "".join(tokenizer.decode(ids).split()) == "".join(kept.split())


def test_words_come_back_with_one_space_between() -> None:
    tokenizer = made("words")
    assert tokenizer.decode(tokenizer.encode("  the lazy\n\tdogs,  sleep 빠른 ")) == "the lazy dogs, sleep 빠른"
    assert tokenizer.encode("unheard of") == [tokenizer.unk] * 2


def test_what_is_unknown_is_seen_to_be() -> None:
    """A word that a model could not say is counted against it, and read by the user; control ids say nothing."""
    for kind, text, shown in (
        ("words", "the unheard dogs,", "the <unk> dogs,"),
        ("chars", "aЖb", "a<unk>b"),
        ("wordpiece", "the Ж dog", "the <unk> dog"),
    ):
        tokenizer = made(kind)
        assert tokenizer.decode([tokenizer.bos, *tokenizer.encode(text), tokenizer.eos, tokenizer.pad]) == shown


@pytest.mark.parametrize("kind", SPECS)
@given(texts=st.lists(ANY_TEXT, max_size=4))
def test_one_by_one_or_in_a_batch_or_after_reloading(kind: str, texts: list[str]) -> None:
    tokenizer = made(kind)
    rows = [tokenizer.encode(text) for text in texts]
    again = TextTokenizer.from_json(tokenizer.to_json())
    assert tokenizer.encode_batch(texts) == rows == again.encode_batch(texts)
    assert tokenizer.decode_batch(rows) == [again.decode(row) for row in rows]


def test_letters_of_hangul() -> None:
    tokenizer = train_tokenizer(recipe.Characters(decompose=True), ["한국어 é", "각"])
    assert len(tokenizer.encode("한")) == len(tokenizer.encode("각")) == 3
    assert len(tokenizer.encode("가")) == 2  # no syllable that was seen, of letters that were
    assert tokenizer.unk not in tokenizer.encode("간 e")
    assert unicodedata.normalize("NFC", tokenizer.decode(tokenizer.encode("한국어 é"))) == "한국어 é"


@pytest.mark.parametrize("kind", ["chars", "words", "bpe", "unigram", "wordpiece"])
def test_lowercase(kind: str) -> None:
    spec = SPECS[kind].model_copy(update={"lowercase": True})
    tokenizer = train_tokenizer(spec, ["Ähren UND Äpfel 한국 ÉTÉ\n"] * 3)
    text = tokenizer.decode(tokenizer.encode("ÄHREN und äPFEL 한국 été"))
    assert text == "ähren und äpfel 한국 été"


def test_unigrams_are_words_where_words_are_common() -> None:
    tokenizer = train_tokenizer(recipe.Unigram(size=420), TEXTS)
    assert [tokenizer.token(i) for i in tokenizer.encode("the dogs")] == ["▁the", "▁dogs"]


# -- special tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPECS)
def test_special_tokens_come_first(kind: str) -> None:
    tokenizer = made(kind)
    found = (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.sep, tokenizer.unk, tokenizer.mask)
    assert found == (0, 1, 2, 3, 4, 5)
    assert [tokenizer.token(i) for i in range(6)] == ["<pad>", "<bos>", "<eos>", "<sep>", "<unk>", "<mask>"]
    vocab = json.loads(tokenizer.to_json())["model"]["vocab"]
    assert tokenizer.size == len(vocab)
    if isinstance(vocab, dict):
        assert sorted(vocab.values()) == list(range(tokenizer.size))


@pytest.mark.parametrize("kind", SPECS)
@given(text=ANY_TEXT)
def test_no_text_spells_a_special_id(kind: str, text: str) -> None:
    tokenizer = made(kind)
    assert {0, 1, 2, 3, 5}.isdisjoint(tokenizer.encode(text))
    for name in ("<pad>", "a <mask> b", "<PAD>"):
        assert {0, 1, 2, 3, 5}.isdisjoint(tokenizer.encode(name))


@pytest.mark.parametrize("kind", ["chars", "bytes", "bpe", "unigram"])
def test_a_special_token_in_a_text_comes_back(kind: str) -> None:
    for text in ("<pad>", "x<mask>y", " <pad> <mask>"):
        assert made(kind).decode(made(kind).encode(text)) == text


def test_public_models_that_hold_special_words() -> None:
    """T5 has `</s>` among its pieces, and a score of 0, the best there is."""
    special, others = ["<pad>", "</s>", "<unk>"], ["▁", "<", "/", "s", ">"]
    pieces = [(piece, 0.0) for piece in special] + [(piece, -9.0) for piece in others]
    inner = Tokenizer(models.Unigram(pieces, unk_id=2))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(special)
    tokenizer = of(inner)
    assert tokenizer.encode("s</s>s") == [3, 6, 4, 5, 6, 7, 6]
    assert tokenizer.decode([*tokenizer.encode("s</s>s"), 1, 0]) == "s</s>s"
    assert tokenizer.encode("<pad>") == [3, 4, 2, 2, 2, 7]


def test_what_public_files_switch_on_is_switched_off() -> None:
    inner = words("[UNK]", "[PAD]", "a", "b")
    inner.enable_truncation(2)
    inner.enable_padding(pad_id=1, length=8)
    assert of(inner).encode("a b a b") == [2, 3, 2, 3]
    assert of(inner).encode_batch(["a", "a b a"]) == [[2], [2, 3, 2]]


@pytest.mark.parametrize(
    ("vocab", "expected"),
    [
        (["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], {"pad": 0, "unk": 1, "bos": 2, "eos": 3, "sep": 3, "mask": 4}),
        (["<s>", "<pad>", "</s>", "<unk>", "<mask>"], {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "mask": 4}),
        (["a", "<|endoftext|>"], {"bos": 1, "eos": 1}),
        (["<|endoftext|>", "[CLS]", "[SEP]"], {"bos": 1, "eos": 2, "sep": 2}),
        (["<pad>", "<eos>", "<bos>", "<unk>"], {"pad": 0, "eos": 1, "bos": 2, "unk": 3}),
    ],
)
def test_roles_of_public_tokenizers(vocab: list[str], expected: dict[str, int]) -> None:
    tokenizer = of(words(*vocab))
    assert {role: i for role in ROLES if (i := getattr(tokenizer, role)) is not None} == expected
    assert tokenizer.decode(range(tokenizer.size)) == " ".join(
        word for word in vocab if word in ("a", "<unk>", "[UNK]")
    )


def test_what_is_special_elsewhere_is_a_word_here() -> None:
    tokenizer = train_tokenizer(recipe.Words(), ["<s> a </s>"])
    assert tokenizer.decode(tokenizer.encode("<s> a </s>")) == "<s> a </s>"
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)


# -- decoding and showing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPECS)
def test_ids_that_are_no_text_are_left_out(kind: str) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode("the dogs")
    assert tokenizer.decode([0, 1, *ids, 2, 3, 5, tokenizer.size, 10**9, -100]) == "the dogs"
    assert tokenizer.decode([]) == tokenizer.decode(tokenizer.encode("")) == ""


@pytest.mark.parametrize("kind", LOSSLESS)
def test_cutting_harms_no_whole_character(kind: str) -> None:
    text = "a😀é鬱😀\ufffd▁z"
    tokenizer = train_tokenizer(SPECS[kind], ["plain text, plain text\n"])  # so that all else is bytes
    ids = tokenizer.encode(text)
    for stop in range(len(ids) + 1):
        left, right = tokenizer.decode(ids[:stop]), tokenizer.decode(ids[stop:])
        whole = left.rstrip("\ufffd")
        assert text.startswith(whole)
        assert text.endswith(right.lstrip("\ufffd"))
        assert len(text) - 2 <= len(whole) + len(right.lstrip("\ufffd")) <= len(text)


def test_tokens_can_be_looked_at() -> None:
    def shown(kind: str, text: str) -> list[str]:
        return [made(kind).token(i) for i in made(kind).encode(text)]

    assert shown("bytes", "a \n한") == ["a", "▁", "\\n", "<0xED>", "<0x95>", "<0x9C>"]
    assert shown("chars", "개 \t狗\u200d") == ["개", "▁", "\\t", "狗", "\\u200d"]
    assert shown("bpe", "the dogs 개") == ["the", "▁dogs", "▁<0xEA><0xB0>", "<0x9C>"]
    longer = train_tokenizer(recipe.BPE(size=600), TEXTS)
    assert [longer.token(i) for i in longer.encode("the dogs 빠른敏捷")] == ["the", "▁dogs", "▁빠른", "敏捷"]
    assert shown("unigram", "the 빠른 ☃") == ["▁the", "▁빠른", "▁", "<0xE2>", "<0x98>", "<0x83>"]
    assert shown("words", "the dogs, 狐狸") == ["the", "dogs,", "<unk>"]
    assert "##" in "".join(shown("wordpiece", "foxdog"))
    assert made("bytes").token(262) == "<262>"
    assert made("bytes").token(-1) == "<-1>"


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPECS)
@given(text=ANY_TEXT)
def test_the_bytes_of_tokens_are_the_text(kind: str, text: str) -> None:
    tokenizer, table = made(kind), table_of(kind)
    ids = tokenizer.encode(text)
    if ids and tokenizer.unk not in ids:
        whole = (tokenizer.lead + tokenizer.decode(ids)).encode()
        assert b"".join(table[i] for i in ids) == whole
        assert kind not in LOSSLESS or whole == (tokenizer.lead + text).encode()


@cache
def table_of(kind: str) -> list[bytes]:
    return made(kind).vocabulary_bytes()


def test_bytes_of_each_kind() -> None:
    assert {kind: made(kind).lead for kind in SPECS} == {
        "chars": "", "bytes": "", "words": " ", "bpe": "", "unigram": " ", "wordpiece": " ",
    }  # fmt: skip
    for kind in SPECS:
        assert len(table_of(kind)) == made(kind).size
        assert table_of(kind)[:6] == [b""] * 6  # special ids are no text
        assert all(table_of(kind)[6:])
    for kind in LOSSLESS:
        assert {token for token in table_of(kind) if len(token) == 1} == {bytes([n]) for n in range(256)}
    assert b"dogs," not in table_of("words")
    assert b" dogs," in table_of("words")
    assert b"s" in table_of("wordpiece")  # ##s
    assert b" s" in table_of("wordpiece")


def test_bytes_of_public_tokenizers() -> None:
    inner = words("[UNK]", "a", "▁b", "c</w>")
    cases = {
        decoders.Metaspace(): ([b"a", b" b", b"c</w>"], " "),
        decoders.BPEDecoder(suffix="</w>"): ([b"a", "▁b".encode(), b"c "], ""),
        decoders.WordPiece(): ([b" a", " ▁b".encode(), b" c</w>"], " "),
    }
    for decoder, (table, lead) in cases.items():
        inner.decoder = decoder
        assert of(inner).vocabulary_bytes() == [b"", *table]
        assert of(inner).lead == lead


# -- the same texts, the same tokenizer -------------------------------------------------------------------------------


def test_training_is_deterministic(tmp_path: Path) -> None:
    """In any process, on any number of cores; and without torch."""
    code = f"""
import sys
from anyformer.data.tokenizer import train_tokenizer
from anyformer.recipe import *
for kind, spec in {SPECS!r}.items():
    train_tokenizer(spec, {TEXTS!r}).save(f"{{sys.argv[1]}}/{{kind}}.json")
assert "torch" not in sys.modules
"""
    for n, parallel in enumerate(("true", "false", "true")):
        environment = {**os.environ, "PYTHONHASHSEED": str(n), "TOKENIZERS_PARALLELISM": parallel}
        command = [sys.executable, "-c", code, tmp_path / str(n)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        for kind in SPECS:
            assert (tmp_path / str(n) / f"{kind}.json").read_text(encoding="utf-8") == made(kind).to_json(), kind


@given(texts=st.lists(st.text("ab 0é한", max_size=12), max_size=6), kind=st.sampled_from(["unigram", "wordpiece"]))
def test_small_texts_train_too(texts: list[str], kind: str) -> None:
    spec = SPECS[kind].model_copy(update={"size": 290})
    if not "".join(texts).strip():
        with pytest.raises(ConfigError, match="no text"):
            train_tokenizer(spec, texts)
        return
    first = train_tokenizer(spec, texts)
    assert first.to_json() == train_tokenizer(spec, iter(texts)).to_json()
    for text in texts:
        found = first.decode(first.encode(text))
        assert found == (text if kind == "unigram" else " ".join(text.split()))
    assert first.size <= 290


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPECS)
def test_saving_and_loading(kind: str, tmp_path: Path) -> None:
    tokenizer = made(kind)
    tokenizer.save(tmp_path / "größe" / "模型")
    tokenizer.save(tmp_path / "mine.json")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["mine.json", "tokenizer.json"]
    for path in (tmp_path / "größe" / "模型", tmp_path / "größe" / "模型" / "tokenizer.json", tmp_path / "mine.json"):
        assert TextTokenizer.load(path).to_json() == tokenizer.to_json()
        assert train_tokenizer(recipe.TokenizerFile(path=str(path)), []).to_json() == tokenizer.to_json()


def test_a_copy_is_as_careful_as_the_original() -> None:
    assert copy.deepcopy(made("words")).encode("<pad> the") == made("words").encode("<pad> the")


@pytest.mark.parametrize("names", PAIRS)
@given(text=ANY_TEXT)
def test_the_two_files_of_a_byte_level_bpe(names: tuple[str, str], text: str) -> None:
    tokenizer, public = pair(names)
    assert tokenizer.encode(text) == public.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    end = tokenizer.eos
    assert end == tokenizer.bos == public.token_to_id("<|endoftext|>")
    assert tokenizer.decode([end]) == ""


@cache
def pair(names: tuple[str, str]) -> tuple[TextTokenizer, ByteLevelBPETokenizer]:
    public = ByteLevelBPETokenizer()
    public.train_from_iterator(TEXTS, vocab_size=400, show_progress=False, special_tokens=["<|endoftext|>"])
    with tempfile.TemporaryDirectory() as folder:
        public.save_model(folder)
        vocab, merges = (Path(folder, old).rename(Path(folder, new)) for old, new in zip(PAIRS[0], names, strict=True))
        # As the library reads it itself, with no special tokens.
        return TextTokenizer.load(folder), ByteLevelBPETokenizer.from_file(str(vocab), str(merges))


# -- wrong input ------------------------------------------------------------------------------------------------------


def refused(message: str) -> Any:
    return pytest.raises(ConfigError, match=message)


@pytest.mark.parametrize("kind", SPECS)
def test_what_is_no_text(kind: str) -> None:
    half = r"^the text holds half a character \(a lone surrogate\): '\\ud83d' at position 2$"
    with refused(half):
        made(kind).encode("ab\ud83d")
    with refused(half):
        made(kind).encode_batch(["a", "ab\ud83d"])
    with refused(half):
        train_tokenizer(SPECS[kind], ["ab\ud83d"])
    for wrong in (None, 3, b"bytes", ["a"]):
        with refused(rf"^a text must be a string, not {type(wrong).__name__}$"):
            made(kind).encode(wrong)  # type: ignore[arg-type]
        with refused(rf"^a text must be a string, not {type(wrong).__name__}$"):
            train_tokenizer(SPECS[kind], [wrong])  # type: ignore[list-item]
    with refused("^encode_batch takes a list of texts"):
        made(kind).encode_batch("text")


@pytest.mark.parametrize("kind", ["chars", "words", "bpe", "unigram", "wordpiece"])
def test_nothing_to_train_on(kind: str) -> None:
    for texts in ([], [""], ["\n", "  "]):
        with refused("^there is no text to train a tokenizer on$"):
            train_tokenizer(SPECS[kind], texts)


def test_bytes_need_no_training() -> None:
    assert train_tokenizer(recipe.Bytes(), []).to_json() == made("bytes").to_json()
    assert made("bytes").encode("\0Aÿ") == [6, 6 + 0x41, 6 + 0xC3, 6 + 0xBF]


@pytest.mark.parametrize(("kind", "least"), [("words", 7), ("bpe", 262), ("unigram", None), ("wordpiece", None)])
def test_the_least_size(kind: str, least: int | None) -> None:
    with refused(rf"^size = 2: {kind} needs at least \d+ for these texts$") as caught:
        train_tokenizer(SPECS[kind].model_copy(update={"size": 2}), TEXTS)
    told = int(str(caught.value).split()[-4])
    assert least in (None, told)
    assert train_tokenizer(SPECS[kind].model_copy(update={"size": told}), TEXTS).size == told
    with refused(f"at least {told} "):
        train_tokenizer(SPECS[kind].model_copy(update={"size": told - 1}), TEXTS)


def test_wrong_files(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            TextTokenizer.load(path)
        (line,) = str(caught.value).splitlines()
        return line.removeprefix(str(path))

    assert message(tmp_path / "no") == ": no such file or folder"
    assert message(tmp_path).startswith(": holds no tokenizer: no tokenizer.json, nor vocab.json with merges.txt, nor ")
    (file := tmp_path / "t.json").write_text("{")
    assert message(file).startswith(": is no tokenizer.json: ")
    file.write_text('{"a": 1}')
    assert message(file).startswith(": is no tokenizer.json: ")
    file.write_bytes(b'{"a": "\xff"}')
    assert message(file) == ": not UTF-8: byte 0xff at offset 7"
    vocab, merges = (tmp_path / name for name in PAIRS[0])
    vocab.write_text('{"a": 0, "b": 1}')
    merges.write_text("#version: 0.2\na b\nab")
    assert message(tmp_path).endswith("merges.txt: line 3: must be two tokens with a space between them")
    merges.write_text("#version: 0.2\na b\n")
    assert message(tmp_path).endswith("vocab.json: does not belong to merges.txt: no token for a + b")
    vocab.write_text('{"a": 0, "b": 1, "ab": 2}')  # GPT-1's and CLIP's are of characters, and would be read wrongly
    assert message(tmp_path).endswith("vocab.json: is no byte-level vocabulary: some bytes have no token")
    for wrong in ("[1]", "{", '{"a": "b", "b": 1, "ab": 2}', '{"a": -1, "b": 1, "ab": 2}'):
        vocab.write_text(wrong)
        assert "vocab.json: is no vocabulary: " in message(tmp_path)
    with refused("cannot be written"):
        made("bytes").save(file / "below")


def test_a_file_without_the_unknown_token_it_needs() -> None:
    tokenizer = of(words("a", unk="<unk>"))
    assert tokenizer.encode("a") == [0]
    for attempt in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with refused("^the tokenizer cannot read this text: "):
            attempt("b")
