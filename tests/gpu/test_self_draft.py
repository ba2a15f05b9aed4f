"""Drafts by the model's own layers on a GPU: captured steps give the ids of greedy decoding, and read nothing back."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch

from anyformer import presets
from anyformer.config import LM, MultiToken
from anyformer.generation.generate import generate
from anyformer.generation.speculative import speculate
from anyformer.generation.strategy import OwnHead
from anyformer.nn.model import Transformer

VOCAB = 97


def built(preset: str = "llama", depth: int = 2) -> Transformer:
    make: Callable[..., Any] = getattr(presets, preset)
    config = make(depth=depth, width=64, heads=4, vocab=VOCAB)
    torch.manual_seed(0)
    head = LM(multi_token=MultiToken(tokens=3))
    return Transformer(config.model_copy(update={"head": head})).cuda().eval()


def ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("preset", ["llama", "gpt2", "mistral", "gemma2"])
@pytest.mark.parametrize("ahead", [1, 3])
def test_captured_steps_change_no_ids(preset: str, ahead: int) -> None:
    """Rows that end at different budgets and stop ids, call after call with the same graphs and other prompts."""
    model = built(preset)
    for seed in range(5):  # eager, captured, replayed
        prompt = ids(3, 8, seed)
        segments = torch.zeros_like(prompt)
        segments[1, : seed % 4] = -1
        for stop in ((), (5, 7)):
            options = {"max_new_tokens": [20, 33, 7], "segments": segments, "stop": stop}
            found = speculate(model, prompt, draft=OwnHead(), ahead=ahead, **options)
            assert found.ids.tolist() == generate(model, prompt, **options).tolist()
            assert bool((found.accepted <= found.drafted).all())


def test_compiled_steps_change_no_ids() -> None:
    """Verification and drafting are compiled, too; nothing is compiled while a step is captured."""
    model = built()
    for seed in range(4):
        prompt, options = ids(3, 8, seed), {"max_new_tokens": [20, 33, 7], "stop": (5, 7)}
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = speculate(model, prompt, draft=OwnHead(), ahead=3, compile=True, **options)
        assert found.ids.tolist() == generate(model, prompt, **options).tolist()


def test_sampled_ids() -> None:
    model, prompt = built(), ids(3, 8)
    for seed in range(4):
        options = {"max_new_tokens": 20, "temperature": 1.0, "seed": seed}
        found = speculate(model, prompt, draft=OwnHead(), ahead=3, **options)
        assert found.ids.tolist() == generate(model, prompt, **options).tolist()


@pytest.mark.parametrize("compile", [False, True])
def test_time_of_a_call_with_drafts(compile: bool, measured: Callable[..., None]) -> None:
    """Milliseconds of a call with three drafts, replayed, beside a greedy step: both are one graph."""
    model, prompt, new = built(depth=6), ids(1, 8), 200
    took, calls = {}, new
    for name in ("greedy", "drafts"):
        for _ in range(4):
            torch.cuda.synchronize()
            began = perf_counter()
            if name == "greedy":
                generate(model, prompt, max_new_tokens=new, compile=compile)
            else:
                calls = speculate(model, prompt, draft=OwnHead(), ahead=3, max_new_tokens=new, compile=compile).calls
            torch.cuda.synchronize()
            took[name] = 1e3 * (perf_counter() - began)
    measured(greedy_ms=took["greedy"] / new, call_with_drafts_ms=took["drafts"] / calls, calls=calls)
