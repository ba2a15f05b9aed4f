"""Figures that are readable in grey and for the colour-blind: each line has its own colour, dash and marker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyformer.inspection.plot import pyplot

# Okabe & Ito (2008), dark ones first: they differ for every kind of colour vision
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2)), (0, (3, 3)))
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")

Points = Mapping[float, Sequence[float]]  # the values at each x, one for each seed


def style(number: int) -> dict[str, Any]:
    """Return the style of the n-th line of a figure."""
    n = number % len(COLOURS)
    return {"color": COLOURS[n], "linestyle": DASHES[n], "marker": MARKS[n], "markersize": 4, "linewidth": 1.4}


def panels(count: int = 1, width: float = 5.2, height: float = 3.8) -> tuple[Any, Sequence[Any]]:
    """Return a figure with `count` axes side by side."""
    plt = pyplot()
    figure, axes = plt.subplots(1, count, figsize=(width * count, height), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def lines(axis: Any, named: Mapping[str, Points], marks: bool = True) -> None:
    """Draw the mean of each line by x, with a band of one standard deviation."""
    for number, (name, points) in enumerate(named.items()):
        options = style(number) if marks else {**style(number), "marker": ""}
        xs = sorted(points)
        if not xs:
            continue
        means = np.array([np.mean(points[x]) for x in xs])
        spread = np.array([np.std(points[x], ddof=1) if len(points[x]) > 1 else 0.0 for x in xs])
        axis.plot(xs, means, label=name, **options)
        if spread.any():
            axis.fill_between(xs, means - spread, means + spread, color=options["color"], alpha=0.15, linewidth=0)


def curves(axis: Any, named: Mapping[str, Sequence[Sequence[Sequence[float]]]]) -> None:
    """Draw loss curves: for each name those of all seeds, each a list of (step, loss) at the same steps."""
    gathered: dict[str, dict[float, list[float]]] = {}
    for name, seeds in named.items():
        points = gathered.setdefault(name, {})
        for curve in seeds:
            for step, loss in curve:
                points.setdefault(step, []).append(loss)
    lines(axis, gathered, marks=False)
    axis.set(xlabel="step", ylabel="training loss per token, nats")


def bars(axis: Any, named: Mapping[str, Sequence[float]]) -> None:
    """Draw a bar for each name: mean, one standard deviation, and every value as a dot."""
    for number, values in enumerate(named.values()):
        if not len(values):
            continue
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        axis.bar(number, np.mean(values), yerr=spread, color="#BBBBBB", edgecolor="#000000", capsize=4, width=0.7)
        axis.plot([number] * len(values), values, ".", color="#000000", markersize=4)
    rotated = any(len(name) > 8 for name in named)
    axis.set_xticks(range(len(named)), list(named), rotation=30 if rotated else 0, ha="right" if rotated else "center")


def save(figure: Any, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)
    return path
