"""The kernel of beam search's candidates on a GPU: those of the reference, and of the exact distribution."""

import math

import pytest
import torch

from anyformer import presets
from anyformer.generation import top_k
from anyformer.generation.beam_search import beam_search
from anyformer.kernels.beam_candidates import can_find_candidates
from anyformer.nn.model import Transformer

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "width", "vocab", "count"), [(64, 4, 32768, 8), (3, 5, 50257, 10), (1, 1, 97, 2)])
def test_as_the_reference(
    n: int, width: int, vocab: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    # values that half precision holds exactly and that differ within a row, so that no tie leaves the order open
    logits = torch.stack([torch.randperm(vocab, device=CUDA) for _ in range(n * width)]).float() / vocab
    logits = torch.where(logits > 1 - 200 / vocab, (logits - 1) * vocab + 200, -1.0).to(dtype)
    log_p = -torch.rand(n, width, device=CUDA)
    failed = torch.arange(n, device=CUDA) == 1
    logits[-1, 11] = math.nan if n > 2 else 250.0
    assert can_find_candidates(logits, width, count)
    ours = top_k.top_candidates(logits, log_p, failed, count)
    monkeypatch.setattr(top_k, "can_find_candidates", lambda *given: False)
    exact = top_k.top_candidates(logits, log_p, failed, count)
    torch.testing.assert_close(ours[0], exact[0], atol=1e-4, rtol=1e-5)
    alive = ~exact[0].isneginf()
    assert torch.equal(ours[1][alive], exact[1][alive])
    assert torch.equal(ours[2], exact[2])
    assert ours[2].tolist() == [i == 1 or (n > 2 and i == n - 1) for i in range(n)]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("options", [{}, {"stop": (4, 5)}, {"length_penalty": 2.0, "n_best": 3}])
def test_a_search_finds_the_same(options: dict[str, object], compile: bool, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    config = presets.t5(depth=2, width=64, heads=4, vocab=5000)
    model = Transformer(config).to(CUDA).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(6 if x.dim() > 1 else 1)
    ids = torch.randint(3, 5000, (5, 9), device=CUDA)
    ours = [beam_search(model, ids, max_new_tokens=20, compile=compile, **options) for _ in range(3)]
    monkeypatch.setattr(top_k, "can_find_candidates", lambda *given: False)
    other = Transformer(config).to(CUDA).eval()  # without the graphs of the first
    other.load_state_dict(model.state_dict())
    exact = beam_search(other, ids, max_new_tokens=20, **options)
    for found in ours:
        assert torch.equal(found.ids, exact.ids)
        torch.testing.assert_close(found.scores, exact.scores, atol=1e-4, rtol=1e-4)
