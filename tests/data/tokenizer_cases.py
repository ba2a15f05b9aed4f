"""Tokenizers of every kind trained on small texts, and texts that might upset them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from anyformer import recipe
from anyformer.config import ConfigError
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer

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


@cache
def table_of(kind: str) -> list[bytes]:
    return made(kind).vocabulary_bytes()


def refused(message: str) -> Any:
    return pytest.raises(ConfigError, match=message)
