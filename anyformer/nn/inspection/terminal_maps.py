"""Attention maps in the terminal: cells with a percentage, coloured if the terminal has colours.

Columns are aligned by display width: a Korean or Chinese character takes two cells.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from torch import Tensor

MAX_LABEL, MIN_CELL = 10, 4  # width of a row's label, and of a column, in cells
STYLES = ("", "on color(17)", "on color(18)", "on color(19)", "on color(20)", "on color(26)", "on color(32)")
BRIGHT = ("black on color(38)", "black on color(44)", "black on color(50)", "black on color(226)")
RAMP = (*STYLES, *BRIGHT)


class Link(NamedTuple):
    """The attention weight of one head from a query to a key."""

    weight: float
    layer: int
    head: int
    query: int
    key: int


def fitted(token: str, width: int, right: bool = False) -> str:
    """Return a token in exactly `width` cells, left- or right-aligned; a longer one is cut and ends in …"""
    token = token if cell_len(token) <= width else set_cell_size(token, width - 1).rstrip() + "…"
    padding = " " * (width - cell_len(token))
    return padding + token if right else token + padding


def map_lines(weights: Tensor, rows: Sequence[str], columns: Sequence[str], width: int = 80) -> Iterator[Text]:
    """Yield a map [t, s] as lines of at most `width` cells: a row for each query, in percent; · is less than 1 %.

    Keys that do not fit side by side continue in further blocks below.
    """
    left = min(MAX_LABEL, max(map(cell_len, rows)))
    number = len(str(max(len(rows), len(columns)) - 1))
    cell = max(MIN_CELL, min(MAX_LABEL, max(map(cell_len, columns)) + 1), number + 1)
    margin = number + 1 + left + 1
    at_once = max(1, (width - margin) // cell)
    for begin in range(0, len(columns), at_once):
        shown = range(begin, min(begin + at_once, len(columns)))
        if begin:
            yield Text()
        yield Text(" " * margin + "".join(f"{j:>{cell}}" for j in shown), style="dim")
        yield Text(" " * margin + "".join(" " + fitted(columns[j], cell - 1, right=True) for j in shown), style="bold")
        for i, label in enumerate(rows):
            line = Text.assemble((f"{i:>{number}} ", "dim"), (fitted(label, left) + " ", "bold"))
            for j in shown:
                line.append(_percent(weights[i, j].item(), cell))
            yield line


def _percent(weight: float, width: int) -> Text:
    shade = RAMP[min(len(RAMP) - 1, max(0, int(weight * len(RAMP))))]
    label = "·" if weight < 0.01 else f"{100 * weight:.0f}"
    return Text(f"{label:>{width}}", style="dim" if weight < 0.01 else shade)


def strongest(maps: Tensor, layers: Sequence[int], heads: Sequence[int], most: int = 10) -> list[Link]:
    """Return the `most` highest weights of maps [layers, heads, t, s] in descending order, as links.

    Queries that see only one key are left out: their weight is always 1.
    """
    has_choice = (maps > 0).flatten(0, 1).any(dim=0).sum(dim=-1) > 1  # [t]
    weights = (maps * has_choice[:, None]).flatten()
    values, indices = weights.topk(min(most, weights.numel()))
    links = []
    for value, index in zip(values.tolist(), indices.tolist(), strict=True):
        if value > 0:
            index, key = divmod(index, maps.shape[3])
            index, query = divmod(index, maps.shape[2])
            layer, head = divmod(index, maps.shape[1])
            links.append(Link(value, layers[layer], heads[head], query, key))
    return links
