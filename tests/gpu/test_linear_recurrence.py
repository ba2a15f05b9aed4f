"""Linear recurrences on a GPU: chunks and kernels near the loop over tokens, eager and compiled; decoding by captured
steps."""

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
from anyformer.generation.generate import generate
from anyformer.kernels.chunked_recurrence import recur_in_chunks
from anyformer.kernels.fused_recurrence import can_fuse_recurrence, recur_fused
from anyformer.kernels.linear_recurrence import Recurrence, recur
from anyformer.nn.model import Transformer
from tests.kernels import test_fused_recurrence as fused
from tests.kernels.test_fused_convolution import both
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
    run = torch.compile(in_chunks, dynamic=False, fullgraph=True) if compiled else in_chunks
    found = with_gradients(lambda x, state: run(*x, state), x, state)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-3 * max(1.0, float(other.detach().abs().max()))


@pytest.mark.parametrize(
    ("kind", "sizes", "resets"),
    [
        ("delta", (2, 1, 2, 300, 128, 128), True),
        ("delta", (1, 4, 4, 1000, 128, 128), False),
        ("head", (2, 1, 4, 333, 100, 64), True),
        ("none", (1, 2, 2, 200, 64, 72), False),
    ],
)
def test_kernels_in_bf16_are_near_the_loop(
    kind: str, sizes: tuple[int, ...], resets: bool, measured: Callable[..., None]
):
    """As near as the reference in chunks of torch is; the loop reads the same bf16 inputs in fp32."""
    with torch.device("cuda"):
        x = fused.inputs(kind, sizes, resets, torch.bfloat16)
        state = torch.randn(sizes[0], sizes[2], sizes[4], sizes[5])
        assert can_fuse_recurrence(x)
        expected = with_gradients(recur, Recurrence(*(None if y is None else y.float() for y in x[:5]), x.runs), state)
        found = with_gradients(recur_fused, x, state)
        torch_form = with_gradients(lambda x, state: recur_in_chunks(x, state, 64), x, state)

    def apart(made: list[Tensor]) -> list[float]:
        return [float((y - z).detach().norm() / z.detach().norm()) for y, z in zip(made, expected, strict=True)]

    ours, theirs = apart(found), apart(torch_form)
    measured(kernels=[round(y, 5) for y in ours], torch=[round(y, 5) for y in theirs])
    assert all(one < max(2 * other, 0.01) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["head", "ungated delta"])
def test_kernels_in_fp32_equal_the_loop(kind: str):
    with torch.device("cuda"):
        x, state = fused.inputs(kind, (2, 1, 2, 150, 20, 24), True), torch.randn(2, 2, 20, 24)
        expected, found = with_gradients(recur, x, state), with_gradients(recur_fused, x, state)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-3 * max(1.0, float(other.detach().abs().max()))


@pytest.mark.parametrize(("width", "bias", "resets"), [(4, False, False), (4, True, True), (2, False, True)])
def test_convolution_kernels_equal_the_module(width: int, bias: bool, resets: bool):
    """In bf16 the module rounds after each of its sums, the kernels once."""
    with torch.device("cuda"):
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
            for ours, theirs in zip(*both(width, bias, resets, dtype), strict=True):
                assert (ours - theirs).detach().norm() < bound * theirs.detach().norm()


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
