"""Tokenizers: text comes back, tokens have bytes, and the same texts train the same tokenizer."""

import ctypes
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from anyformer import recipe
from anyformer.config import ConfigError
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from tests.data.tokenizer_cases import ANY_TEXT, LOSSLESS, ROOT, SEEN_TEXT, SPECS, TEXTS, made, of, table_of, words


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in names)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="counts bytes in use by glibc's mallinfo2")
@pytest.mark.parametrize("kind", ["bytes", "chars", "whole"])
def test_texts_are_not_kept(kind: str) -> None:
    """A tokenizer that does not split a text into words must not cache it: a server would keep 10,000 prompts."""
    if kind == "whole":  # as SentencePiece's BPE is converted: spaces are letters of one long word
        vocab = {"<unk>": 0, **{letter: i for i, letter in enumerate("▁abcdefghij0123456789", 1)}}
        inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
        inner.normalizer = normalizers.Replace(" ", "▁")
        tokenizer = TextTokenizer(inner)
    else:
        tokenizer = TextTokenizer.from_json(made(kind).to_json())
    count, used = 2000, ctypes.CDLL(None).mallinfo2
    used.restype = MallocInfo
    tokenizer.encode("abc def")
    before = used().uordblks
    for i in range(count):
        tokenizer.encode(f"abc def {i} ghi jab cde {i} fgh")
    assert (used().uordblks - before) / count < 100  # bytes; a cached text takes more than 1,000


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
