"""Exported folders in CTranslate2: its converter takes them, and its decoder says the same ids."""

from pathlib import Path
from typing import Any

import pytest
import torch

import anyformer as af
from anyformer.config import ModelConfig
from anyformer.data.tokenizer import train_tokenizer
from anyformer.generation.generate import generate
from anyformer.recipe import Characters, LanguageModel
from anyformer.runs.run import Run

ctranslate2 = pytest.importorskip("ctranslate2")
pytest.importorskip("transformers", reason="needs the extra `hf`")

TOKENIZER = train_tokenizer(Characters(), ["the quick brown fox jumps over the lazy dog"])
NEW = 24
SMALL: dict[str, Any] = {"depth": 2, "width": 32, "heads": 4, "vocab": TOKENIZER.size}
CONFIGS = {
    "gpt2": af.presets.gpt2(**SMALL, length=64),
    "llama": af.presets.llama(**SMALL, kv_heads=2, ff=48),
}


def loud(config: ModelConfig) -> Run:
    """Random weights with which greedy ids do not repeat themselves."""
    torch.manual_seed(0)
    model = af.Transformer(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_((0.5 if "blocks" in name and p.dim() > 1 else 0.05) * torch.randn_like(p))
    spec = LanguageModel()
    return Run(model, spec.build(TOKENIZER), spec, Path("nowhere"))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_same_ids(kind: str, tmp_path: Path) -> None:
    run = loud(CONFIGS[kind])
    assert af.to_hf(run, tmp_path / "public", family=kind) == kind
    converter = ctranslate2.converters.TransformersConverter(str(tmp_path / "public"))
    converter.convert(str(tmp_path / "converted"))
    theirs = ctranslate2.Generator(str(tmp_path / "converted"), device="cpu", compute_type="float32", intra_threads=1)
    rows = [run.tokenizer.encode(text) for text in ("the quick", "fox", "o")]
    ours = [generate(run.model, torch.tensor([row]), max_new_tokens=NEW)[0, len(row) :].tolist() for row in rows]
    assert len({id for row in ours for id in row}) > 8
    for row, said in zip(rows, ours, strict=True):
        prompt = [run.tokenizer.inner.id_to_token(id) for id in row]
        (found,) = theirs.generate_batch([prompt], max_length=NEW, include_prompt_in_result=False, end_token=[])
        assert found.sequences_ids == [said]
