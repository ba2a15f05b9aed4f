"""Decode steps that read pages in place equal those of a static cache."""

import pytest
import torch

from anyformer.attention.cache.paged import PagedCache
from anyformer.attention.lowered import FewQueries
from anyformer.config import LM, Alibi, Attention, Block, Causal, ModelConfig, Pattern, Rotary, Stack, Tokens, Window
from anyformer.config.position import Position
from anyformer.generation.engine.sequence_pages import new_pool
from anyformer.generation.step import step
from anyformer.nn.model import Transformer

CUDA = torch.device("cuda")
ROWS, PROMPT, STEPS, SIZE = 5, 40, 12, 16


@pytest.mark.parametrize("pattern", [Causal(), Window(before=20, after=0)], ids=["causal", "window"])
@pytest.mark.parametrize("position", [Rotary(), Alibi()], ids=["rotary", "alibi"])
@torch.no_grad()
def test_pages_equal_a_static_cache(pattern: Pattern, position: Position, monkeypatch: pytest.MonkeyPatch):
    block = Block(mixer=Attention(heads=4, kv_heads=2, pattern=pattern))
    stack = Stack(depth=2, blocks=(block,), position=position)
    config = ModelConfig(width=256, target=Tokens(vocab=100), decoder=stack, head=LM(), tie="output")
    torch.manual_seed(0)
    model = Transformer(config).to(CUDA, torch.bfloat16).eval()
    ids = torch.randint(100, (ROWS, PROMPT + STEPS), device=CUDA)
    pool = new_pool(model, (64, 0), SIZE)
    per_row = (PROMPT + STEPS) // SIZE + 1
    table = (1 + torch.randperm(63)[: ROWS * per_row]).view(ROWS, per_row).to(CUDA)
    static = model.new_cache(ROWS, PROMPT + STEPS, kind="static")

    def paged(at: int) -> PagedCache:
        return PagedCache(pool, table, torch.full((ROWS,), at, device=CUDA))

    for cache in (static, paged(0)):
        step(model, cache, ids[:, :PROMPT], None, PROMPT)
    used = []
    monkeypatch.setattr("anyformer.attention.attend.few_queries", _watched(used))
    for at in range(PROMPT, PROMPT + STEPS):
        new = ids[:, at : at + 1]
        (_, ours), (_, expected) = (step(model, cache, new, None, at + 1) for cache in (paged(at), static))
        torch.testing.assert_close(ours.float(), expected.float(), atol=0.05, rtol=0.05)
    assert used.count(True) == used.count(False) == 2 * STEPS


def _watched(used: list[bool]):
    from anyformer.attention.few_queries import few_queries

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lowered: FewQueries, scale: float) -> torch.Tensor:
        used.append(lowered.pages is not None)
        return few_queries(q, k, v, lowered, scale)

    return watched
