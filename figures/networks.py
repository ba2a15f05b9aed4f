"""Figures: feed-forward networks: hidden units, activations, gates, experts."""

from typing import Any

import torch

from anyformer.config import Activation, Gelu, Identity, LeakyRelu, Relu, Sigmoid, Silu, SquaredRelu, Tanh
from anyformer.nn.feedforward import activation
from figures.style import BLUE, RED, figure

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
        y = activation(spec)(x)
        (derivative,) = torch.autograd.grad(y.sum(), x)
        first = axis is axes[0][0]
        axis.plot(x.detach(), y.detach(), color=BLUE, label="f(x)" if first else None)
        axis.plot(x.detach(), derivative, color=RED, linestyle="--", label="f′(x)" if first else None)
        axis.set(title=spec.kind, ylim=(-1.2, 3))
    for axis in axes[1]:
        axis.set_xlabel("x")
    drawing.legend(ncols=2, loc="outside upper center", frameon=False)
    return drawing
