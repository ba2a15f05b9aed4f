"""Prompts on a GPU: read without the empty slots of their cache, by kernels without a mask, and by a captured graph."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from anyformer.attention.layout import Layout
from anyformer.attention.lowered import Blocks, Dense, Documents
from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    Causal,
    Gated,
    Head,
    Latent,
    ModelConfig,
    NoHead,
    NoPosition,
    Pattern,
    Position,
    RMSNorm,
    Rotary,
    Stack,
    T5Bias,
    Tokens,
    Window,
)
from anyformer.generation.generate import generate
from anyformer.kernels.runtime import Runtime
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer

VOCAB, LENGTH = 97, 1200
CASES: dict[str, tuple[Pattern, Position, Latent | None, type]] = {
    "causal": (Causal(), Rotary(), None, Dense),
    "window": (Window(before=100, after=0), Rotary(), None, Documents),
    "alibi": (Causal(), Alibi(), None, Blocks),
    "t5": (Causal(), T5Bias(), None, Blocks),
    "latent": (Causal(), Rotary(), Latent(rank=32, rotary_width=16), Dense),
    "no positions": (Causal(), NoPosition(), None, Dense),
}


def built(name: str, dtype: torch.dtype = torch.bfloat16, head: Head = NoHead()) -> Transformer:  # noqa: B008
    pattern, position, latent, _ = CASES[name]
    more = {} if latent is None else {"compress": latent}
    block = Block(mixer=Attention(heads=4, pattern=pattern, **more), feedforward=Gated(width=256), norm=RMSNorm())
    decoder = Stack(depth=2, blocks=(block,), position=position)
    torch.manual_seed(0)
    config = ModelConfig(width=256, target=Tokens(vocab=VOCAB), decoder=decoder, head=head)
    return Transformer(config).cuda().to(dtype).eval()


def ids(rows: int, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_first_tokens_equal_the_dense_reading(name: str, padded: bool) -> None:
    model, prompt, found = built(name), ids(2), []
    segments = torch.zeros_like(prompt)
    segments[1, LENGTH // 3 :] = -1 if padded else 0
    for fresh in (True, False):
        cache = model.new_cache(2, LENGTH + 8)
        cache.fresh = fresh
        layout = Layout.right_padded(segments)._replace(continues_cache=True) if fresh else None
        given = {} if fresh else {"segments": segments}
        first = model.decode(Inputs(prompt, layout) if fresh else prompt, cache=cache, **given)
        found.append((first[segments >= 0].float(), model.decode(prompt[:, :1], cache=cache).float()))
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=0.05, atol=0.05 * float(dense.abs().max()))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_kernels(name: str) -> None:
    """A causal prompt takes a kernel without a mask, a window that of documents, and biases that of blocks."""
    model = built(name)
    cache = model.new_cache(2, LENGTH + 8, kind="static")
    layout = cache.next(LENGTH)
    (relation,) = model.decoder.relations(
        [layout], cache.take(layout), True, Runtime("cuda", torch.bfloat16, training=False)
    )
    assert isinstance(relation.lowered, CASES[name][3]), relation.choice
    if isinstance(relation.lowered, Dense):
        assert relation.lowered == Dense(causal=True)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_captured_prompts_of_other_lengths(name: str) -> None:
    """The same graph reads prompts of other lengths, padded on either side: each answer is that of the prompt alone."""
    model, prompt = built(name, torch.float32, LM()), ids(2, 64)
    for pads in (0, 5, 40, 5):  # eager, captured, replayed
        for left in (True, False):
            segments = torch.zeros_like(prompt)
            segments[1, slice(0, pads) if left else slice(64 - pads, 64)] = -1
            alone = prompt[1:, pads:] if left else prompt[1:, : 64 - pads]
            found = generate(model, prompt, segments=segments, max_new_tokens=6)
            assert torch.equal(found[:, :64], prompt)
            assert torch.equal(found[1, 64:], generate(model, alone, max_new_tokens=6)[0, -6:])


def test_time_of_a_long_prompt(measured: Callable[..., None]) -> None:
    """Milliseconds that the kernels take for 8,192 tokens with and without the mask of all slots."""
    model, prompt = built("causal"), ids(1, 8192)
    took = {}
    with torch.no_grad():
        for fresh in (True, False) * 2:
            cache = model.new_cache(1, 8200)
            cache.fresh = fresh
            with profile(activities=[ProfilerActivity.CUDA]) as kernels:
                model.decode(prompt, cache=cache)
                torch.cuda.synchronize()
            took[fresh] = sum(event.self_device_time_total for event in kernels.key_averages()) / 1e3
    measured(first_tokens_ms=took[True], dense_ms=took[False])
