"""Tokenizer files: saved and loaded, and what is refused."""

import copy
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from tokenizers import ByteLevelBPETokenizer

from anyformer import recipe
from anyformer.config import ConfigError
from anyformer.data.tokenizer import PAIRS, TextTokenizer, train_tokenizer
from tests.data.tokenizer_cases import ANY_TEXT, SPECS, TEXTS, made, of, refused, words

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
