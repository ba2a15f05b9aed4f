"""SentencePiece folders without a tokenizer.json: the ids of the slow tokenizers of `transformers` 4.x.

Expected ids, models and versions are in `slow_ids.tar.xz`; `slow_ids.py` makes it.
"""

from pathlib import Path

import pytest

from anyformer.config import ConfigError
from anyformer.data.chat_template import ChatTemplate
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop import public_tokenizers as tokens
from anyformer.interop.family import Framing
from tests.interop.slow_cases import lay_out, load
from tests.interop.slow_lines import lines

CASES, MODELS, VERSIONS = load()
LINES = [(group, text) for group, texts in lines().items() for text in texts]


def same(found: TextTokenizer, texts: list[tuple[str, str]], expected: list[list[int]]) -> None:
    assert len(texts) == len(expected)
    ids = found.encode_batch([text for _, text in texts])
    wrong = [
        f"{group}: {text!r}\n  here     {here}\n  expected {there}"
        for (group, text), here, there in zip(texts, ids, expected, strict=True)
        if here != there
    ]
    assert not wrong, f"{len(wrong)} of {len(texts)} lines differ from {VERSIONS}:\n" + "\n".join(wrong[:5])


@pytest.mark.parametrize("name", CASES)
def test_ids_of_the_slow_tokenizer(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder, config = lay_out(case, MODELS, tmp_path), {"model_type": case.model_type}
    found = tokens.read(folder, Framing(), config)
    source = tokens.read_source(folder, config) or found
    assert source.around == (case.before, case.after)
    same(source, LINES, case.rows)
    if case.target:
        same(found, [pair for pair in LINES if pair[0] != "special"], case.target)


@pytest.mark.parametrize("name", ["Albert", "Llama-added", "Marian"])
def test_a_run_folder_keeps_the_ids(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder, config = lay_out(case, MODELS, tmp_path), {"model_type": case.model_type}
    found = tokens.read_source(folder, config) or tokens.read(folder, Framing(), config)
    again = TextTokenizer.from_json(found.to_json())
    same(again, LINES, case.rows)
    assert again.around == (case.before, case.after)
    assert again.with_special(["<new>"]).encode("한국 ﬁ") == found.encode("한국 ﬁ")


@pytest.mark.parametrize(("name", "joint", "type"), [("XLMRoberta", 2, 0), ("Albert", 1, 1)])
def test_two_texts(name: str, joint: int, type: int, tmp_path: Path) -> None:
    """XLM-R writes its separator twice between two texts and has no token types."""
    case = CASES[name]
    found = tokens.read(lay_out(case, MODELS, tmp_path), Framing(), {"model_type": case.model_type})
    assert found.around_pair == (case.before, case.after * joint, case.after, type)


def test_lower_case_of_sentence_transformers(tmp_path: Path) -> None:
    folder = lay_out(CASES["XLMRoberta"], MODELS, tmp_path)
    found = tokens.read(folder, Framing(), {"model_type": "xlm-roberta"})
    lower = tokens.lowered(found)
    assert lower.encode("STRASSE ÜBER") == found.encode("strasse über") != found.encode("STRASSE ÜBER")
    assert TextTokenizer.from_json(lower.to_json()).encode("STRASSE") == found.encode("strasse")


@pytest.mark.parametrize("name", ["do_lower_case", "split_by_punct"])
def test_text_that_deberta_prepares_in_another_way_is_refused(name: str, tmp_path: Path) -> None:
    folder = lay_out(CASES["DebertaV2"], MODELS, tmp_path)
    (folder / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "DebertaV2Tokenizer", "{name}": true}}')
    with pytest.raises(ConfigError, match=f"{name} = True: is not supported without a tokenizer.json"):
        tokens.read(folder, Framing(), {"model_type": "deberta-v2"})


def test_lines_are_of_every_kind() -> None:
    groups = lines()
    assert sum(map(len, groups.values())) >= 2000
    assert set(groups) >= {"korean", "chinese", "german", "arabic", "emoji", "spaces"}


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("Llama")])
def test_special_tokens_of_a_chat_template(name: str, tmp_path: Path) -> None:
    folder = lay_out(CASES[name], MODELS, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ bos_token + messages[0].content + eos_token }}")
    found = tokens.read(folder, Framing(), {"model_type": CASES[name].model_type})
    chat = ChatTemplate.of(found, "file")
    assert chat is not None
    for text in ("hello", "</s> <s>한국"):
        bos, *ids, eos = chat.encode([{"role": "user", "content": text}])
        assert (bos, eos) == (found.bos, found.eos)
        assert not found.special & {*ids} - {found.unk}
        assert found.decode(ids).strip() == found.decode(found.encode(text)).strip()
