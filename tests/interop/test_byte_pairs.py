"""GPT-2's two files: the ids of `tokenizers` and `tiktoken` on lines of many scripts, emoji and code.

ANYFORMER_GPT2 names a folder with the published `encoder.json` and `vocab.bpe`: then there are 10,000 lines. Without
it a small vocabulary in the same form is learnt from the lines.
"""

import importlib
import json
import os
import random
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop import public_tokenizers as tokens
from anyformer.interop.family import Framing

END = "<|endoftext|>"
# GPT-2's: contractions, words, numbers, other signs, spaces
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
SIGNS = "👍🏽 👩‍👩‍👧 🇰🇷 🏳️‍🌈 é e\u0301 Ⅷ ½ ﷽ \u200b \u3000 \ufeff \x00 \x7f � 𝕏"
PROSE = (
    "I'll we've don't DON'T naïve coöperate the then there 3.14 1,000,000 2024-01-01 http://a.b/c?d=e#f "
    "한국어 문장을 읽는다 안녕하세요 ㅋㅋㅋ 값이 훑어보다 中文 句子 没有 空格 因此很长的一个句子 日本語 です"
)
WORDS = [*PROSE.split(), *SIGNS.split(" ")]
CODE = ["def f(x):\n\treturn  x**2", "if (a&&b){c--;}", "    for i in range(10):", "<div class='x'>", "λ = ∑ᵢ xᵢ²", END]


def lines(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)

    def piece() -> str:
        kind = rng.random()
        if kind < 0.6:
            return rng.choice(WORDS)
        if kind < 0.75:
            return rng.choice(CODE)
        first, last = rng.choice([(0x20, 0x7E), (0xAC00, 0xD7A3), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0, 0xD7FF)])
        return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 6)))

    gaps = [" ", "", "  ", "\t", "\n", " \n "]
    return ["".join(piece() + rng.choice(gaps) for _ in range(rng.randint(0, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("ANYFORMER_GPT2"):
        return Path(named)
    made = tmp_path_factory.mktemp("gpt2")
    learnt = ByteLevelBPETokenizer()
    learnt.train_from_iterator(lines(200, seed=1), vocab_size=1500, special_tokens=[], show_progress=False)
    vocab, merges = (Path(file) for file in learnt.save_model(str(made)))
    ids = json.loads(vocab.read_text(encoding="utf-8"))
    (made / "encoder.json").write_text(json.dumps(ids | {END: len(ids)}))
    merges.rename(made / "vocab.bpe")
    vocab.unlink()
    return made


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return lines(10_000 if "ANYFORMER_GPT2" in os.environ else 400)


def test_tokenizers(folder: Path, texts: list[str]) -> None:
    theirs = ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    found = tokens.read(folder, Framing(), {})
    assert found.encode_batch(texts) == [encoding.ids for encoding in theirs.encode_batch(texts)]
    assert found.decode_batch(found.encode_batch(texts)) == texts
    assert (found.size, found.eos) == (theirs.get_vocab_size(), theirs.token_to_id(END))
    again = TextTokenizer.from_json(found.to_json())
    assert again.encode_batch(texts) == found.encode_batch(texts)


def test_tiktoken(folder: Path, texts: list[str]) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    load = importlib.import_module("tiktoken.load")
    ranks = load.data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    theirs = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END: len(ranks)})
    found = tokens.read(folder, Framing(), {})
    assert found.encode_batch(texts) == [theirs.encode_ordinary(text) for text in texts]
