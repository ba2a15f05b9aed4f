"""Boxes and arrows on an axis without ticks."""

from typing import Any


def blank(axis: Any, width: float, height: float) -> None:
    """Prepare an axis for a diagram: coordinates from 0 to width and height, no frame."""
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.set_axis_off()


def box(
    axis: Any, at: tuple[float, float], size: tuple[float, float], text: str, colour: str, **text_style: Any
) -> None:
    """Draw a rounded box with its lower left corner at a point; the colour fills it lightly."""
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.12"
    axis.add_patch(FancyBboxPatch(at, *size, boxstyle=shape, facecolor=f"{colour}33", edgecolor=colour, linewidth=1.2))
    centre = at[0] + size[0] / 2, at[1] + size[1] / 2
    axis.text(*centre, text, **{"ha": "center", "va": "center", "fontsize": 9.5} | text_style)


def arrow(
    axis: Any, start: tuple[float, float], end: tuple[float, float], colour: str = "#444444", **style: Any
) -> None:
    """Draw an arrow between two points."""
    look = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.2, "shrinkA": 1, "shrinkB": 1}
    axis.annotate("", xy=end, xytext=start, arrowprops=look | style)
