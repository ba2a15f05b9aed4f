"""Colours and sizes of the figures, and the register of the functions that draw them.

Figures are shown 880 pixels wide: at 8 inches and 220 dots per inch, text of 10 points is about 15 pixels high.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyformer.nn.inspection.plot import pyplot

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
# Okabe and Ito (2008): distinguishable with every common kind of colour blindness.
BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, RED, BLACK = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442", "#d55e00", "#000000"
)  # fmt: skip
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)
HEATMAP = "viridis"  # for values ≥ 0; signed values: DIVERGING, symmetric about 0
DIVERGING = "RdBu_r"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.8,
}

Draw = Callable[[Any], Any]
FIGURES: dict[str, Draw] = {}


def figure(name: str) -> Callable[[Draw], Draw]:
    """Register a function as the drawing of docs/figures/NAME.png. It takes pyplot and returns the figure."""

    def register(draw: Draw) -> Draw:
        assert name not in FIGURES, name
        FIGURES[name] = draw
        return draw

    return register


def save(name: str, folder: Path = FOLDER) -> Path:
    """Draw a figure and write it as a PNG. The same code writes the same bytes."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        drawing = FIGURES[name](plt)
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=160, metadata={"Software": None})
        plt.close(drawing)
    return path
