"""The figure of the page on streams: the mask of a row with an image in it, and the coordinates of its places."""

from typing import Any

import torch

from anyformer.attention.layout import make_layout, sees
from anyformer.config import AxialRotary, Causal
from figures.attention import grid
from figures.style import BLUE, GREEN, ORANGE, figure

PLACES = ("what", "is", *(f"patch {i}" for i in range(1, 5)), "a", "cat")
MARKS = [0, 0, -1, -1, -1, -1, 0, 0]


@figure("concepts/streams")
def streams(plt: Any) -> Any:
    """Which places see which, and where rotary positions by axis put them."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", width_ratios=(1.05, 1))
    layout = make_layout(1, len(PLACES), torch.device("cpu"), marks=torch.tensor([MARKS]))
    grid(left, sees(Causal(), layout, layout)[0], "one mask: causal, and groups")
    left.set_xticks(range(len(PLACES)), PLACES, rotation=60, ha="right")
    left.set_yticks(range(len(PLACES)), PLACES)
    patch = [0, 0, 0, 1, 2, 3, 0, 0]
    is_patch = [mark < 0 for mark in MARKS]
    first = [i - p for i, p in enumerate(patch)]
    axes = {
        "time": (BLUE, "o", first),
        "row": (ORANGE, "s", [a + p // 2 for a, p in zip(first, patch, strict=True)]),
        "column": (GREEN, "^", [a + p % 2 for a, p in zip(first, patch, strict=True)]),
    }
    for shift, (name, (colour, marker, values)) in zip((-0.2, 0.0, 0.2), axes.items(), strict=True):
        at = [i + shift for i in range(len(PLACES))]
        right.plot(at, values, marker, color=colour, label=name, markersize=6)
    right.axvspan(is_patch.index(True) - 0.5, is_patch.index(True) + 3.5, color="0.92", zorder=0)
    right.set_xticks(range(len(PLACES)), PLACES, rotation=60, ha="right")
    right.set(ylabel="position", title=f"coordinates for {AxialRotary().kind}")
    right.legend(loc="upper left")
    return drawing
