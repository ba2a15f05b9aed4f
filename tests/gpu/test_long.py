"""Long sequences: memory and time by length, forward and backward, and a training step at 65,536 tokens."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.attention.attend import attend, lower
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import Layout, Role, make_layout
from anyformer.attention.position_module import Positions
from anyformer.attention.scores import Scoring
from anyformer.config import (
    Attention,
    BigBird,
    Block,
    Causal,
    Gelu,
    Learned,
    MaskedLM,
    ModelConfig,
    NoPosition,
    Pattern,
    Plain,
    Stack,
    Tokens,
    Window,
)
from anyformer.kernels.runtime import Runtime
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer

CUDA = torch.device("cuda")
HEADS, WIDTH = 12, 64
LENGTHS = (4096, 8192, 16384, 32768, 65536)
RUNTIME = Runtime("cuda", torch.bfloat16, training=True)
NEEDS = Requirements(WIDTH, WIDTH)


def attention(pattern: Pattern, q: Layout, k: Layout, role: Role, backend: str) -> Callable[[], None]:
    """A function that lowers and runs attention, forward and backward."""
    rows = 1 if q.segments is None else q.segments.shape[0]
    shapes = [(rows, HEADS, layout.positions.shape[1], WIDTH) for layout in (q, k, k)]
    leaves = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    nowhere = Positions(NoPosition(), 0, HEADS)

    def run() -> None:
        relation = lower(pattern, q, k, role, nowhere, NEEDS, RUNTIME, backend)
        out = attend(*leaves, relation.lowered, Scoring(WIDTH**-0.5))
        torch.autograd.grad(out.sum(), leaves)

    return run


def cost(run: Callable[[], Any], times: int = 5) -> tuple[float, int]:
    """Seconds of one run, and the memory it needs on top of what is there."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    gc.collect()  # tensors of the compiler
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times, torch.cuda.max_memory_allocated() - before


SPARSE: dict[str, tuple[Pattern, Role]] = {
    "bigbird, encoder": (BigBird(), "self"),
    "window, causal": (Window(before=512, after=0), "self"),
    "bigbird, causal": (BigBird(ahead=False), "self"),
    "window, across": (Window(before=256, after=256), "cross"),
}


@pytest.mark.parametrize("name", SPARSE)
def test_memory_is_linear(name: str, measured: Callable[..., None]):
    """From 4k to 64k tokens, 16 times: memory at most 20 times. Time is measured."""
    pattern, role = SPARSE[name]
    found = {}
    for length in LENGTHS:
        layout, other = make_layout(1, length, CUDA), make_layout(1, length, CUDA)
        found[length] = cost(attention(pattern, layout, layout if role == "self" else other, role, "flex"))
    seconds, memory = ({n: x[i] for n, x in found.items()} for i in range(2))
    measured(
        ms={n: round(1e3 * x, 2) for n, x in seconds.items()}, MiB={n: round(x / 2**20, 1) for n, x in memory.items()}
    )
    assert memory[65536] / memory[4096] < 20


def test_speed_of_full_attention(measured: Callable[..., None]):
    """Of 8k and 64k tokens, beside the patterns above."""
    found = {n: cost(attention(Causal(), *[make_layout(1, n, CUDA)] * 2, "self", "sdpa"), 3)[0] for n in (8192, 65536)}
    measured(ms={n: round(1e3 * x, 2) for n, x in found.items()})


def test_global_tokens(measured: Callable[..., None]):
    """What 16 tokens that see all, and are seen by all, cost beside a window."""
    for first in (0, 16):
        layout = make_layout(1, 65536, CUDA)
        seconds, _ = cost(attention(Window(before=256, after=256, globals=first), layout, layout, "self", "flex"))
        measured(globals=first, ms=1e3 * seconds)


@pytest.mark.parametrize("length", [2048, 8192, 16384])
def test_speed_of_a_window(length: int, measured: Callable[..., None]):
    """flex beside sdpa with a mask, and beside causal sdpa without."""
    layout, window = make_layout(1, length, CUDA), Window(before=512, after=0)
    ms = {b: 1e3 * cost(attention(window, layout, layout, "self", b))[0] for b in ("flex", "sdpa")}
    measured(length=length, **ms, causal=1e3 * cost(attention(Causal(), layout, layout, "self", "sdpa"))[0])


@pytest.mark.parametrize("documents", [4, 32])
def test_speed_of_packed_documents(documents: int, measured: Callable[..., None]):
    """Eight rows of 4,096 tokens: varlen and flex beside sdpa with a mask."""
    rows, length = 8, 4096
    segments = (torch.arange(length, device=CUDA) * documents // length).expand(rows, length).contiguous()
    layout = Layout.packed_rows(segments, rows * documents)
    ms = {b: 1e3 * cost(attention(Causal(), layout, layout, "self", b))[0] for b in ("varlen", "flex", "sdpa")}
    measured(documents=documents, **ms)


def bigbird(length: int) -> ModelConfig:
    """The size of BigBird-base, with as many positions as asked for."""
    mixer = Attention(heads=12, bias=True, pattern=BigBird())
    block = Block(mixer=mixer, feedforward=Plain(width=3072, activation=Gelu(), bias=True), placement="post")
    return ModelConfig(
        width=768,
        source=Tokens(vocab=50358),
        encoder=Stack(depth=12, blocks=(block,), position=Learned(length=length)),
        head=MaskedLM(),
        tie="output",
    )


def test_a_training_step_at_64k_tokens(measured: Callable[..., None]):
    """BigBird-base, forward, backward and AdamW in bf16 autocast; a sixteenth of the places is asked for."""
    length = 65536
    config = bigbird(length)
    torch.manual_seed(0)
    model = Transformer(config).to(CUDA).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 50000, (1, length), device=CUDA)
    labels = torch.where(torch.rand(ids.shape, device=CUDA) < 1 / 16, ids, -100)
    losses: list[Tensor] = []

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())

    seconds, memory = cost(train, times=3)
    assert torch.stack(losses).isfinite().all()
    assert losses[-1] < losses[0]
    table = count(config, length)
    measured(seconds=seconds, GiB=memory / 2**30, TFLOPs=3 * table.flops / seconds / 1e12, loss=float(losses[-1]))
