"""Figure: which part of the weights and of a batch each process holds."""

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap

from figures.style import BLUE, GREEN, ORANGE, PURPLE, figure

SIZE, EVERY = 8, 4  # rows and columns of a drawing; the colour of what every process holds
COLOURS = ListedColormap([BLUE, ORANGE, GREEN, PURPLE, "#d9d9d9"])


@figure("processes")
def splits(plt: Any) -> Any:
    """Weights and batch of four processes, for each split and for a mesh of two by two."""
    whole = np.full((SIZE, SIZE), EVERY)
    by_row = np.repeat(np.arange(4), SIZE // 4)[:, None].repeat(SIZE, axis=1)
    chunks = np.array([0, 1, 2, 3, 3, 2, 1, 0])[None].repeat(SIZE, axis=0)  # of tokens, under a causal mask
    rows, columns = np.indices((SIZE, SIZE)) // (SIZE // 2)
    checks = np.indices((SIZE, SIZE)).sum(axis=0) % 2  # two processes read each half of the rows
    cases = {
        "data (DDP)": (whole, by_row),
        "shard = full (FSDP2)": (by_row, by_row),
        "tensor = 4": (by_row.T, whole),
        "context = 4": (whole, chunks),
        "tensor = 2, shard = full": (2 * rows + columns, 2 * rows + checks),
    }
    drawing, axes = plt.subplots(2, len(cases), figsize=(8, 3.6), layout="constrained")
    for i, (name, parts) in enumerate(cases.items()):
        for axis, part in zip(axes[:, i], parts, strict=True):
            axis.imshow(part, cmap=COLOURS, vmin=0, vmax=EVERY, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
            axis.spines[:].set_visible(False)
        axes[0, i].set_title(name, fontsize=8.5)
        axes[0, i].set_xlabel("outputs of a layer", fontsize=8)
        axes[1, i].set_xlabel("tokens", fontsize=8)
    axes[0, 0].set_ylabel("weights", fontsize=8)
    axes[1, 0].set_ylabel("batch (rows)", fontsize=8)
    names = ("process 0", "process 1", "process 2", "process 3", "every process")
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLOURS(k)) for k in range(len(names))]
    drawing.legend(patches, names, loc="outside lower center", ncols=len(names), fontsize=8.5, frameon=False)
    return drawing
