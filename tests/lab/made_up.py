"""Made-up results of claims: some by which a claim holds, some by which it does not, some that do not decide it."""

from collections.abc import Callable
from typing import Any

from anyformer.lab.cells import Cell
from anyformer.lab.experiment import every

NAMES = [experiment.kind for experiment in every()]
Found = Callable[[Cell], dict[str, Any]]  # what might be found of a cell
CURVE = [[step, 3 / step] for step in range(1, 11)]


def made(found: dict[str, Any], cell: Cell) -> dict[str, Any]:
    """With a curve, and a little different for each seed."""
    seeds = {name: value + 0.01 * cell["seed"] if isinstance(value, float) else value for name, value in found.items()}
    return {"diverged": False, "curve": CURVE, **seeds}


def but(found: Found, changes: Found) -> Found:
    """The same with some things changed."""
    return lambda cell: found(cell) | changes(cell)


def experts(cell: Cell) -> dict[str, Any]:
    sparse, seed = cell["model"] == "experts", 0.01 * cell["seed"]
    shares = [[float(e == task % 8) for e in range(8)] for task in range(cell["tasks"])] if sparse else None
    sizes = {"parameters": 800, "active": 100, "shares": shares}
    told = {"told": 0.8 + seed, "told of letters": 0.1}
    return {"loss": (0.5 if sparse else 1.5) + seed, "accuracy": 0.9, **told, **sizes, "curve": CURVE}


def sort_positions(cell: Cell) -> dict[str, Any]:
    mean = (0.5 if cell["position"] == "learned" else 1.0) + 0.2 * (cell["scale"] == "none")
    return made({"mean": mean, "exact_match": 0.9}, cell) | {"fallen": 100 if mean < 1 else None}


def tagging(cell: Cell) -> dict[str, Any]:
    if cell["text"] == "ewt":
        return {"accuracy": 0.9 + 0.001 * cell["seed"]}
    right = 0.95 if cell["model"] == "attention" else 0.3
    near = (0.3 if cell["model"] == "word alone" else 0.95) + 0.001 * cell["seed"]
    shares = made({"within": 0.9, "beyond": right, "parameters": 100}, cell)
    return shares | {"near": near, "by distance": {"1": 0.9, "9": right}}


def encoder_decoder(cell: Cell) -> dict[str, Any]:
    n, seed = len(cell["lengths"]), 0.001 * cell["seed"]
    right = [1 - seed - (0.8 * at / (n - 1) if cell["model"] == "rnn" else 0.0) for at in range(n)]
    return {"right": right, "whole": [x * x for x in right], "parameters": 100, "curve": CURVE}


def translated(model: str, *right: float, by: float = 0.001) -> Found:
    """A model translates another share of the words, from the shortest sentences to the longest."""

    def change(cell: Cell) -> dict[str, Any]:
        n = len(cell["lengths"]) - 1
        shares = [right[0] + (right[1] - right[0]) * at / n + by * cell["seed"] for at in range(n + 1)]
        return {"right": shares} if cell["model"] == model else {}

    return but(encoder_decoder, change)


def graph(cell: Cell) -> dict[str, Any]:
    if cell["part"] == "exact":
        return {"outputs": 1e-16, "gradients": 1e-16}
    learnt, seed = "mask" in cell["model"] or cell["examples"] > 1000, 0.001 * cell["seed"]
    elsewhere = {"elsewhere": 0.95 - seed} if cell["model"] == "mask" else {}
    return {"accuracy": (0.96 if learnt else 0.5) + seed, "seen": 1.0, "guessing": 0.4, "curve": CURVE, **elsewhere}


def right_for(model: str, examples: int, right: float) -> Found:
    """A model labels another share of the nodes after that number of rows."""

    def change(cell: Cell) -> dict[str, Any]:
        hit = cell["part"] == "task" and (cell["model"], cell["examples"]) == (model, examples)
        return {"accuracy": right + 0.001 * cell["seed"]} if hit else {}

    return but(graph, change)


def moved(right: float) -> Found:
    return but(graph, lambda cell: {"elsewhere": right + 0.001 * cell["seed"]} if cell["model"] == "mask" else {})


HOLDS: dict[str, Found] = {
    "experts": experts,
    "sort_positions": sort_positions,
    "tagging": tagging,
    "encoder_decoder": encoder_decoder,
    "graph": graph,
}
FAILS: list[tuple[str, Found]] = [
    ("experts", but(experts, lambda cell: {"told": 0.3})),
    ("experts", but(experts, lambda cell: {"loss": 1.0 + (cell["model"] == "experts") + 0.01 * cell["seed"]})),
    ("sort_positions", but(sort_positions, lambda cell: {"mean": 2 - sort_positions(cell)["mean"]})),
    ("tagging", but(tagging, lambda cell: {"near": 0.5 + 0.01 * cell["seed"]} if cell["model"] == "window" else {})),
    ("tagging", but(tagging, lambda cell: {"beyond": 0.95 + 0.01 * cell["seed"]})),
    ("encoder_decoder", translated("rnn with attention", 1.0, 0.1)),
    ("encoder_decoder", translated("transformer", 0.1, 0.1)),
    ("encoder_decoder", translated("rnn", 1.0, 1.0)),
    ("graph", but(graph, lambda cell: {"gradients": 0.1} if cell["part"] == "exact" else {})),
    ("graph", right_for("full and positions", 64, 0.96)),
    ("graph", moved(0.5)),
]
UNDECIDED: list[tuple[str, Found]] = [
    ("experts", but(experts, lambda cell: {"loss": 1.0 + 0.1 * cell["seed"]})),
    ("experts", but(experts, lambda cell: {"told": 0.4 + 0.1 * cell["seed"]})),
    ("sort_positions", but(sort_positions, lambda cell: {"mean": 1.0 + 0.1 * cell["seed"]})),
    ("tagging", but(tagging, lambda cell: {"beyond": 0.5})),
    ("tagging", but(tagging, lambda cell: {"near": 0.7 + 0.1 * cell["seed"]})),
    ("encoder_decoder", translated("rnn", 0.5, 0.1)),
    ("encoder_decoder", translated("transformer", 1.0, 0.3, by=0.3)),
    ("graph", right_for("mask", 2048, 0.6)),
    ("graph", but(graph, lambda cell: {"accuracy": 0.9 + 0.03 * cell["seed"]} if cell["part"] == "task" else {})),
]
