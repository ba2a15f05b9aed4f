"""Figures: parts of a block: linear layers, norms, dropout, residuals, placement of norms."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, functional as F

from anyformer.config import Attention, Block, LayerNorm, ModelConfig, NoHead, NoNorm, Stack, Tokens, Xavier
from anyformer.kernels.dropout import Dropout
from anyformer.nn.linear import Linear
from anyformer.nn.model import Transformer
from figures.style import BLACK, BLUE, COLOURS, GREEN, ORANGE, PURPLE, RED, SKY, figure

GREY = "#bbbbbb"


def cells(plt: Any, axis: Any, values: Tensor, colours: Sequence[Sequence[str]], numbers: bool = True) -> None:
    """Draw a matrix as a grid of coloured cells, with its numbers."""
    rows, columns = values.shape
    for i in range(rows):
        for j in range(columns):
            axis.add_patch(plt.Rectangle((j, i), 1, 1, facecolor=colours[i][j], edgecolor="white", lw=2, alpha=0.4))
            if numbers:
                axis.text(j + 0.5, i + 0.5, f"{values[i, j]:g}", ha="center", va="center")
    axis.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal", xticks=[], yticks=[])
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)


def frame(plt: Any, axis: Any, x: int, y: int, width: int, height: int) -> None:
    axis.add_patch(plt.Rectangle((x, y), width, height, fill=False, edgecolor=BLACK, lw=2.2, zorder=3))


@figure("concepts/linear")
def linear(plt: Any) -> Any:
    """X Wᵀ with the weights of queries, keys and values stacked: one dot product is framed."""
    x = torch.tensor([[1.0, 2.0, 0.0, 1.0], [3.0, 0.0, 1.0, 2.0], [0.0, 1.0, 1.0, 0.0]])
    layer = Linear(4, (2, 2, 2), bias=False)
    layer.rows().data.copy_(
        torch.tensor([[1, 0, 0, 1], [0, 1, 2, 0], [2, 0, 1, 0], [0, 1, 1, 2], [1, 1, 0, 0], [0, 0, 1, 3]])
    )
    y = layer(x).detach()
    parts = (BLUE, BLUE, RED, RED, GREEN, GREEN)
    drawing, axes = plt.subplots(1, 3, figsize=(8, 3.3), layout="constrained", width_ratios=(4, 4, 6))
    cells(plt, axes[0], x, [[GREY] * 4] * 3)
    cells(plt, axes[1], layer.rows().detach(), [[colour] * 4 for colour in parts])
    cells(plt, axes[2], y, [parts] * 3)
    frame(plt, axes[0], 0, 0, 4, 1)
    frame(plt, axes[1], 0, 3, 4, 1)
    frame(plt, axes[2], 3, 0, 1, 1)
    titles = ("X  [tokens, in] = [3, 4]", "W  [out, in] = [6, 4]", "Y = X Wᵀ  [tokens, out] = [3, 6]")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, pad=22)
    for token in range(3):
        axes[0].text(-0.2, token + 0.5, f"token {token + 1}", ha="right", va="center")
    for i, name in enumerate(("query", "key", "value")):
        axes[1].text(4.2, 2 * i + 1, name, rotation=270, va="center", color=parts[2 * i])
        axes[2].text(2 * i + 1, -0.2, name, ha="center", color=parts[2 * i])
    return drawing


@figure("concepts/layer-norm")
def layer_norm(plt: Any) -> Any:
    """Vectors of four tokens before and after layer normalisation."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(4, 16, generator=generator)
    x = noise * torch.tensor([[0.5], [1.0], [2.0], [4.0]]) + torch.tensor([[-6.0], [2.0], [8.0], [-1.0]])
    y = LayerNorm().build(16)(x).detach()
    drawing, axes = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    for axis, values, title in zip(axes, (x, y), ("before", "after"), strict=True):
        for token, colour in enumerate(COLOURS[:4]):
            axis.plot(
                range(1, 17), values[token], color=colour, label=f"token {token + 1}" if axis is axes[0] else None
            )
        axis.set(title=title, xlabel="feature", ylabel="value", xticks=range(1, 17, 3))
    drawing.legend(ncols=4, loc="outside upper center", frameon=False)
    return drawing


@figure("concepts/other-norms")
def other_norms(plt: Any) -> Any:
    """Which values of two texts share one mean and one variance."""
    features, lengths = 5, (4, 2)  # two texts in rows of four tokens; the second has two tokens of padding
    real = [position < length for length in lengths for position in range(4)]
    blank = torch.zeros(len(real), features)
    by_token = [[colour if here else GREY] * features for here, colour in zip(real, COLOURS * 2, strict=False)]
    by_feature = [[colour if here else GREY for colour in COLOURS[:features]] for here in real]
    drawing, axes = plt.subplots(1, 2, figsize=(8, 4.2), layout="constrained")
    titles = ("layer norm, RMS norm", "batch norm")
    for axis, colours, title in zip(axes, (by_token, by_feature), titles, strict=True):
        cells(plt, axis, blank, colours, numbers=False)
        axis.set(title=title, xlabel="features", aspect="auto")
        for row, here in enumerate(real):
            text, position = divmod(row, 4)
            if axis is axes[0]:
                axis.text(-0.15, row + 0.5, f"text {text + 1}, token {position + 1}", ha="right", va="center")
            if not here:
                axis.text(features / 2, row + 0.5, "padding", ha="center", va="center")
        axis.axhline(4, color=BLACK, linewidth=1)
    return drawing


@figure("concepts/dropout")
def dropout(plt: Any) -> Any:
    """Distribution of a sum of 100 values in training, with and without the factor 1/(1-p)."""
    torch.manual_seed(0)
    drawing, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharex=True, sharey=True, layout="constrained")
    for p, colour in ((0.1, BLUE), (0.3, ORANGE), (0.5, PURPLE)):
        dropped = Dropout(p)(torch.ones(20_000, 100))
        for axis, factor in zip(axes, (1.0, 1 - p), strict=True):
            label = f"training, p = {p}" if axis is axes[0] else None
            sums, width = (dropped * factor).sum(1), 2 * factor / (1 - p)  # two kept values more
            bins = [(i - 0.25) * width for i in range(60)]
            axis.hist(sums, bins=bins, density=True, color=colour, alpha=0.55, label=label)
    for axis, title in zip(axes, ("with 1/(1 − p)", "without"), strict=True):
        axis.axvline(100, color=BLACK, linestyle="--", label="inference" if axis is axes[0] else None)
        axis.set(title=title, xlabel="sum of 100 values", yticks=[], xlim=(30, 145))
    axes[0].set_ylabel("frequency")
    drawing.legend(ncols=4, loc="outside upper center", frameon=False)
    return drawing


class Layer(NamedTuple):
    """Facts about one layer of a stack at initialisation."""

    size: float  # root mean square of its output
    gradient: float  # norm of the gradient with respect to its output
    similarity: float  # mean cosine between the outputs of two tokens of a text
    change: float  # length of its output minus its input, relative to its input


def layers_at_start(block: Block, depth: int) -> list[Layer]:
    """Measure a stack on random tokens, with a random linear function of its output as the loss."""
    torch.manual_seed(0)
    stack = Stack(depth=depth, blocks=(block,))
    config = ModelConfig(width=64, target=Tokens(vocab=100), decoder=stack, head=NoHead(), init=Xavier())
    model = Transformer(config).eval()
    assert model.decoder is not None
    inputs, outputs = list[Tensor](), list[Tensor]()

    def note(_: Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0])
        outputs.append(output)

    for layer in model.decoder.blocks:
        layer.register_forward_hook(note)
    last = model(torch.randint(100, (4, 32)))
    direction = torch.randn_like(last)
    gradients = torch.autograd.grad((last * direction).sum() / direction.norm(), outputs)
    found = list[Layer]()
    for x, y, gradient in zip(inputs, outputs, gradients, strict=True):
        x, y = x.detach(), y.detach()
        units = F.normalize(y, dim=-1)
        size, similarity, change = y.square().mean().sqrt(), (units @ units.mT).mean(), (y - x).norm() / x.norm()
        found.append(Layer(float(size), float(gradient.norm()), float(similarity), float(change)))
    return found


@figure("concepts/residual")
def residual(plt: Any) -> Any:
    """Gradients and similarity of tokens in 24 layers at initialisation, with and without residuals."""
    depth, attention = 24, Attention(heads=4)
    drawing, axes = plt.subplots(1, 2, figsize=(8, 3.7), layout="constrained")
    cases = {
        "residuals and norms": (Block(mixer=attention), BLUE, "-"),
        "residuals, no norms": (Block(mixer=attention, norm=NoNorm()), SKY, "--"),
        "norms, no residuals": (Block(mixer=attention, residual=False), RED, "-"),
        "neither": (Block(mixer=attention, residual=False, norm=NoNorm()), ORANGE, "--"),
    }
    for name, (block, colour, line) in cases.items():
        layers = layers_at_start(block, depth)
        axes[0].semilogy(range(1, depth + 1), [one.gradient for one in layers], color=colour, ls=line, label=name)
        axes[1].plot(range(1, depth + 1), [one.similarity for one in layers], color=colour, ls=line)
    for axis, title in zip(axes, ("gradient norm at the layer's output", "cosine between tokens"), strict=True):
        axis.set(title=title, xlabel="layer", xticks=range(4, depth + 1, 4))
    drawing.legend(ncols=4, loc="outside upper center", frameon=False, handlelength=1.5, columnspacing=1.2)
    return drawing


Placement = Literal["pre", "post", "branch", "sandwich"]
PLACEMENTS: dict[Placement, tuple[tuple[str, ...], str]] = {
    "pre": (("N", "F", "+"), BLUE),
    "post": (("F", "+", "N"), RED),
    "branch": (("F", "N", "+"), GREEN),
    "sandwich": (("N₁", "F", "N₂", "+"), PURPLE),
}


def diagram(axis: Any, name: str, parts: Sequence[str], colour: str) -> None:
    """Draw a sublayer from bottom to top, with the residual connection on its right."""
    box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour, "linewidth": 1.6}
    top = parts.index("+")
    axis.plot([0, 0], [-0.9, len(parts) - 0.1], color=BLACK, linewidth=1.2, zorder=1)
    axis.plot([0, 1, 1, 0], [-0.6, -0.6, top, top], color=colour, linewidth=2, zorder=1)
    for height, part in enumerate(parts):
        shape = box | ({"boxstyle": "circle,pad=0.2"} if part == "+" else {})
        axis.text(0, height, part, ha="center", va="center", bbox=shape, zorder=2)
    axis.text(0.12, -0.95, "x", va="center")
    axis.set(title=name, xlim=(-0.8, 1.4), ylim=(-1.2, 4), xticks=[], yticks=[])
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)


@figure("concepts/norm-placement")
def norm_placement(plt: Any) -> Any:
    """Sublayers of every placement, and what each does to a stack of 24 layers at initialisation."""
    depth = 24
    drawing = plt.figure(figsize=(8, 6), layout="constrained")
    above, below = drawing.subfigures(2, 1, height_ratios=(1, 1.15))
    *panels, parallel = above.subplots(1, 5)
    for axis, (name, (parts, colour)) in zip(panels, PLACEMENTS.items(), strict=True):
        diagram(axis, name, parts, colour)
    diagram(parallel, "parallel (pre)", ("N", "A + F", "+"), BLACK)
    axes = below.subplots(1, 2)
    for name, (_, colour) in PLACEMENTS.items():
        block, line = Block(mixer=Attention(heads=4), placement=name), "--" if name == "sandwich" else "-"
        layers = layers_at_start(block, depth)
        axes[0].plot(range(1, depth + 1), [one.size for one in layers], color=colour, ls=line, label=name)
        axes[1].plot(range(2, depth + 1), [one.change for one in layers[1:]], color=colour, ls=line)
    for axis, title in zip(axes, ("size of the output (RMS)", "change by the layer / its input"), strict=True):
        axis.set(xlabel="layer", title=title, xticks=range(4, depth + 1, 4))
    below.legend(ncols=4, loc="outside upper center", frameon=False)
    return drawing
