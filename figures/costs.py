"""Figures: mixers beside attention, FLOPs by length, embeddings, tied vocabularies."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from anyformer import presets
from anyformer.attention.layout import make_layout
from anyformer.attention.lowered import Dense, Relation
from anyformer.config import (
    Attention,
    Block,
    Convolution,
    FullyConnected,
    Mixer,
    ModelConfig,
    NoFeedForward,
    NoHead,
    NoMixer,
    NoNorm,
    NoPosition,
    Plain,
    Recurrent,
    Sinusoidal,
    SqrtWidth,
    Stack,
    Tokens,
    Unscaled,
    Xavier,
)
from anyformer.config.overrides import override
from anyformer.nn.context import Context
from anyformer.nn.init import initialise
from anyformer.nn.inspection.count import Table, count
from anyformer.nn.model import Transformer
from figures.blocks import GREY, cells, frame
from figures.style import BLACK, BLUE, GREEN, HEATMAP, ORANGE, RED, SKY, figure

MIXERS: dict[str, Mixer] = {
    "attention": Attention(heads=4),
    "fully connected": FullyConnected(length=16, causal=True),
    "RNN": Recurrent(cell="rnn"),
    "LSTM": Recurrent(cell="lstm"),
    "convolution, K = 3": Convolution(causal=True),
    "dilated by 3": Convolution(causal=True, dilation=3),
}


def influence(spec: Mixer, length: int, width: int) -> Tensor:
    """Return how much each output of an untrained layer changes with each input, [length, length]."""
    torch.manual_seed(0)
    mixer = spec.build(width)
    assert mixer is not None
    initialise(mixer, Xavier(), width)
    layout = make_layout(1, length, torch.device("cpu"))
    context = Context(layout, layout, Relation(Dense(causal=True)))
    whole = jacobian(lambda x: mixer(x[None], context)[0], torch.randn(length, width))  # [t, d, t, d]
    return whole.square().sum((1, 3)).sqrt()


@figure("concepts/other-mixers")
def other_mixers(plt: Any) -> Any:
    """Jacobian norms of one causal layer of each mixer."""
    drawing, axes = plt.subplots(2, 3, figsize=(8, 5.6), sharex=True, sharey=True, layout="constrained")
    for axis, (name, spec) in zip(axes.flat, MIXERS.items(), strict=True):
        values = influence(spec, 16, 32)
        shown = torch.where(values > 0, values.log10(), torch.nan)
        image = axis.imshow(shown, cmap=HEATMAP, vmin=-4, vmax=1, extent=(0.5, 16.5, 16.5, 0.5))
        axis.set(title=name, xticks=(1, 4, 8, 12, 16), yticks=(1, 4, 8, 12, 16))
        axis.grid(visible=False)
    for axis in axes[1]:
        axis.set_xlabel("input token")
    for axis in axes[:, 0]:
        axis.set_ylabel("output token")
    bar = drawing.colorbar(image, ax=axes, shrink=0.8, label="norm of the Jacobian")
    bar.set_ticks(range(-4, 2), labels=[f"1e{power}" for power in range(-4, 2)])
    return drawing


@figure("concepts/costs")
def costs(plt: Any) -> Any:
    """FLOPs of a block of width 768 against the length."""
    width, lengths = 768, [2**power for power in range(6, 17)]
    block = Block(mixer=Attention(heads=12), feedforward=Plain(bias=False))
    stack = Stack(depth=1, blocks=(block,))
    config = ModelConfig(width=width, target=Tokens(vocab=1), decoder=stack, head=NoHead())

    def flops(table: Table, part: str) -> int:
        return next(row.flops for row in table.rows if row.part == part)

    tables = [count(config, length=length) for length in lengths]
    projections = [8 * length * width**2 for length in lengths]
    scores = [flops(table, "decoder self-attention") - p for table, p in zip(tables, projections, strict=True)]
    network = [flops(table, "decoder feed-forward") for table in tables]
    drawing, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, values, colour in (
        ("scores and values, 4T²d", scores, RED),
        ("feed-forward, 16Td²", network, BLUE),
        ("projections, 8Td²", projections, GREEN),
    ):
        axis.loglog(lengths, values, color=colour, label=name, base=10)
    total = [table.flops for table in tables]
    axis.loglog(lengths, total, color=BLACK, linestyle=":", label="block")
    for length, text in ((2 * width, "T = 2d"), (6 * width, "T = 6d")):
        axis.axvline(length, color=BLACK, linestyle="--", linewidth=1)
        axis.text(length * 1.05, min(scores), f"{text} = {length:,}", rotation=90, va="bottom")
    axis.set(xlabel="length T (tokens)", ylabel="FLOPs of a forward pass, d = 768")
    axis.set_xticks(lengths[::2], labels=[f"{length:,}" for length in lengths[::2]])
    axis.minorticks_off()
    drawing.legend(ncols=4, loc="outside upper center", frameon=False, handlelength=1.5, columnspacing=1.2)
    return drawing


def lengths_of(width: int, scaled: bool) -> tuple[float, float]:
    """Return the mean length of token vectors, and of position codes, in a model of the 2017 kind before training."""
    nothing = Block(mixer=NoMixer(), feedforward=NoFeedForward(), norm=NoNorm())
    found = list[Tensor]()
    for position in (Sinusoidal(), NoPosition()):
        torch.manual_seed(0)
        stack = Stack(depth=1, blocks=(nothing,), position=position)
        tokens = Tokens(vocab=1000, scale=SqrtWidth() if scaled else Unscaled())
        model = Transformer(ModelConfig(width=width, target=tokens, decoder=stack, head=NoHead(), init=Xavier()))
        found.append(model(torch.arange(100)[None]).detach()[0])
    both, token = found
    return float(token.norm(dim=-1).mean()), float((both - token).norm(dim=-1).mean())


@figure("concepts/embeddings")
def embeddings(plt: Any) -> Any:
    """A one-hot row picks a row of the table; lengths of token vectors and position codes."""
    table = torch.tensor([[0.1, 0.7, 0.2], [0.9, 0.3, 0.4], [0.2, 0.2, 0.8], [0.6, 0.5, 0.1], [0.3, 0.9, 0.6]])
    one_hot = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]])
    drawing, (left, middle, right) = plt.subplots(
        1, 3, figsize=(8, 3.6), layout="constrained", width_ratios=(5, 3.4, 7)
    )
    cells(plt, left, one_hot, [[GREY, GREY, GREY, ORANGE, GREY]])
    cells(plt, middle, table, [[ORANGE if row == 3 else SKY] * 3 for row in range(5)])
    frame(plt, left, 3, 0, 1, 1)
    frame(plt, middle, 0, 3, 3, 1)
    left.set_title("one-hot [1, v]")
    middle.set_title("table [v, d]")
    middle.text(-0.3, 2.5, "×", fontsize=16, ha="right", va="center")
    widths = [64, 128, 256, 512, 1024]
    token = [lengths_of(width, scaled=True) for width in widths]
    plain = [lengths_of(width, scaled=False) for width in widths]
    right.plot(widths, [one for one, _ in token], color=BLUE, marker="o", label="token, times √d")
    right.plot(widths, [code for _, code in token], color=RED, marker="s", label="position code")
    right.plot(widths, [one for one, _ in plain], color=GREEN, marker="^", label="token, not scaled")
    right.set(xlabel="width d", ylabel="length of the vector", xticks=[64, 256, 512, 1024])
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, columnspacing=1, fontsize=9)
    return drawing


@figure("concepts/tying")
def tying(plt: Any) -> Any:
    """Share of the vocabulary matrices in all parameters, untied and tied."""
    models = {
        "Transformer\nbase, 2017": (presets.vaswani(), "all"),
        "GPT-2\nsmall": (presets.gpt2(), "output"),
        "Qwen3\n0.6 B": (presets.qwen3(), "output"),
        "Gemma\n2 B": (presets.gemma(), "output"),
        "Llama 2\n7 B": (presets.llama(), "output"),
    }

    def share(config: ModelConfig, tie: str) -> float:
        table = count(override(config, [f"tie={tie}"]))
        parts = sum(row.parameters for row in table.rows if "embeddings" in row.part or row.part == "head")
        return 100 * parts / table.parameters

    drawing, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for offset, colour, name in ((-0.2, RED, "untied"), (0.2, BLUE, "tied")):
        for place, (config, tie) in enumerate(models.values()):
            value = share(config, tie if name == "tied" else "none")
            axis.bar(place + offset, value, 0.38, color=colour, label=None if place else name)
            axis.text(place + offset, value + 1, f"{value:.0f}", ha="center")
            if (config.tie == tie) == (name == "tied"):
                label = None if place else "published model"
                axis.plot(place + offset, value / 2, "o", color="white", markeredgecolor=BLACK, label=label)
    axis.set(ylabel="vocabulary matrices, % of parameters", xticks=range(len(models)), xticklabels=models)
    axis.grid(visible=False, axis="x")
    drawing.legend(ncols=3, loc="outside upper center", frameon=False)
    return drawing
