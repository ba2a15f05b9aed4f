"""Beam search by GPU kernels, in Triton's interpreter (TRITON_INTERPRET=1): the hypotheses of the plain search."""

import os
from importlib.util import find_spec

import pytest
import torch

from anyformer import presets
from anyformer.attention import attend, choose, few_queries
from anyformer.generation import session, top_k
from anyformer.generation.beam_search import beam_search
from anyformer.nn.model import Transformer

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
SMALL = {
    "t5": lambda: presets.t5(depth=2, width=32, heads=2, vocab=40),
    "llama": lambda: presets.llama(depth=2, width=32, heads=2, kv_heads=1, vocab=40),
}


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", SMALL)
def test_as_plain(name: str, monkeypatch: pytest.MonkeyPatch):
    """Candidates of all beams by one kernel, keys and values of beams read where they are."""
    torch.manual_seed(0)
    model = Transformer(SMALL[name]()).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(4 if x.dim() > 1 else 1)  # so that no two beams are equally good
    ids = torch.randint(5, 40, (2, 5))
    segments = torch.zeros_like(ids)
    segments[1, :2] = -1

    def search() -> tuple[torch.Tensor, ...]:
        return beam_search(model, ids, beams=3, max_new_tokens=7, n_best=2, stop=(4,), segments=segments)

    plain, tables, launch, obstacle = search(), [], few_queries.launch, choose._no_decode

    def watched(problem: few_queries.Problem, *out: torch.Tensor) -> None:
        tables.append(problem.table is not None)
        launch(problem, *out)

    monkeypatch.setattr(attend, "HAS_TRITON", True)
    monkeypatch.setattr(attend, "decide_once", choose.decide)
    monkeypatch.setattr(choose, "_no_decode", lambda pair, needs, at: obstacle(
        pair, needs, at._replace(device="cuda", dtype=torch.bfloat16)
    ))  # fmt: skip
    monkeypatch.setattr(few_queries, "launch", watched)
    monkeypatch.setattr(session, "_can_share_rows", lambda cache: True)
    monkeypatch.setattr(top_k, "can_find_candidates", lambda *given: True)
    found = search()
    assert any(tables)
    assert torch.equal(found[0], plain[0])
    torch.testing.assert_close(found[1], plain[1])
