"""Figures 8 inches wide, readable in grey and for the colour-blind: each line has its own colour, dash and marker."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anyformer.nn.inspection.plot import pyplot

WIDTH = 8.0  # inches; pages show figures 880 pixels wide, where text of 10 points is 15 pixels high
# Okabe & Ito (2008), dark ones first: they differ for every kind of colour vision
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C")
GREY, FILL = "#6E6E6E", "#9CC9E8"  # reference lines and their labels; bars
LINE = 0.085  # height of a line of text, as a fraction of a panel's height
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2)), (0, (3, 3)))
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")

Points = Mapping[float, Sequence[float]]  # the values at each x, one for each seed


def style(number: int) -> dict[str, Any]:
    """Return the style of the n-th line of a figure."""
    n = number % len(COLOURS)
    return {"color": COLOURS[n], "linestyle": DASHES[n], "marker": MARKS[n], "markersize": 5, "linewidth": 1.6}


def panels(layout: int | str = 1, height: float = 3.2, **options: Any) -> tuple[Any, list[Any]]:
    """Return a figure with its axes: a number of them, two in a row, or a layout such as "ab;cc" (c as wide as both).

    `height` is that of a row, in inches; `options` are passed to matplotlib's `subplot_mosaic`.
    """
    if isinstance(layout, int):
        letters = "abcdefghijklmnopqrstuvwxyz"[:layout]
        layout = ";".join(letters[i : i + 2].ljust(min(2, layout), ".") for i in range(0, layout, 2))
    rows = layout.count(";") + 1
    figure, named = pyplot().subplot_mosaic(
        layout, figsize=(WIDTH, height * rows), layout="constrained", empty_sentinel=".", **options
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    for axis in named.values():
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(named.values())


def legend(figure: Any, *axes: Any, columns: int = 3, where: str = "lower") -> None:
    """Write one legend below (or above) all panels, for the lines of the given axes."""
    known: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    options = {"ncols": columns, "frameon": False, "handlelength": 3.5}
    figure.legend(known.values(), known.keys(), loc=f"outside {where} center", **options)


def panel_legend(axis: Any, columns: int = 1) -> None:
    """Write the legend of one panel above it."""
    place = {"loc": "lower left", "bbox_to_anchor": (-0.1, 1.0), "borderaxespad": 0.2}
    axis.legend(ncols=columns, frameon=False, handlelength=3.5, columnspacing=1.0, **place)


def label_ends(axis: Any) -> None:
    """Write the name of each line at its right end; lines through the same points share one label.

    Overlapping labels are moved apart.
    """
    groups: list[tuple[dict[float, float], list[Any]]] = []
    for line in axis.get_lines():
        points = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        if not line.get_label().startswith("_"):
            same = [
                known for known in groups if points.items() <= known[0].items() or known[0].items() <= points.items()
            ]
            if same:
                same[0][1].append(line)
            else:
                groups.append((points, [line]))
    low, *ends, high = (
        axis.transScale.transform((1, y))[1]
        for y in (axis.get_ylim()[0], *(list(points.values())[-1] for points, _ in groups), axis.get_ylim()[1])
    )
    order = sorted(range(len(groups)), key=lambda i: ends[i])
    place = {i: (ends[i] - low) / (high - low) for i in order}
    for _ in range(100):
        place[order[0]] = max(place[order[0]], LINE * len(groups[order[0]][1]) / 2)  # above the labels of the x axis
        for i, j in itertools.pairwise(order):
            short = LINE * (len(groups[i][1]) + len(groups[j][1])) / 2 - (place[j] - place[i])
            if short > 0:
                place[i], place[j] = place[i] - short / 2, place[j] + short / 2
    for i, (_, lines) in enumerate(groups):
        text = "\n".join(line.get_label() for line in lines)
        color = _readable(lines[0].get_color()) if len(lines) == 1 else GREY
        axis.annotate(text, (1.03, place[i]), xycoords="axes fraction", va="center", color=color, annotation_clip=False)


def _readable(color: str) -> str:
    """Return a colour for text: light ones are darkened, for contrast with white."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 140
    return "#" + "".join(f"{int(part * (0.65 if light else 1)):02X}" for part in (red, green, blue))


def lines(axis: Any, named: Mapping[str, Points], marks: bool = True, first: int = 0) -> None:
    """Draw the mean of each line by x, with a band of one standard deviation; `first` is the first line's style."""
    for number, (name, points) in enumerate(named.items(), first):
        options = style(number) if marks else {**style(number), "marker": ""}
        xs = sorted(points)
        if not xs:
            continue
        means = np.array([np.mean(points[x]) for x in xs])
        spread = np.array([np.std(points[x], ddof=1) if len(points[x]) > 1 else 0.0 for x in xs])
        axis.plot(xs, means, label=name, **options)
        if spread.any():
            low = np.array([min(points[x]) for x in xs])  # on a logarithmic axis no band goes below 0
            low = np.where((low > 0) & (spread >= means), low, means - spread)
            axis.fill_between(xs, low, means + spread, color=options["color"], alpha=0.15, linewidth=0)


def curves(axis: Any, named: Mapping[str, Sequence[Sequence[Sequence[float]]]]) -> None:
    """Draw loss curves: for each name those of all seeds, each a list of (step, loss).

    A curve that ends early, of a training that diverged, counts up to its end; it may be empty.
    """
    gathered: dict[str, dict[float, list[float]]] = {}
    for name, seeds in named.items():
        points, recorded = gathered.setdefault(name, {}), [curve for curve in seeds if curve]
        steps = np.array([step for step, _ in max(recorded, key=lambda curve: curve[-1][0], default=[])])
        for own, losses in (zip(*curve, strict=True) for curve in recorded):
            for step in steps[(steps >= own[0]) & (steps <= own[-1])]:
                points.setdefault(float(step), []).append(float(np.interp(step, own, losses)))
    lines(axis, gathered, marks=False)
    axis.set(xlabel="step", ylabel="training loss, nats")


def bars(axis: Any, named: Mapping[str, Sequence[float]], fills: Sequence[str] = (FILL,)) -> None:
    """Draw a horizontal bar for each name, the first on top: mean, one standard deviation, every value as a dot."""
    for number, values in enumerate(named.values()):
        if len(values):
            axis.barh(number, np.mean(values), color=fills[number % len(fills)], height=0.65)
    dots(axis, named)
    axis.set_xlim(left=0)


def dots(axis: Any, named: Mapping[str, Sequence[float]], bars: bool = True) -> None:
    """Draw every value of each name as a dot, the first name on top, with bars of one standard deviation."""
    for number, values in enumerate(named.values()):
        if bars and len(values) > 1:
            spread = np.std(values, ddof=1)
            axis.errorbar(np.mean(values), number, xerr=spread, fmt="|", color=GREY, capsize=4, markersize=12)
        axis.plot(values, [number] * len(values), "o", color="#000000", markersize=3.5)
    axis.set_yticks(range(len(named)), list(named))
    axis.set_ylim(len(named) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


def reference(axis: Any, value: float, name: str = "", *, across: bool = True, below: bool = False) -> None:
    """Draw a line at a value of y (or of x) with its name: at the right end, above or below it (or above the panel)."""
    options = {"color": GREY, "linewidth": 1.0, "linestyle": (0, (4, 2))}
    if across:
        axis.axhline(value, **options)
        place = {"ha": "right", "va": "top" if below else "bottom", "textcoords": "offset points", "color": GREY}
        axis.annotate(name, (1, value), xytext=(0, -2 if below else 1), xycoords=("axes fraction", "data"), **place)
    else:
        axis.axvline(value, **options)
        place = {"ha": "center", "va": "bottom", "textcoords": "offset points", "color": GREY}
        axis.annotate(name, (value, 1), xytext=(0, 2), xycoords=("data", "axes fraction"), **place)


def log_ticks(axis: Any, values: Sequence[float], *, across: bool = True) -> None:
    """Make the x axis (or the y axis) logarithmic, with plain numbers at the given values."""
    names = [f"{n / 1024:g}k" if n >= 1024 and n % 1024 == 0 else f"{n:,g}" for n in values]
    if across:
        axis.set_xscale("log")
        axis.set_xticks(values, names)
        axis.xaxis.minorticks_off()
    else:
        axis.set_yscale("log")
        axis.set_yticks(values, names)
        axis.yaxis.minorticks_off()


def save(figure: Any, path: str | Path, dpi: int = 150) -> Path:
    """Write a figure to a file, close it, and return the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, metadata={"Software": None} if path.suffix == ".png" else None)
    pyplot().close(figure)
    return path
