"""Log-likelihoods of continuations and texts are those of `transformers`, over 200 rows of a local task."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import anyformer as af
from anyformer.config import ConfigError
from anyformer.lab.evaluation import continuations, texts
from anyformer.recipe import Seq2Seq
from anyformer.runs.run import Run
from tests.interop.public import LENGTH, VOCAB, PublicModel

ROWS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose texts begin with <s>, and a task of four answers to each question."""
    folder = tmp_path_factory.mktemp("harness")
    config = hf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    PublicModel(hf.LlamaForCausalLM, config, ("<s>", "$A")).saved(folder / "model")
    draw = random.Random(0)

    def words(n: int) -> str:
        return " ".join("".join(draw.choices("abcdeé", k=draw.randint(1, 4))) for _ in range(draw.randint(1, n)))

    rows = [
        {"question": words(9), "choices": [words(3) for _ in range(4)], "answer": draw.randrange(4), "text": words(60)}
        for _ in range(ROWS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(folder: Path) -> Any:
    return af.from_hf(folder / "model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    return model, hf.AutoTokenizer.from_pretrained(folder / "model")


def log_p(theirs: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all tokens but the first, and whether each is the most probable."""
    with torch.no_grad():
        logits = theirs[0](torch.tensor([ids[:-1]])).logits[0].float()
    after = torch.tensor(ids[1:])
    return logits.log_softmax(-1).gather(1, after[:, None])[:, 0], logits.argmax(-1) == after


def test_continuations_equal_transformers(folder: Path, run: Any, theirs: Any) -> None:
    rows = rows_of(folder)
    pairs = [(f"{row['question']}:\n", f" {row['choices'][row['answer']]}") for row in rows]
    for (context, continuation), found in zip(pairs, continuations(run, pairs), strict=True):
        whole = theirs[1].encode(context + continuation)
        n = len(whole) - len(theirs[1].encode(context.rstrip()))
        values, top = log_p(theirs, whole)
        assert found.tokens == n
        assert found.total == pytest.approx(values[-n:].sum().item(), abs=1e-4)
        assert found.greedy == bool(top[-n:].all())


def test_texts_equal_transformers_in_windows(folder: Path, run: Any, theirs: Any) -> None:
    documents = [row["text"] for row in rows_of(folder)]
    lengths = set()
    for document, found in zip(documents, texts(run, documents), strict=True):
        ids = theirs[1].encode(document)
        whole, total = [0, *ids], 0.0
        for done in range(0, len(ids), LENGTH):
            end = min(done + LENGTH, len(ids))
            values, _ = log_p(theirs, whole[max(0, end - LENGTH) : end + 1])
            total += values[done - end :].sum().item()
        lengths.add(len(ids) > LENGTH)
        assert found.tokens == len(ids)
        assert found.total == pytest.approx(total, abs=1e-4 * max(1, len(ids) / 20))
    assert lengths == {True, False}


def test_a_long_context_loses_its_start(run: Any) -> None:
    long, short = continuations(run, [("ab " * 200 + "cab", " abc"), ("ab " * 30 + "cab", " abc")])
    assert long.tokens == short.tokens
    assert math.isfinite(long.total)
    with pytest.raises(ConfigError, match=r"continuation 1: has .* tokens: must have from 1 to 64"):
        continuations(run, [("ab", " abc" * 80)])
    with pytest.raises(ConfigError, match="continuation 2: has 0 tokens"):
        continuations(run, [("ab", "c"), ("ab", "")])


def test_only_language_models_are_scored(run: Any) -> None:
    config = af.presets.vaswani(depth=1, width=8, heads=2, vocab=VOCAB)
    spec = Seq2Seq()
    other = Run(af.Transformer(config), spec.build(run.tokenizer), spec, Path("nowhere"))
    with pytest.raises(ConfigError, match="log-likelihoods are of language models"):
        continuations(other, [("a", "b")])
