"""Draws docs/figures/activations.png: every activation and its slope, as the model computes them."""

from pathlib import Path

import torch

from anyformer.config import Gelu, Identity, LeakyRelu, Relu, Sigmoid, Silu, SquaredRelu, Tanh
from anyformer.inspection.plot import pyplot
from anyformer.nn.feedforward import activation

KINDS = [Relu(), LeakyRelu(slope=0.1), SquaredRelu(), Sigmoid(), Tanh(), Gelu(), Silu(), Identity()]


def main() -> None:
    plt = pyplot()
    figure, axes = plt.subplots(2, 4, figsize=(12, 5.4), sharex=True, sharey=True, layout="constrained")
    for axis, spec in zip(axes.flat, KINDS, strict=True):
        x = torch.linspace(-3, 3, 601, requires_grad=True)
        y = activation(spec)(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        axis.plot(x.detach(), y.detach(), color="#0072b2", label="f(x)")
        axis.plot(x.detach(), slope, color="#d55e00", linestyle="--", label="slope")
        axis.set(title=spec.kind, ylim=(-1.2, 3))
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
