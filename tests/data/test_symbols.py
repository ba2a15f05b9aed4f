"""Whole symbols in a `chars` tokenizer: each is one token, and every text comes back."""

import re

import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.recipe import SPECIAL, Characters

SYMBOLS = ["t͡ɕ", "t͡", "ㄱㅏ", "<end>", "a-b", "a.", "[x]", "각", "\n\n", "ab\\d", "é"]
TEXT = "".join(SYMBOLS) + " abcdtx<>pu nk.-[]ɕ각가나\n"
PIECES = st.sampled_from([*SYMBOLS, *SPECIAL, *TEXT, "<unk>a"])


@given(text=st.lists(PIECES).map("".join), symbols=st.lists(st.sampled_from(SYMBOLS), unique=True))
def test_symbols_are_whole(text: str, symbols: list[str]) -> None:
    """From left to right, the longest symbol that fits; all other text is cut into characters."""
    trained = train_tokenizer(Characters(symbols=tuple(symbols)), [TEXT, *SPECIAL])
    longest = sorted(symbols, key=len, reverse=True)
    expected = re.findall("|".join([*map(re.escape, longest), "."]), text, re.DOTALL)
    for tokenizer in (trained, TextTokenizer.from_json(trained.to_json())):
        ids = tokenizer.encode(text)
        table = tokenizer.vocabulary_bytes()
        assert [table[i].decode() for i in ids] == expected
        assert tokenizer.decode(ids) == text
        assert not tokenizer.special.intersection(ids)


def test_symbols_need_not_occur() -> None:
    tokenizer = train_tokenizer(Characters(symbols=("xyz",)), ["ab"])
    assert [tokenizer.token(i) for i in tokenizer.encode("axyzx")] == ["a", "xyz", "<unk>"]


def test_without_symbols_nothing_changes() -> None:
    assert train_tokenizer(Characters(symbols=()), [TEXT]).to_json() == train_tokenizer(Characters(), [TEXT]).to_json()


def test_symbols_are_normalised_like_texts() -> None:
    """A syllable that is decomposed remains one token as a symbol."""
    tokenizer = train_tokenizer(Characters(symbols=("각", "TH"), lowercase=True, decompose=True), ["각 가 the"])
    assert len(tokenizer.encode("각")) == len(tokenizer.encode("Th")) == 1
    assert len(tokenizer.encode("가")) == 2


@pytest.mark.parametrize("wrong", [*SPECIAL, ""])
def test_wrong_symbols_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"^symbols\.1 = "):
        Characters(symbols=("a", wrong))
