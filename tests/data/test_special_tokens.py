"""Special tokens: they come first, and no text spells one."""

import json

import pytest
from hypothesis import given
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anyformer import recipe
from anyformer.data.tokenizer import ROLES, train_tokenizer
from tests.data.tokenizer_cases import ANY_TEXT, SPECS, made, of, words


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
