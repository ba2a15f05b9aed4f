"""Tokenizers of public folders: every kind of file, what stands around a text, and which token has which role."""

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.implementations import BertWordPieceTokenizer

from anyformer.config import ConfigError
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop import public_tokenizers as tokens
from anyformer.interop.family import Framing

ENDS = Framing(before=("bos",), after=("eos",))
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<|im_end|>"]


def write(folder: Path, **settings: Any) -> Path:
    """A folder with a small tokenizer.json, and settings."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *"abcdef"])}
    inner = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(SPECIAL)
    inner.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# -- roles ------------------------------------------------------------------------------------------------------------


def test_settings_name_the_roles(tmp_path: Path) -> None:
    settings = {"eos_token": "<|im_end|>", "bos_token": None, "pad_token": {"content": "<pad>", "lstrip": False}}
    found = tokens.read(write(tmp_path, **settings), Framing(), {"bos_token_id": 0})
    assert (found.eos, found.bos, found.pad, found.unk) == (4, None, 1, 3)
    again = TextTokenizer.from_json(found.to_json())
    assert (again.eos, again.bos, again.pad, again.unk) == (4, None, 1, 3)
    assert again.encode("abc<|im_end|>") == found.encode("abc<|im_end|>")
    assert 4 not in again.encode("abc<|im_end|>")
    assert again.decode([4, 5, 6]) == "ab"


def test_without_settings_ids_and_usual_names_tell(tmp_path: Path) -> None:
    found = tokens.read(write(tmp_path), Framing(), {"eos_token_id": [4, 2], "pad_token_id": -1})
    assert (found.eos, found.bos, found.pad, found.unk) == (4, 0, 1, 3)


def test_a_role_without_a_token_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"tokenizer_config\.json: mask_token = '<gap>': the tokenizer has no such"):
        found = tokens.read(write(tmp_path, mask_token="<gap>", eos_token="</s>"), Framing(), {})
    assert (found.mask, found.eos) == (None, 2)


def test_what_stands_around_a_text(tmp_path: Path) -> None:
    found = tokens.read(write(tmp_path, bos_token="<s>", eos_token="</s>"), ENDS, {})
    assert found.around == ([0], [2])
    assert found.encode("ab") == [5, 6]
    assert TextTokenizer.from_json(found.to_json()).around == ([0], [2])
    assert tokens.read(write(tmp_path, bos_token="<s>"), Framing(), {}).around == ([], [])


def test_wrong_roles(tmp_path: Path) -> None:
    text = tokens.read(write(tmp_path, eos_token="</s>"), Framing(), {}).to_json()
    with pytest.raises(ConfigError, match="the tokenizer has no </t>"):
        TextTokenizer.from_json(text.replace('"eos": "</s>"', '"eos": "</t>"'))
    with pytest.raises(ConfigError):
        TextTokenizer.from_json(text.replace('"eos": "</s>"', '"eos": "</s>'))


# -- BERT's vocab.txt -------------------------------------------------------------------------------------------------

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdeé", *(f"##{c}" for c in "abcdeé"), "cab", "##bed", "中"]


@pytest.mark.parametrize("lower", [True, False])
@given(text=st.text(alphabet="abcdeéABCDEÉ中 .,", max_size=20))
def test_word_pieces(lower: bool, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": lower, "cls_token": "[CLS]", "sep_token": "[SEP]"})
    )
    theirs = BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=lower)
    found = tokens.read(folder, ENDS, {})
    assert found.around[0] + found.encode(text) + found.around[1] == theirs.encode(text).ids


@pytest.mark.parametrize("words", ["ACDEFGHIKLMNPQRSTVWY", "가나다라마바사아자차", "éèêëàâäôöû"])
def test_a_vocabulary_that_lower_case_texts_do_not_reach_is_warned_about(words: str, tmp_path: Path) -> None:
    """Capitals, Hangul (which loses its accents as separate letters) and accents: BERT's default maps all to [UNK]."""
    (tmp_path / "vocab.txt").write_text("\n".join([*PIECES[:5], *words]), encoding="utf-8")
    share = round(100 * len(words) / (5 + len(words)))
    with pytest.warns(UserWarning, match=rf"vocab\.txt: {share}% of the vocabulary, such as '{words[0]}', cannot be"):
        found = tokens.read(tmp_path, Framing(), {})
    assert set(found.encode(" ".join(words))) == {1}
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    found = tokens.read(tmp_path, Framing(), {})
    assert found.encode(" ".join(words)) == list(range(5, 5 + len(words)))


def test_wrong_word_pieces(tmp_path: Path) -> None:
    for lines, said in ((["a", "[UNK]", "a"], "twice"), (["a", "b"], r"no \[UNK\]")):
        (tmp_path / "vocab.txt").write_text("\n".join(lines))
        with pytest.raises(ConfigError, match=rf"vocab\.txt: .*{said}"):
            tokens.read(tmp_path, Framing(), {})


def test_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES), encoding="utf-8")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[NEW]": len(PIECES), "[ALSO]": len(PIECES) + 1}))
    assert tokens.read(tmp_path, Framing(), {}).size == len(PIECES) + 2
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[NEW]": 99}))
    with pytest.raises(ConfigError, match=rf"\[NEW\] = 99: the next id is {len(PIECES)}"):
        tokens.read(tmp_path, Framing(), {})


# -- SentencePiece ----------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def block(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def model_file(
    path: Path, pieces: list[tuple[str, float, int]], algorithm: int, rules: bytes = b"", **training: int
) -> Path:
    data = b"".join(
        block(1, block(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, kind))
        for text, score, kind in pieces
    )
    data += block(2, number(3, algorithm) + number(35, training.get("fallback", 0)))
    path.write_bytes(data + block(3, rules))
    return path


CONTROL = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
BYTES = [(f"<0x{i:02X}>", 0.0, 6) for i in range(256)]
WORDS = [
    ("▁", -3.0),
    ("a", -3.5),
    ("b", -3.25),
    ("c", -5.0),
    ("ab", -4.0),
    ("▁a", -4.5),
    ("bc", -6.0),
    ("▁ab", -6.5),
    ("cab", -7.5),
]
UNIGRAM = [*CONTROL, *((text, score, 1) for text, score in WORDS)]


def best(text: str) -> float:
    """The score of the likeliest way to cut a text into pieces."""
    scores, found = dict(WORDS), [0.0]
    for end in range(1, len(text) + 1):
        found.append(max(found[start] + scores.get(text[start:end], -1e9) for start in range(end)))
    return found[-1]


@given(text=st.text(alphabet="abc ", min_size=1, max_size=14))
def test_unigrams(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("spm")
    path = model_file(folder / "spiece.model", UNIGRAM, 1)
    (folder / "tokenizer_config.json").write_text('{"extra_ids": 3}')
    found = tokens.read(path, Framing(), {"model_type": "t5"})
    assert found.size == len(UNIGRAM) + 4  # <pad> is new, too
    ids, plain = found.encode(text), " ".join(text.split())
    pieces = [UNIGRAM[i][0] for i in ids]
    assert "".join(pieces) == ("▁" + plain.replace(" ", "▁") if plain else "")
    assert sum(dict(WORDS)[piece] for piece in pieces) == pytest.approx(best("".join(pieces)))
    assert found.decode(ids) == plain
    assert found.around == ([], [2])


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's way: the neighbours that make the best piece, the first of those that are alike."""
    parts = list(text)
    while pairs := [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]:
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return parts


@given(text=st.text(alphabet="abc é", min_size=1, max_size=14))
def test_byte_pairs(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As Llama's: spaces as they are, and bytes for what is unknown."""
    merges = ["ab", "▁a", "ca", "▁ab", "cab", "aa"]
    chars = ["▁", "a", "b", "c"]
    scored = [(text, -float(i), 1) for i, text in enumerate([*merges, *chars])]
    pieces = [*CONTROL, *BYTES, *scored]
    folder = tmp_path_factory.mktemp("spm")
    model_file(folder / "tokenizer.model", pieces, 2, number(4, 0), fallback=1)
    found = tokens.read(folder, Framing(), {"model_type": "llama"})
    scores = {text: score for text, score, _ in scored if len(text) > 1}
    ids = {text: i for i, (text, _, _) in enumerate(pieces)}
    expected = []
    for part in merged("▁" + text.replace(" ", "▁"), scores):
        expected += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    assert found.encode(text) == expected
    assert found.decode(found.encode(text)) == text
    assert found.around == ([1], [])


def test_damaged_models(tmp_path: Path) -> None:
    whole = model_file(tmp_path / "x.model", UNIGRAM, 1).read_bytes()
    for data in (b"", b"abc", whole[:-3], whole[: len(whole) // 2], b"\xff" * 40, whole[: len(whole) // 2 + 1] + whole):
        (tmp_path / "x.model").write_bytes(data)
        with pytest.raises(ConfigError, match=r"x\.model"):
            tokens.read(tmp_path, Framing(), {"model_type": "t5"})
    model_file(tmp_path / "x.model", UNIGRAM, 3)
    with pytest.raises(ConfigError, match=r"x\.model: .*only unigram \(1\) and BPE \(2\) are read"):
        tokens.read(tmp_path, Framing(), {"model_type": "t5"})


# -- GPT-2's two files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "merges"), [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_two_files(tmp_path: Path, vocab: str, merges: str) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate([*letters, "Ġt", "Ġth", "<|endoftext|>"])}
    (tmp_path / vocab).write_text(json.dumps(ids))
    (tmp_path / merges).write_text("#version: 0.2\nĠ t\nĠt h\n")
    found = tokens.read(tmp_path, Framing(), {"bos_token_id": 258, "eos_token_id": 258})
    assert (found.size, found.bos, found.eos, found.pad) == (259, 258, 258, None)
    assert found.decode(found.encode("in the 中文 é")) == "in the 中文 é"
    assert ids["Ġth"] in found.encode("in the")
