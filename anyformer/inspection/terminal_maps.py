"""Attention maps in the terminal: cells with a number in them, coloured where there is colour.

Tokens line up by the cells that they take: a Korean or Chinese character takes two.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from torch import Tensor

LABEL, CELL = 10, 4  # cells of a row's label at most, and of a column at least
STYLES = ("", "on color(17)", "on color(18)", "on color(19)", "on color(20)", "on color(26)", "on color(32)")
BRIGHT = ("black on color(38)", "black on color(44)", "black on color(50)", "black on color(226)")
RAMP = (*STYLES, *BRIGHT)


class Link(NamedTuple):
    """A query that looks at a key."""

    weight: float
    layer: int
    head: int
    query: int
    key: int


def fitted(token: str, width: int, right: bool = False) -> str:
    """A token in exactly so many cells, on the left of them or on the right; what is too long ends in …"""
    token = token if cell_len(token) <= width else set_cell_size(token, width - 1).rstrip() + "…"
    room = " " * (width - cell_len(token))
    return room + token if right else token + room


def map_lines(weights: Tensor, rows: Sequence[str], columns: Sequence[str], width: int = 80) -> Iterator[Text]:
    """A map [t, s] as lines of at most so many cells: a row for each query, in percent; · is less than one.

    Where the keys do not fit side by side, they follow below, as many at a time as do.
    """
    left = min(LABEL, max(map(cell_len, rows)))
    number = len(str(max(len(rows), len(columns)) - 1))
    cell = max(CELL, min(LABEL, max(map(cell_len, columns)) + 1), number + 1)
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
    said = "·" if weight < 0.01 else f"{100 * weight:.0f}"
    return Text(f"{said:>{width}}", style="dim" if weight < 0.01 else shade)


def strongest(maps: Tensor, layers: Sequence[int], heads: Sequence[int], most: int = 10) -> list[Link]:
    """The greatest weights of maps [layers, heads, t, s], the greatest first, with the numbers of layers and heads.

    A query that sees one key only is left out: its weight says nothing.
    """
    free = (maps > 0).flatten(0, 1).any(dim=0).sum(dim=-1) > 1  # [t]
    found = (maps * free[:, None]).flatten()
    values, places = found.topk(min(most, found.numel()))
    links = []
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        if value > 0:
            place, key = divmod(place, maps.shape[3])
            place, query = divmod(place, maps.shape[2])
            layer, head = divmod(place, maps.shape[1])
            links.append(Link(value, layers[layer], heads[head], query, key))
    return links
