"""Figures: Muon's orthogonal updates, and width transfer."""

from typing import Any

import torch

from anyformer.lab.coordinates import Coordinate, check_coordinates
from anyformer.recipe import MUON_ITERATIONS
from anyformer.training.muon import COEFFICIENTS, orthogonalise
from figures.style import BLUE, COLOURS, ORANGE, RED, figure


@figure("concepts/muon")
def muon(plt: Any) -> Any:
    """Effect of the iterations on a singular value, and singular values of an update before and after."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    start = torch.linspace(0, 1, 500, dtype=torch.double)
    value, (a, b, c) = start.clone(), COEFFICIENTS
    for number in range(1, MUON_ITERATIONS + 1):
        value = a * value + b * value**3 + c * value**5
        if number in (1, 2, 5):
            colour = {1: ORANGE, 2: RED, 5: BLUE}[number]
            left.plot(start, value, color=colour, label=f"{number} iteration{'s' if number > 1 else ''}")
    left.axhline(1, color="grey", linewidth=1, linestyle="--")
    left.set(title="Newton–Schulz iterations", xlabel="singular value, relative to the norm", ylabel="after")
    left.legend(loc="lower right")
    torch.manual_seed(0)
    update = torch.randn(64, 4, dtype=torch.double) @ torch.randn(4, 64, dtype=torch.double)
    update = update + 0.3 * torch.randn(64, 64, dtype=torch.double)  # few directions are large, as in training
    after = orthogonalise(update[None], torch.double)[0]
    for name, matrix, colour in (("momentum", update / update.norm(), RED), ("update of Muon", after, BLUE)):
        right.semilogy(range(1, 65), torch.linalg.svdvals(matrix), ".", color=colour, label=name)
    right.set(title="a 64 × 64 matrix", xlabel="number of the singular value", ylabel="singular value")
    right.legend()
    return drawing


@figure("concepts/width-transfer")
def width_transfer(plt: Any) -> Any:
    """Sizes of the last layer's output by width after each of four steps, without and with muP."""
    torch.set_num_threads(1)
    found = check_coordinates("shakespeare", COORDINATES)
    drawing, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharey=True)
    for axis, scale, title in zip(axes, ("standard", "mup"), ("without muP", "with muP"), strict=True):
        for step in range(5):
            sizes = _sizes(found, scale, step)
            axis.loglog(sizes.keys(), sizes.values(), "o-", color=COLOURS[step], label=f"step {step}")
        axis.set_xticks(list(sizes), [str(width) for width in sizes])
        axis.minorticks_off()
        axis.set(title=title, xlabel="width")
    axes[0].set_ylabel("mean size of the residual stream")
    axes[0].legend()
    return drawing


COORDINATES = [
    "model.width=32,64,128,256",
    "data.train={kind='text', path='tinyshakespeare/input.txt', stop=0.01}",
    "data.valid=none",
    "model.decoder.depth=2",
    "model.init={kind='normal', std=0.1}",
    "batches.rows=4",
    "batches.length=32",
    "train.optimizer.lr=1e-2",
]


def _sizes(found: list[Coordinate], scale: str, step: int) -> dict[int, float]:
    same = [one for one in found if (one.scale, one.step, one.name) == (scale, step, "decoder.1.out")]
    return {one.width: one.size for one in same}
