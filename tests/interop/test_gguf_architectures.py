"""Every architecture of GGUF files: llama.cpp gives our greedy ids, and the file loads back."""

from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.config import ModelConfig
from anyformer.config.io import override
from anyformer.data.tokenizer import train_tokenizer
from anyformer.interop import gguf_file, import_model
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.phi import PHI3
from anyformer.interop.gguf_export import to_gguf
from anyformer.interop.same_model import differences
from anyformer.recipe import Bytes, LanguageModel
from anyformer.runs.run import Run

pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("xllamacpp", reason="needs the extra `dev-all` (llama.cpp)")
from tests.interop.llama_cpp import LlamaCpp

SPEC, TEXT = LanguageModel(), train_tokenizer(Bytes(), ["a"])
LENGTH, NEW = 160, 60
SIZES = {"depth": 2, "width": 64, "heads": 4, "vocab": TEXT.size}
SCALING = "decoder.position.scaling={kind='%s', factor=4.0%s}"
BIASES = ("decoder.blocks.*.mixer.bias=true", "decoder.blocks.*.mixer.output.bias=true")


def llama(*changes: str) -> ModelConfig:
    return override(af.presets.llama(**SIZES, kv_heads=2), changes)


def gemma(name: str, *changes: str) -> ModelConfig:
    """A Gemma whose texts are longer than its windows."""
    config = getattr(af.presets, name)(**SIZES | {"depth": 7}, kv_heads=2, key_width=16)
    near = range(1 if name == "gemma2" else 5)
    windows = [f"decoder.blocks.{i}.mixer.pattern={{kind='window', before=11, after=0}}" for i in near]
    return override(config, [*windows, *changes])


def phi3() -> ModelConfig:
    data = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    data |= {"num_key_value_heads": 2, "vocab_size": TEXT.size, "partial_rotary_factor": 0.5, "pad_token_id": 0}
    return PHI3.config(Fields(data, "config.json"), ["Phi3ForCausalLM"])


CONFIGS = {
    "llama": lambda: llama("tie=output"),
    "llama-biases": lambda: llama(*BIASES, "decoder.blocks.*.feedforward.bias=true"),
    "llama-wide-heads": lambda: llama("decoder.blocks.*.mixer.key_width=32"),
    "llama-linear": lambda: llama(SCALING % ("linear", "")),
    "llama-yarn": lambda: llama(SCALING % ("yarn", ", original_length=40"), "context=160"),
    "llama-llama3": lambda: llama(SCALING % ("llama3", ", original_length=8192")),
    "qwen2": lambda: llama("decoder.blocks.*.mixer.bias=true"),
    "qwen3": lambda: af.presets.qwen3(**SIZES, kv_heads=2),
    "gemma": lambda: af.presets.gemma(**SIZES, kv_heads=2, key_width=32),
    "gemma2": lambda: gemma("gemma2"),
    "gemma3": lambda: gemma("gemma3"),
    "gemma3-linear": lambda: gemma("gemma3", SCALING % ("linear", "")),
    "phi3": phi3,
    "gpt2-untied": lambda: override(af.presets.gpt2(**SIZES, length=LENGTH), ["tie=none"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_gives_our_ids_and_the_file_loads_back(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = af.Transformer(CONFIGS[name]()).eval()
    with torch.no_grad():  # a wrong position, bias or norm shows in the ids
        for x in model.parameters():
            x.normal_(std=0.3) if x.dim() > 1 else x.add_(0.2 * torch.randn_like(x))
    run = Run(model, SPEC.build(TEXT), SPEC, Path("mine"))
    architecture = to_gguf(run, tmp_path / "model.gguf")
    assert architecture == name.partition("-")[0]
    theirs = LlamaCpp(tmp_path / "model.gguf", LENGTH)
    for prompt in ("the quick brown fox", 3 * "0123456789"):
        ids = TEXT.encode(prompt)
        expected = af.generate(model, torch.tensor([ids]), max_new_tokens=NEW)[0, len(ids) :].tolist()
        found = theirs.greedy(ids, NEW)
        assert found == expected[: len(found)]
        assert len(found) == NEW or found[-1] == TEXT.eos
    back = import_model(tmp_path / "model.gguf", tmp_path / "run")
    assert not differences(run.config, back.config.model_copy(update={"special": run.config.special}), "")
    rounded = name.startswith("gemma")  # norms are written as 1 + γ
    ours, read = model.state_dict(), back.model.cpu().state_dict()
    assert all(torch.allclose(x, read[key], rtol=0, atol=1e-7 if rounded else 0) for key, x in ours.items())
    to_gguf(back, tmp_path / "again.gguf")
    first, second = (gguf_file.read(tmp_path / file).tensors for file in ("model.gguf", "again.gguf"))
    assert {name: bytes(x.data()) for name, x in first.items()} == {name: bytes(x.data()) for name, x in second.items()}
