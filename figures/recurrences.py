"""Figures: mixers with a matrix state beside attention."""

from typing import Any

from anyformer.config import (
    Attention,
    Block,
    GatedDelta,
    LinearAttention,
    Mamba2,
    Mixer,
    ModelConfig,
    NoFeedForward,
    NoHead,
    Stack,
    Tokens,
)
from anyformer.nn.inspection.count import count
from figures.style import BLUE, GREEN, ORANGE, PURPLE, RED, figure

DELTA, ATTENTION = GatedDelta(heads=12), Attention(heads=12)
STACKS: dict[str, tuple[tuple[Mixer, ...], str]] = {
    "attention": ((ATTENTION,), RED),
    "3 gated DeltaNet + 1 attention": ((DELTA, DELTA, DELTA, ATTENTION), PURPLE),
    "gated DeltaNet": ((DELTA,), BLUE),
    "Mamba-2": ((Mamba2(heads=24),), ORANGE),
    "linear attention": ((LinearAttention(heads=12),), GREEN),
}


@figure("concepts/linear-attention")
def linear_attention(plt: Any) -> Any:
    """FLOPs and cache bytes of four layers against the length."""
    lengths = [2**power for power in range(8, 17)]
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
    for name, (mixers, colour) in STACKS.items():
        blocks = tuple(Block(mixer=mixer, feedforward=NoFeedForward()) for mixer in mixers)
        stack = Stack(depth=4, blocks=blocks)
        config = ModelConfig(width=768, target=Tokens(vocab=1), decoder=stack, head=NoHead())
        tables = [count(config, length=length, bytes_per_value=2) for length in lengths]
        left.loglog(lengths, [table.flops for table in tables], color=colour, label=name)
        right.loglog(lengths, [table.cache_bytes / 2**20 for table in tables], color=colour)
    left.set(ylabel="FLOPs of a forward pass")
    right.set(ylabel="cache, MiB (bf16, states fp32)")
    for axis in (left, right):
        axis.set_xlabel("length T (tokens)")
        axis.set_xticks(lengths[::2], labels=[f"{length:,}" for length in lengths[::2]])
        axis.minorticks_off()
    drawing.legend(ncols=3, loc="outside upper center", frameon=False, handlelength=1.5, columnspacing=1.2)
    return drawing
