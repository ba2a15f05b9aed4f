"""Figures: parts of a block: linear layers, norms, dropout, residuals, feed-forwards, activations, experts."""

from typing import Any

import torch

from anyformer.config import Gelu, Identity, LayerNorm, LeakyRelu, Relu, Sigmoid, Silu, SquaredRelu, Tanh
from anyformer.nn.feedforward import activation
from anyformer.nn.norm import build_norm
from figures.style import BLUE, COLOURS, RED, figure

ACTIVATIONS = (Relu(), LeakyRelu(slope=0.1), SquaredRelu(), Sigmoid(), Tanh(), Gelu(), Silu(), Identity())


@figure("concepts/activations")
def activations(plt: Any) -> Any:
    """Every activation and its derivative, as the model computes them."""
    drawing, axes = plt.subplots(2, 4, figsize=(8, 4.4), sharex=True, sharey=True, layout="constrained")
    for axis, spec in zip(axes.flat, ACTIVATIONS, strict=True):
        x = torch.linspace(-3, 3, 601, requires_grad=True)
        y = activation(spec)(x)
        (derivative,) = torch.autograd.grad(y.sum(), x)
        axis.plot(x.detach(), y.detach(), color=BLUE, label="f(x)")
        axis.plot(x.detach(), derivative, color=RED, linestyle="--", label="f′(x)")
        axis.set(title=spec.kind, ylim=(-1.2, 3))
    axes[0][0].legend()
    return drawing


@figure("concepts/layer-norm")
def layer_norm(plt: Any) -> Any:
    """Vectors of four tokens before and after layer normalisation."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(4, 16, generator=generator)
    x = noise * torch.tensor([[0.5], [1.0], [2.0], [4.0]]) + torch.tensor([[-6.0], [2.0], [8.0], [-1.0]])
    y = build_norm(LayerNorm(), 16)(x).detach()
    drawing, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axis, values, title in zip(axes, (x, y), ("before", "after"), strict=True):
        for token, colour in enumerate(COLOURS[:4]):
            axis.plot(values[token], color=colour, label=f"token {token + 1}")
        axis.set(title=title, xlabel="feature", ylabel="value")
    axes[1].legend(ncols=2, loc="lower left")
    return drawing
