"""Figures: feed-forward networks: hidden units, activations, gates, experts."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer import presets
from anyformer.attention.layout import make_layout
from anyformer.config import (
    Activation,
    Experts,
    Gated,
    Gelu,
    Identity,
    LeakyRelu,
    Relu,
    Sigmoid,
    Silu,
    SquaredRelu,
    Tanh,
)
from anyformer.config.overrides import override
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.context import Context
from anyformer.nn.feedforward import PlainFFN
from anyformer.nn.inspection.count import count
from figures.style import BLACK, BLUE, DIVERGING, GREEN, HEATMAP, ORANGE, RED, SKY, figure

ACTIVATIONS: tuple[Activation, ...] = (
    Relu(),
    LeakyRelu(slope=0.1),
    SquaredRelu(),
    Sigmoid(),
    Tanh(),
    Gelu(),
    Silu(),
    Identity(),
)


@figure("concepts/activations")
def activations(plt: Any) -> Any:
    """Every activation and its derivative, as the model computes them."""
    drawing, axes = plt.subplots(2, 4, figsize=(8, 4.8), sharex=True, sharey=True, layout="constrained")
    for axis, spec in zip(axes.flat, ACTIVATIONS, strict=True):
        x = torch.linspace(-3, 3, 601, requires_grad=True)
        y = spec.function()(x)
        (derivative,) = torch.autograd.grad(y.sum(), x)
        first = axis is axes[0][0]
        axis.plot(x.detach(), y.detach(), color=BLUE, label="f(x)" if first else None)
        axis.plot(x.detach(), derivative, color=RED, linestyle="--", label="f′(x)" if first else None)
        axis.set(title=spec.kind, ylim=(-1.2, 3))
    for axis in axes[1]:
        axis.set_xlabel("x")
    drawing.legend(ncols=2, loc="outside upper center", frameon=False)
    return drawing


@figure("concepts/feed-forward")
def feed_forward(plt: Any) -> Any:
    """A feed-forward network of one input: what its hidden units add, and how their number refines the output."""
    x = torch.linspace(-3, 3, 601)[None, :, None]  # [b, t, d]
    target = torch.sin(2 * x[0])
    layout = make_layout(1, x.shape[1], x.device)
    context = Context(layout, layout)
    drawing, axes = plt.subplots(1, 2, figsize=(8, 3.6), sharey=True, layout="constrained")
    for units, colour in ((3, ORANGE), (6, BLUE), (24, GREEN)):
        ffn = PlainFFN(1, units, Relu(), bias=True, dropout=0.0)
        assert ffn.up.bias is not None
        assert ffn.down.bias is not None
        torch.nn.init.ones_(ffn.up.rows())
        ffn.up.bias.data = -torch.linspace(-3, 3, units + 1)[:-1]  # a kink at each
        hidden = ffn.up(x)[0].relu().detach()
        columns = torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1)
        solution = torch.linalg.lstsq(columns, target).solution[:, 0]
        ffn.down.rows().data, ffn.down.bias.data = solution[None, :-1], solution[-1:]
        y = ffn(x, context)[0, :, 0].detach()
        axes[1].plot(x.flatten(), y, color=colour, label=f"{units} units")
        if units == 6:
            axes[0].plot(x.flatten(), hidden * solution[:-1], color=SKY, linewidth=1, label=["each unit", *[None] * 5])
            axes[0].plot(x.flatten(), y, color=BLUE, linewidth=2.6, label="sum and bias")
    axes[1].plot(x.flatten(), target, color=BLACK, linestyle=":", label="sin 2x")
    axes[0].set(ylim=(-3, 3), ylabel="output")
    for axis in axes:
        axis.set_xlabel("input x")
        axis.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return drawing


@figure("concepts/gated-feed-forward")
def gated_feed_forward(plt: Any) -> Any:
    """A hidden unit of plain and gated networks as a function of two features."""
    grid = torch.linspace(-3, 3, 121)
    a, b = torch.meshgrid(grid, grid, indexing="xy")
    units = {"ReLU(a + b), plain": Relu().function()(a + b)}
    for name, spec in (("GLU", Sigmoid()), ("ReGLU", Relu()), ("SwiGLU", Silu())):
        units[f"{name}: {spec.kind}(a) · b"] = spec.function()(a) * b
    drawing, axes = plt.subplots(1, 4, figsize=(8, 2.7), sharey=True, layout="constrained")
    for axis, (name, values) in zip(axes, units.items(), strict=True):
        image = axis.imshow(values, origin="lower", extent=(-3, 3, -3, 3), cmap=DIVERGING, vmin=-9, vmax=9)
        axis.contour(grid, grid, values, levels=range(-8, 9, 2), colors=BLACK, linewidths=0.5)
        axis.set(title=name, xlabel="feature a", xticks=(-3, 0, 3), yticks=(-3, 0, 3))
        axis.title.set_fontsize(9.5)
        axis.grid(visible=False)
    axes[0].set_ylabel("feature b")
    drawing.colorbar(image, ax=axes, label="hidden unit", shrink=0.8)
    return drawing


def routed(balance: float) -> tuple[Tensor, Tensor]:
    """Train experts on a small regression; return the weights of 12 tokens [12, 8] and each expert's share [8]."""
    torch.manual_seed(1)
    spec = Experts(count=8, top_k=2, expert=Gated(width=8), balance=balance)
    mixture = spec.build(16)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.Adam(mixture.parameters(), lr=0.01)
    x = torch.randn(4, 64, 16) + 2.0  # tokens have much in common, as those of a text
    y = torch.randn(4, 64, 16)
    layout = make_layout(4, 64, x.device)
    for _ in range(200):
        aux = AuxOutputs()
        loss = F.mse_loss(mixture(x, Context(layout, layout, aux=aux)), y) + sum(aux.losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    choice = mixture.router(x.flatten(0, 1))
    weights = torch.zeros_like(choice.probabilities).scatter(-1, choice.experts, choice.weights).detach()
    return weights[:12], (weights > 0).float().mean(0) / spec.top_k


@figure("concepts/experts")
def experts(plt: Any) -> Any:
    """Experts of 12 tokens, the load with and without balancing, and total against active parameters."""
    weights, balanced = routed(balance=0.1)
    _, unbalanced = routed(balance=0.0)
    drawing, axes = plt.subplots(1, 3, figsize=(8, 3.4), layout="constrained", width_ratios=(1.1, 1.2, 1))
    image = axes[0].imshow(weights, cmap=HEATMAP, vmin=0, vmax=1)
    axes[0].set(title="weights, top 2 of 8", xlabel="expert", ylabel="token")
    axes[0].set(xticks=range(8), xticklabels=range(1, 9), yticks=range(0, 12, 2), yticklabels=range(1, 13, 2))
    axes[0].grid(visible=False)
    drawing.colorbar(image, ax=axes[0], shrink=0.7)
    places = torch.arange(8)
    axes[1].bar(places - 0.2, unbalanced * 100, 0.4, color=RED, label="not balanced")
    axes[1].bar(places + 0.2, balanced * 100, 0.4, color=BLUE, label="balanced")
    axes[1].axhline(12.5, color=BLACK, linestyle="--", linewidth=1)
    axes[1].set(title="share of the tokens", xlabel="expert", ylabel="%", xticks=places, xticklabels=range(1, 9))
    axes[1].legend(loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=2, frameon=False, fontsize=9, columnspacing=1)
    experts_of = "decoder.blocks.*.feedforward.count="
    models = {
        "Llama 2": (presets.llama(), presets.llama()),
        "Mixtral": (presets.mixtral(), override(presets.mixtral(), [f"{experts_of}2"])),  # as if there were 2 experts
        "DeepSeek\nV2 Lite": (presets.deepseek(), override(presets.deepseek(), [f"{experts_of}6"])),
    }
    for place, (config, used) in enumerate(models.values()):
        axes[2].bar(place - 0.2, count(config).parameters / 1e9, 0.4, color=ORANGE, label=None if place else "stored")
        axes[2].bar(
            place + 0.2, count(used).parameters / 1e9, 0.4, color=GREEN, label=None if place else "used by a token"
        )
    axes[2].set(title="parameters", ylabel="billions", xticks=range(3), xticklabels=models)
    axes[2].tick_params(axis="x", labelsize=9)
    axes[2].legend(loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=2, frameon=False, fontsize=9, columnspacing=1)
    return drawing
