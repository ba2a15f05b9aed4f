"""Scenes of one to three coloured shapes, and sentences that describe them. Imports no torch.

A reference such as `scene:48 large red circle 12 20, small blue square 30 18` describes a picture of 48×48 pixels in
full: shapes with their size, colour and centre (column, row). Shapes are in a row, from left to right, or in a
column, from top to bottom; the sentence names them in this order.
"""

import re
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import numpy as np

from anyformer.config.spec import ConfigError, Fault, did_you_mean
from anyformer.data.synthetic import Split, split_of
from anyformer.recipe import SCENE_PREFIX, Scenes

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 40),
    "purple": (160, 60, 200),
    "white": (240, 240, 240),
}
FORMS = ("circle", "square", "triangle")
RADII = {"small": 3, "large": 6}  # in pixels
GAP = 13  # least distance of neighbours, from centre to centre
JITTER = 4  # most pixels by which a shape is beside the line that all of them share
RELATIONS = ("left of", "above")
MAX_TRIES = 1000  # draws for each row before a source is refused
SHAPE = re.compile(rf"({'|'.join(RADII)}) ({'|'.join(COLOURS)}) ({'|'.join(FORMS)}) (\d+) (\d+)")
PAIRS = [f"{colour} {form}" for colour in COLOURS for form in FORMS]


class SceneShape(NamedTuple):
    """A shape, and the column and row of its centre."""

    size: str
    colour: str
    form: str
    x: int
    y: int


def generate(spec: Scenes, split: Split, seed: int) -> dict[str, list[str]]:
    """Return `spec.count` scenes of the split as references (source) and sentences (target), all of them distinct.

    A scene belongs to a split by a hash of its reference; only training scenes depend on the seed.
    """
    _check_pairs(spec)
    rng = Random(f"scenes {split} {seed if split == 'train' else ''}")
    rows: dict[str, str] = {}
    for _ in range(MAX_TRIES * spec.count):
        if len(rows) == spec.count:
            break
        shapes, axis = _draw_scene(spec, rng)
        pairs = {f"{shape.colour} {shape.form}" for shape in shapes}
        if pairs & {*spec.without} or (spec.only and not pairs & {*spec.only}):
            continue
        name = f"{SCENE_PREFIX}{spec.size} " + ", ".join(" ".join(map(str, shape)) for shape in shapes)
        if split_of(name) == split:
            rows[f"<image:{name}>"] = _describe(shapes, axis)
    if len(rows) < spec.count:
        raise ConfigError([Fault("count", f"= {spec.count}: only {len(rows)} distinct scenes were found")])
    return {"source": list(rows), "target": list(rows.values())}


def draw(name: str) -> np.ndarray:
    """Return the picture of a reference, uint8 [size, size, 3]. Raise a `ValueError` if the reference is wrong."""
    size, _, listed = name.removeprefix(SCENE_PREFIX).partition(" ")
    found = [SHAPE.fullmatch(text) for text in listed.split(", ")]
    if not size.isdecimal() or not 1 <= int(size) <= 1024 or not all(found):
        raise ValueError(f"is no scene, such as {SCENE_PREFIX}48 large red circle 12 20, small blue square 30 18")
    picture = np.zeros((int(size), int(size), 3), dtype=np.uint8)
    rows, columns = np.indices(picture.shape[:2])
    for match in filter(None, found):
        radius, form = RADII[match[1]], match[3]
        x, y = columns - int(match[4]), rows - int(match[5])
        match form:
            case "circle":
                inside = x * x + y * y <= (radius + 0.3) ** 2
            case "square":
                inside = np.maximum(abs(x), abs(y)) < radius
            case _:
                inside = (abs(y) <= radius) & (2 * abs(x) <= y + radius)
        picture[inside] = COLOURS[match[2]]
    return picture


def _draw_scene(spec: Scenes, rng: Random) -> tuple[list[SceneShape], int]:
    """Return random shapes along an axis: 0 from left to right, 1 from top to bottom."""
    count, axis, edge = rng.randint(1, spec.most), rng.randrange(2), max(RADII.values())
    along = _spread(count, edge, spec.size - 1 - edge, rng)
    line = rng.randint(edge + JITTER, spec.size - 1 - edge - JITTER)
    shapes = []
    for place in along:
        centre = place, line + rng.randint(-JITTER, JITTER)
        x, y = centre if axis == 0 else centre[::-1]
        shapes.append(SceneShape(rng.choice([*RADII]), rng.choice([*COLOURS]), rng.choice(FORMS), x, y))
    return shapes, axis


def _spread(count: int, first: int, last: int, rng: Random) -> Iterator[int]:
    """Yield random places in order, at least GAP apart."""
    slack = last - first - (count - 1) * GAP
    offsets = sorted(rng.randint(0, slack) for _ in range(count))
    return (first + offset + i * GAP for i, offset in enumerate(offsets))


def _describe(shapes: list[SceneShape], axis: int) -> str:
    return f" {RELATIONS[axis]} ".join(f"a {shape.size} {shape.colour} {shape.form}" for shape in shapes)


def _check_pairs(spec: Scenes) -> None:
    faults = [
        Fault(f"{name}.{i}", f"= {pair!r}: not a colour and a shape; {did_you_mean(pair, PAIRS)}")
        for name, pairs in (("without", spec.without), ("only", spec.only))
        for i, pair in enumerate(pairs)
        if pair not in PAIRS
    ]
    if faults:
        raise ConfigError(faults)
