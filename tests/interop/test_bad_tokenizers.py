"""Tokenizer files that are wrong: refused by file and key, in time, and without harm to this process."""

import base64
import json
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from anyformer.config import ConfigError
from anyformer.data import tokenizer_files
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.interop import public_tokenizers as tokens
from anyformer.interop.family import Framing
from anyformer.recipe import TokenizerFile
from tests.interop.slow_cases import lay_out, load
from tests.interop.test_public_tokenizers import PIECES

CASES, MODELS, _ = load()


def refused(folder: Path, model_type: str = "t5", **config: Any) -> str:
    """Return the message with which a folder is refused."""
    with pytest.raises(ConfigError) as error:
        tokens.read(folder, Framing(), {"model_type": model_type, **config})
    return str(error.value)


def changed(folder: Path, name: str, **settings: Any) -> Path:
    """Lay out a case with other values in tokenizer_config.json."""
    lay_out(CASES[name], MODELS, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **settings}))
    return folder


# -- no tokenizer -----------------------------------------------------------------------------------------------------


def test_an_empty_folder_lists_what_is_read(tmp_path: Path) -> None:
    said = refused(tmp_path)
    for name in ("tokenizer.json", "vocab.txt", "vocab.json with merges.txt", ".model", "source.spm", "target.spm"):
        assert name in said


@pytest.mark.parametrize("lost", ["source.spm", "target.spm", "vocab.json"])
def test_marian_needs_all_its_files(lost: str, tmp_path: Path) -> None:
    lay_out(CASES["Marian"], MODELS, tmp_path)
    (tmp_path / lost).unlink()
    read = tokens.read_source if lost == "source.spm" else partial(tokens.read, how=Framing())
    with pytest.raises(ConfigError, match=lost):
        read(tmp_path, config={"model_type": "marian"})


def test_several_models_are_refused(tmp_path: Path) -> None:
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(MODELS["llama"])
    assert "several SentencePiece models: a.model, b.model" in refused(tmp_path)
    (tmp_path / "spiece.model").write_bytes(MODELS["padded"])  # the usual name decides
    assert tokens.read(tmp_path, Framing(), {"model_type": "t5"}).size > 100


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(CASES["T5"], MODELS, tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    said = "spiece.model: is a SentencePiece model, which needs: pip install 'anyformer[sentencepiece]'"
    assert said in refused(tmp_path)


# -- classes ----------------------------------------------------------------------------------------------------------


def test_unknown_classes_are_refused(tmp_path: Path) -> None:
    assert "tokenizer_class = 'XLNetTokenizer'" in refused(changed(tmp_path, "T5", tokenizer_class="XLNetTokenizer"))


def test_families_without_sentencepiece_are_refused(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(MODELS["padded"])
    assert "spiece.model: belongs to no known tokenizer_class" in refused(tmp_path, "gpt2")


@pytest.mark.parametrize(("name", "model"), [("XLMRoberta", "padded"), ("Pegasus", "unigram")])
def test_another_order_of_pieces_is_refused(name: str, model: str, tmp_path: Path) -> None:
    case = CASES[name]._replace(files=dict.fromkeys(CASES[name].files, model))
    assert "must begin with" in refused(lay_out(case, MODELS, tmp_path), case.model_type)


def test_ids_that_do_not_follow_are_refused(tmp_path: Path) -> None:
    token = {"content": "<new>", "special": True}
    said = refused(changed(tmp_path, "Llama", added_tokens_decoder={"5000": token}), "llama")
    assert "tokenizer_config.json: <new> = 5000: the next id is" in said


# -- wrong types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10**8, 10**30, -1, 700, "100", 1.5, True, [1]])
def test_extra_ids(count: Any, tmp_path: Path) -> None:
    """A number beyond the table's rows must not allocate anything."""
    said = refused(changed(tmp_path, "T5", extra_ids=count), vocab_size=699)
    assert "tokenizer_config.json: extra_ids = " in said


WRONG = [
    ("T5", "legacy", "no"),
    ("T5", "eos_token", 3),
    ("T5", "eos_token", {"content": ["</s>"]}),
    ("T5", "additional_special_tokens", "x"),
    ("T5", "additional_special_tokens", [{}]),
    ("T5", "tokenizer_class", ["T5Tokenizer"]),
    ("T5", "sp_model_kwargs", {"enable_sampling": True}),
    ("Llama", "add_bos_token", 1),
    ("Llama", "added_tokens_decoder", []),
    ("Llama", "added_tokens_decoder", {"x": {"content": "a"}}),
    ("Llama", "added_tokens_decoder", {"7": "a"}),
    ("Llama", "added_tokens_decoder", {"7": {"content": "a", "special": "yes"}}),
    ("Llama", "bos_token", None),
    ("Albert", "do_lower_case", "true"),
    ("Pegasus", "offset", 10**9),
    ("MBart", "src_lang", "en"),
    ("M2M100", "language_codes", "m2m"),
    ("Marian", "separate_vocabs", True),
]


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_wrong_settings(name: str, key: str, value: Any, tmp_path: Path) -> None:
    said = refused(changed(tmp_path, name, **{key: value}), CASES[name].model_type)
    assert f"tokenizer_config.json: {key} = " in said


@pytest.mark.parametrize("key", ["do_lower_case", "strip_accents", "tokenize_chinese_chars", "unk_token"])
def test_wrong_settings_of_word_pieces(key: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES), encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({key: [7]}))
    assert f"special_tokens_map.json: {key} = [7]" in refused(tmp_path, "bert")


@pytest.mark.parametrize("table", [[], {"a": "1"}, {"a": None}, {"a": -1}, {"a": 1.0}, {"a": 1, "b": {}}])
def test_wrong_added_tokens(table: Any, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES), encoding="utf-8")
    (tmp_path / "added_tokens.json").write_text(json.dumps(table))
    assert "added_tokens.json: " in refused(tmp_path, "bert")


@pytest.mark.parametrize("table", [{}, {"a": 0, "<unk>": 5}, {"<unk>": "0"}, {"a": 0}, [1]])
def test_wrong_vocabularies(table: Any, tmp_path: Path) -> None:
    lay_out(CASES["M2M100"], MODELS, tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(table))
    assert "vocab.json: " in refused(tmp_path, "m2m_100")


# -- files that harm --------------------------------------------------------------------------------------------------


def written(folder: Path, **parts: Any) -> Path:
    """Write a tokenizer.json with some parts of its own."""
    made = json.loads(Tokenizer(models.BPE({"a": 0, "b": 1, "<unk>": 2}, [], unk_token="<unk>")).to_str())
    (folder / "tokenizer.json").write_text(json.dumps(made | parts))
    return folder


CATASTROPHIC = {"type": "Split", "pattern": {"Regex": "(x+)+$"}, "behavior": "Isolated", "invert": False}
BROKEN_MAP = base64.b64encode(struct.pack("<I", 16) + b"\xff" * 16).decode()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"pre_tokenizer": CATASTROPHIC}, "retry-limit"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": BROKEN_MAP}}, "index out of bounds"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "Precompiled"),
    ],
)
def test_panics_are_found_at_import(parts: dict[str, Any], said: str, tmp_path: Path) -> None:
    message = refused(written(tmp_path, **parts))
    assert "tokenizer.json: is refused: the tokenizers library fails on it" in message
    assert said in message
    with pytest.raises(ConfigError, match="is refused"):
        train_tokenizer(TokenizerFile(path=str(tmp_path / "tokenizer.json")), [])
    hidden = '{"roles": {},' + (tmp_path / "tokenizer.json").read_text()[1:]  # a key of ours hides nothing
    (tmp_path / "tokenizer.json").write_text(hidden)
    assert "is refused" in refused(tmp_path)


def test_a_panic_at_run_time_is_an_error_of_the_text(tmp_path: Path) -> None:
    found = TextTokenizer.load(written(tmp_path, pre_tokenizer=CATASTROPHIC))
    assert found.encode("ab") == [0, 1]
    with pytest.raises(ConfigError, match="the tokenizer cannot read this text"):
        found.encode("x" * 80 + "b")


@pytest.mark.parametrize(
    ("code", "said"),
    [("import time; time.sleep(60)", "more than 1 s"), ("import os; os.abort()", "crashes on it (SIGABRT)")],
)
def test_hangs_and_crashes(code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "CHILD", code)
    monkeypatch.setattr(tokenizer_files, "TRIAL_SECONDS", 1)
    folder = written(tmp_path, model={"type": "BPE", "vocab": {"a": 0, str(tmp_path): 1}, "merges": []})
    assert said in refused(folder)


def replacing(text: str, factor: int, times: int) -> dict[str, Any]:
    each = {"type": "Replace", "pattern": {"String": text}, "content": text * factor}
    return {"type": "Sequence", "normalizers": [each] * times, "decoders": [each] * times}


MULTIPLYING = [
    (110, 1, "it multiplies texts: it makes "),
    (100, 4, "it takes more than 64 MiB of memory to read short texts, which it may multiply"),
    (10, 11, "it takes more than "),  # CPU time or memory
]


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(("factor", "times", "said"), MULTIPLYING)
@pytest.mark.parametrize("text", ["a", "중"])
def test_a_tokenizer_that_multiplies_texts_is_refused(
    part: str, text: str, factor: int, times: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "PROBE_SECONDS", 1)
    monkeypatch.setattr(tokenizer_files, "PROBE_BYTES", 64 << 20)
    model = {"type": "BPE", "vocab": {text: 0, "b": 1}, "merges": []}
    assert said in refused(written(tmp_path, model=model, **{part: replacing(text, factor, times)}))


def test_a_tokenizer_that_expands_characters_is_read(tmp_path: Path) -> None:
    written(tmp_path, normalizer=replacing("a", 18, 1), decoder=replacing("b", 18, 1))
    assert TextTokenizer.load(tmp_path, foreign=True).encode("ab") == [0] * 18 + [1]


def test_a_broken_map_of_a_model_is_refused(tmp_path: Path) -> None:
    data, part = MODELS["padded"], b"\x1a"  # field 3, the normaliser, comes after all pieces
    at = data.index(b"nmt_nfkc") + len(b"nmt_nfkc") + 6
    assert part in data
    (tmp_path / "spiece.model").write_bytes(data[:at] + b"\xff" * 4000 + data[at + 4000 :])
    assert "spiece.model: " in refused(tmp_path)
