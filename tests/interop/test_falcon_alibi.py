"""Falcon with ALiBi, as in Falcon-RW: the scores of `transformers` by its default attention.

Its eager attention adds the bias twice: to the scores and with the mask.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import anyformer as af
from anyformer.config import Alibi
from tests.interop.public import TOLERANCE, furthest, ragged, tensors
from tests.interop.test_decoders import falcon, greedy, logits

MODELS: dict[str, dict[str, Any]] = {
    "in-turn": {"multi_query": False, "parallel_attn": False, "bias": True},
    "sixteen-heads": {"hidden_size": 32, "num_attention_heads": 16, "multi_query": False, "parallel_attn": False},
    "twenty-heads": {"hidden_size": 40, "num_attention_heads": 20},
    "groups": {"new_decoder_architecture": True, "num_kv_heads": 3},
}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Slopes and biases are rounded to bfloat16 there, which shows with sixteen heads and more."""
    falcon(alibi=True, **MODELS[name]).saved(tmp_path / "there")
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "there", attn_implementation="sdpa").eval()
    run = af.from_hf(tmp_path / "there", device="cpu")
    assert isinstance(run.config.decoder.position, Alibi)
    for side in ("right", "left"):
        batch = ragged(44, 40, 17, side=side)
        with torch.no_grad():
            found = run.model(batch.ids, segments=batch.segments)
        assert furthest(found, logits(theirs, batch), batch.real) <= TOLERANCE
    greedy(run.model, theirs)
    af.to_hf(run, tmp_path / "back", family="falcon")
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    exported = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="sdpa").eval()
    assert torch.equal(logits(exported, batch)[batch.real], logits(theirs, batch)[batch.real])
