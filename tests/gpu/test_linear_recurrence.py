"""Linear recurrences on a GPU: bf16 chunks near the loop in fp32, eager and compiled; decoding by captured steps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anyformer.config import (
    LM,
    Attention,
    Block,
    GatedDelta,
    LinearAttention,
    Mamba2,
    ModelConfig,
    Rotary,
    Stack,
    Tokens,
)
from anyformer.decoding.generate import generate
from anyformer.kernels.chunked_recurrence import recur_in_chunks
from anyformer.kernels.linear_recurrence import Recurrence, recur
from anyformer.nn.model import Transformer
from tests.kernels.test_linear_recurrence import KINDS, inputs, with_gradients


def in_chunks(*given: Tensor | None) -> tuple[Tensor, Tensor]:
    """The chunked form of plain tensors: torch 2.11 cannot compile a function of this named tuple."""
    *x, state = given
    return recur_in_chunks(Recurrence(*x), state)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_the_loop(kind: str, compiled: bool):
    torch.compiler.reset()
    with torch.device("cuda"):
        x, state = inputs(kind, 300, True, 0, torch.float32), torch.randn(2, 4, 3, 5)
        expected = with_gradients(recur, x, state)
        run = torch.compile(in_chunks, dynamic=False) if compiled else in_chunks
        found = with_gradients(lambda x, state: run(*x, state), x, state)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-3 * max(1.0, float(other.abs().max()))


MIXERS = {
    "plain": LinearAttention(heads=4),
    "gated": LinearAttention(
        heads=4, features="none", normalizer="none", decay={"kind": "channel"}, gate=True, norm="rms", convolution=4
    ),
    "delta": GatedDelta(heads=4),
    "mamba2": Mamba2(heads=8, state=32),
}


def hybrid(name: str) -> ModelConfig:
    blocks = (Block(mixer=MIXERS[name]), Block(mixer=Attention(heads=4)))
    stack = Stack(depth=4, blocks=blocks, position=Rotary())
    return ModelConfig(width=256, target=Tokens(vocab=97), decoder=stack, head=LM())


@pytest.mark.parametrize("name", MIXERS)
def test_captured_steps_equal_uncached_greedy(name: str):
    """A hybrid decodes by CUDA graphs what an uncached argmax gives, row by row."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        model, ids = Transformer(hybrid(name)).eval(), torch.randint(0, 97, (3, 9))
    found = generate(model, ids, max_new_tokens=12)
    for _ in range(12):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found[:, : ids.shape[1]], ids)


@pytest.mark.parametrize("name", MIXERS)
def test_a_compiled_step_equals_an_eager_one(name: str, measured: Callable[..., None]):
    torch.compiler.reset()
    with torch.device("cuda"):
        torch.manual_seed(0)
        model, ids = Transformer(hybrid(name)), torch.randint(0, 97, (2, 1000))
    results = []
    for run in (model, torch.compile(model, dynamic=False)):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(ids).float().logsumexp(-1).mean()
        loss.backward()
        results.append((float(loss), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (one, first), (two, second) = results
    assert abs(one - two) < 1e-2 * abs(one)
    apart = max(float((x - y).norm() / x.norm().clamp(min=1e-6)) for x, y in zip(first, second, strict=True))
    measured(relative_gradient_difference=apart)
    assert apart < 0.1
