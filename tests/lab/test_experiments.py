"""Every claim: cells that are known by what they hold, and a verdict that follows the data, whatever that says.

For each experiment there are made-up results by which its claim holds, and some by which it does not.
"""

import json
import math
from typing import Any

import pytest
from matplotlib.text import Text

from anyformer.lab.cells import Cell, CellResult, key
from anyformer.lab.decision import Word
from anyformer.lab.experiment import find
from anyformer.lab.figures import WIDTH
from anyformer.nn.inspection.plot import pyplot
from tests.lab import made_up
from tests.lab.made_up import CURVE, NAMES, Found, but, made


def norms(cell: Cell) -> dict[str, Any]:
    lost = cell["variant"] != "both" and cell["depth"] > 2
    mean = {"both": 0.5, "no norms": 0.8, "no residuals": 0.9}[cell["variant"]]
    return made({"final": 2.3 if lost else 0.2, "mean": 2.4 if lost else mean, "exact_match": float(not lost)}, cell)


def deep_without_residuals(cell: Cell) -> dict[str, Any]:
    return norms(cell) | made({"final": 0.2, "mean": norms({**cell, "depth": 2})["mean"]}, cell)


def positions(cell: Cell) -> dict[str, Any]:
    blind = 0.7
    if cell["scale"] == 0:
        loss, right = 1.9, 0.0
    elif cell["position"] != "none" or cell["task"] == "sort":
        loss, right = 0.01, 0.95
    else:
        loss, right = (0.8, 0.02) if cell["reader"] == "encoder" else (0.4, 0.4)
    return made({"loss": loss, "exact_match": right}, cell) | {"blind": blind}


def blind_encoder_copies(cell: Cell) -> dict[str, Any]:
    return positions({**cell, "position": "sinusoidal"})


def warmup(cell: Cell) -> dict[str, Any]:
    lost = cell["placement"] == "post" and cell["lr"] > 2e-3 and not cell["warmup"]
    grows = [2.0**layer for layer in range(4)] if cell["placement"] == "post" else [1.0] * 4
    return made({"final": 2.1 if lost else 0.2, "gradients": grows}, cell)


def never_needed(cell: Cell) -> dict[str, Any]:
    return warmup({**cell, "placement": "pre"})


def always_needed(cell: Cell) -> dict[str, Any]:
    return warmup({**cell, "placement": "post", "lr": 1.0})


def cheating(cell: Cell) -> dict[str, Any]:
    honest = cell["mask"] == "causal"
    if cell["task"] == "sort":
        return made({"final": 0.1 * honest, "right": 0.9 if honest else 0.0}, cell)
    return made({"final": 1.05 if honest else 0.01, "before": 1.05 if honest else 4.0}, cell) | {"entropy": 1.03}


def no_difference(cell: Cell) -> dict[str, Any]:
    return cheating({**cell, "mask": "causal"})


def bigram(cell: Cell) -> dict[str, Any]:
    excess = (0.005 if cell["mixer"] == "none" else -0.9) + 0.001 * cell["seed"]
    return made({}, cell) | {"bigram": 2.1, "trigram": 1.0, "loss": 2.1 + excess}


def below(cell: Cell) -> dict[str, Any]:
    return bigram(cell) | {"loss": 1.9 + 0.001 * cell["seed"]}


def costs(cell: Cell) -> dict[str, Any]:
    d, t = cell["width"], cell["length"]
    parts = {"scores and values": 4 * t * t * d, "projections": 8 * t * d * d, "feed-forward": 16 * t * d * d}
    sizes = {"attention parameters": 4 * d * d, "feed-forward parameters": 8 * d * d}
    return {**parts, **sizes, "predicted": 1, "counted": 1}


def layers(cell: Cell) -> dict[str, Any]:
    kind, d, t, kernel = cell["kind"], cell["width"], cell["length"], cell["kernel"]
    flops = {"attention": t * t * d, "fully connected": t * t * d * d, "positions": t * t * d, "recurrent": t * d * d}
    paths = {"convolution": (t - 1 + kernel - 2) // (kernel - 1), "dilated": round(math.log(t, kernel)), "recurrent": t}
    found = {"flops": flops.get(kind, kernel * t * d * d), "projections": 0, "parameters": d * d, "seconds": t * 1e-3}
    return {**found, "chain": t if kind == "recurrent" else 1, "layers": 1, "path": paths.get(kind, 1)}


def heads(cell: Cell) -> dict[str, Any]:
    scores = 4 * (cell["heads"] - 1) * cell["length"] ** 2
    kept = {"kept_plain": 1e6 + scores, "kept_fused": 1e6, "plain": 1e-3, "fused": 1e-3}
    return {"flops": 100, "predicted": 100, "parameters": 10, "scores": 64 * cell["heads"], **kept}


def scale(cell: Cell) -> dict[str, Any]:
    without = cell["scale"] == "none"
    begin = {"variance": cell["k"] if without else 1, "entropy": 1 / cell["k"] if without else 0.5, "gradient": 1.0}
    harm = 0.001 * cell["k"] if without else 0.0
    return made({**begin, "loss": 0.5 + harm}, cell) | {"variance": begin["variance"]}


def diversity(cell: Cell) -> dict[str, Any]:
    several = cell["heads"] > 1
    found = {"selectivity": 0.9 if several else 0.2, "diversity": 0.7 * several, "diversity before": 0.0, "places": 2.0}
    return made({**found, "loss": 0.1, "accuracy": 0.9}, cell)


def credit(cell: Cell) -> dict[str, Any]:
    learnt = cell["mixer"] == "attention" or cell["gap"] < 5
    slope = 1 / cell["gap"] if cell["mixer"] == "attention" else 0.5 ** cell["gap"]
    return {"accuracy": 0.95 if learnt else 0.1 + 0.01 * cell["seed"], "gradient": slope, "curve": CURVE}


def extrapolation(cell: Cell) -> dict[str, Any]:
    loss = 1 + 0.01 * cell["seed"]
    beyond = loss if cell["scheme"] in ("alibi", "t5", "rotary") else 3 * loss
    lengths = [cell["length"] // 2 * 2**i for i in range(6)]
    return made({"losses": {str(n): loss if n <= cell["length"] else beyond for n in lengths}}, cell)


def rotary_ends(cell: Cell) -> dict[str, Any]:
    return extrapolation({**cell, "scheme": "learned"} if cell["scheme"] == "rotary" else cell)


def learned_goes_on(cell: Cell) -> dict[str, Any]:
    return extrapolation({**cell, "scheme": "alibi"} if cell["scheme"] == "learned" else cell)


def cache(cell: Cell) -> dict[str, Any]:
    n = cell["length"]
    counts = {"flops with": 1000, "flops without": 1000 * n, "bytes": 8 * n, "predicted bytes": 8 * n}
    return {**counts, "seconds with": 1.0, "seconds without": 1.0 * n, "difference": 1e-6, "q": 0, "k": n, "v": n}


def bigbird(cell: Cell) -> dict[str, Any]:
    n = cell["length"]
    pairs = n * n if cell["pattern"] == "full" else 1000 * n
    times = {"seconds": pairs * 1e-9, "memory": 1000 * n} if cell["timed"] else {}
    return {"pairs": pairs, "predicted": pairs, "flops": pairs, **times}


def sorters(cell: Cell) -> dict[str, Any]:
    right = 0.0 if cell["variant"] == "no mixer" else 0.9
    return made({"exact_match": right, "loss": 1.1 - right, "parameters": 100}, cell)


def forcing(cell: Cell) -> dict[str, Any]:
    leans, seed = cell["word"] == "after another", 0.001 * cell["seed"]
    free = [0.95 - seed - (0.01 * t if leans else 0) for t in range(cell["length"])]
    loss = 1.2 + cell["smoothing"] + seed
    shares = {"right forced": 0.95, "right free": sum(free) / len(free), "rows right": 0.5}
    return {**shares, "perplexity": loss, "forced": [0.95] * len(free), "free": free, "curve": CURVE}


def spoken(by: float) -> Found:
    """Smoothed labels change how many words are right."""
    return lambda cell: {"right free": 0.8 + by * (cell["smoothing"] > 0) + 0.001 * cell["seed"]}


def batchnorm(cell: Cell) -> dict[str, Any]:
    gap = 0.0
    if cell["norm"] == "batch":
        gap = 0.5 * (cell["batches"] == "sorted") + 20 / cell["tokens"] + 0.001 * cell["seed"]
    return {"own": 1.5 + 0.001 * cell["seed"], "loss": 1.5 + 0.001 * cell["seed"] + gap, "gap": gap, "curve": CURVE}


def little_data(cell: Cell) -> dict[str, Any]:
    attention = cell["mixer"] == "attention"
    if cell["part"] == "symmetry":
        shift, order = cell["mixer"] != "convolution", "without" not in cell["mixer"]
        return {"shift": 0.1 if shift else 1e-16, "order": 0.1 if order else 1e-16}
    few = cell["examples"] < 100
    unseen = (3.0 if few else 1.2) + (0.2 if few == attention else 0.0) + 0.001 * cell["seed"]
    return {"unseen": unseen, "best": unseen, "seen": 1.0, "entropy": 1.1, "curve": CURVE}


def recall(cell: Cell) -> dict[str, Any]:
    state = cell["mixer"] in ("linear attention", "gated delta", "mamba2")
    named = 0.3 + 0.01 * cell["seed"] if state and cell["pairs"] > 10 else 0.97 + 0.01 * cell["seed"]
    flops = [4, 16] if state else [1, 16]
    return {"accuracy": named, "flops": flops, "bytes": [1, 1] if state else [1, 4], "curve": CURVE}


def recalled(names: str, share: float, by: float = 0.01) -> Found:
    """Some mixers name another share of the values."""
    return but(recall, lambda cell: {"accuracy": share + by * cell["seed"]} if cell["mixer"] in names else {})


def few_recalled(mixer: str, share: float) -> Found:
    """A mixer names another share of the fewest pairs, as if it had not learnt the task."""
    hit = {"accuracy": share}
    return lambda cell: hit if cell["mixer"] == mixer and cell["pairs"] < 10 else {}


def only(part: str, **changes: float) -> Found:
    """Some findings of one part of an experiment, a little different for each seed."""
    return lambda cell: {n: x * (1 + 0.01 * cell["seed"]) for n, x in changes.items()} if cell["part"] == part else {}


def muon(cell: Cell) -> dict[str, Any]:
    last = len(cell["rates"]) > 1
    lr = 2e-3 if last else cell["rates"][0]
    best = (1.4 if cell["optimizer"] == "muon" else 1.5) + abs(math.log(lr / 2e-3)) + 0.001 * (cell["seed"] % 10)
    valid = [[cell["steps"] // 2, best + 0.05], [cell["steps"], best]]
    return {"diverged": False, "curve": CURVE, "lr": lr, "best": best, "valid": valid}


def adamw_is_better(cell: Cell) -> dict[str, Any]:
    return muon({**cell, "optimizer": {"adamw": "muon", "muon": "adamw"}[cell["optimizer"]]})


def width(cell: Cell, moves: tuple[str, ...] = ("standard",)) -> dict[str, Any]:
    ratio = cell["width"] / cell["base_width"] if cell["scale"] in moves else 1.0
    return made({"loss": 1.5 + abs(math.log2(cell["lr"] * ratio * 2**5))}, cell)


HOLDS: dict[str, Found] = {
    "costs": costs,
    "layers": layers,
    "heads": heads,
    "scale": scale,
    "diversity": diversity,
    "credit": credit,
    "norms": norms,
    "positions": positions,
    "warmup": warmup,
    "extrapolation": extrapolation,
    "cache": cache,
    "bigbird": bigbird,
    "variants": sorters,
    "cheating": cheating,
    "bigram": bigram,
    "muon": muon,
    "width": width,
    "forcing": forcing,
    "batchnorm": batchnorm,
    "little_data": little_data,
    "recall": recall,
    **made_up.HOLDS,
}
LEARNT = ("norms", "positions", "warmup", "variants", "cheating", "bigram")  # claims about learning
FAILS: list[tuple[str, Found]] = [
    ("costs", but(costs, lambda cell: {"scores and values": cell["length"]})),
    ("costs", but(costs, lambda cell: {"attention parameters": 3})),
    ("layers", but(layers, lambda cell: {"flops": cell["length"]})),
    ("layers", but(layers, lambda cell: {"chain": cell["length"]})),
    ("layers", but(layers, lambda cell: {"path": 2})),
    ("heads", but(heads, lambda cell: {"flops": cell["heads"]})),
    ("heads", but(heads, lambda cell: {"scores": 64})),
    ("scale", but(scale, lambda cell: {"variance": 1.0})),
    ("scale", but(scale, lambda cell: {"loss": scale(cell)["loss"] - 0.002 * cell["k"] * (cell["scale"] == "none")})),
    ("diversity", but(diversity, lambda cell: {"selectivity": 0.9})),
    ("diversity", but(diversity, lambda cell: {"selectivity": 0.3})),
    ("credit", but(credit, lambda cell: {"accuracy": 1.0})),
    ("credit", but(credit, lambda cell: {"gradient": 1 / cell["gap"]})),
    ("extrapolation", rotary_ends),
    ("extrapolation", learned_goes_on),
    ("cache", but(cache, lambda cell: {"flops without": 5000})),
    ("cache", but(cache, lambda cell: {"bytes": cell["length"] ** 2})),
    ("cache", but(cache, lambda cell: {"difference": 0.1})),
    ("cache", but(cache, lambda cell: {"q": 1})),
    ("cache", but(cache, lambda cell: {"v": 0})),
    ("bigbird", but(bigbird, lambda cell: {"pairs": cell["length"] ** 1.5})),
    ("bigbird", but(bigbird, lambda cell: {"seconds": cell["length"] ** 2.0} if cell["timed"] else {})),
    ("bigbird", but(bigbird, lambda cell: {"memory": cell["length"] ** 2.0} if cell["timed"] else {})),
    ("variants", but(sorters, lambda cell: {"exact_match": 0.1} if cell["variant"] == "relu" else {})),
    ("norms", deep_without_residuals),
    ("positions", blind_encoder_copies),
    ("warmup", never_needed),
    ("warmup", always_needed),
    ("cheating", no_difference),
    ("bigram", below),
    ("muon", adamw_is_better),
    ("width", lambda cell: width(cell, ("standard", "mup"))),
    ("width", lambda cell: width(cell, ())),
    ("forcing", but(forcing, lambda cell: {"free": forcing({**cell, "word": "by themselves"})["free"]})),
    ("forcing", but(forcing, lambda cell: {"perplexity": 1.2 + 0.001 * cell["seed"]})),
    ("forcing", but(forcing, spoken(-0.1))),
    ("batchnorm", but(batchnorm, lambda cell: {"loss": 1.7 - batchnorm(cell)["gap"] / 2})),
    ("batchnorm", but(batchnorm, lambda cell: {"gap": 0.1})),
    ("little_data", but(little_data, only("symmetry", shift=0.1))),
    ("little_data", but(little_data, only("symmetry", order=0.1))),
    ("little_data", lambda cell: little_data({**cell, "examples": 32 if cell["part"] == "data" else 0})),
    ("recall", recalled("gated delta", 0.99)),
    ("recall", recalled("hybrid", 0.5)),
    ("recall", but(recall, lambda cell: {"flops": [1, 16]})),
    ("recall", but(recall, lambda cell: {"bytes": [1, 4]})),
    ("little_data", lambda cell: little_data({**cell, "examples": 512 if cell["part"] == "data" else 0})),
    *made_up.FAILS,
]


UNDECIDED: list[tuple[str, Found]] = [
    ("muon", but(muon, lambda cell: {"best": 1.5 + 0.1 * (cell["seed"] % 10)})),
    ("width", but(width, lambda cell: {"loss": 1.5 + abs(math.log2(cell["lr"]) + 5 + (cell["width"] > 64))})),
    ("scale", but(scale, lambda cell: {"loss": 0.5 + 0.01 * cell["seed"]})),
    ("scale", but(scale, lambda cell: {"loss": 0.5 + 0.01 * cell["seed"] + 0.1 * (cell["scale"] == "none")})),
    ("diversity", but(diversity, lambda cell: {"selectivity": 0.1 * cell["heads"]})),
    ("credit", but(credit, lambda cell: {"accuracy": 0.1})),
    ("credit", but(credit, lambda cell: {"accuracy": 0.5 * cell["seed"]} if cell["mixer"] == "rnn" else {})),
    ("extrapolation", but(extrapolation, lambda cell: {"losses": {"32": 1.0 + cell["seed"], "512": 2.0}})),
    (
        "variants",
        but(sorters, lambda cell: {"exact_match": 0.4 + 0.1 * cell["seed"]} if "fixed" in cell["variant"] else {}),
    ),
    ("variants", but(sorters, lambda cell: {"exact_match": 0.9})),
    ("forcing", but(forcing, lambda cell: {"right forced": 0.5})),
    ("forcing", but(forcing, lambda cell: {"right free": 0.7 + 0.1 * cell["seed"]})),
    ("batchnorm", but(batchnorm, lambda cell: {"loss": 1.5 + 0.2 * cell["seed"]})),
    ("batchnorm", but(batchnorm, lambda cell: {"loss": 3.0})),
    ("little_data", but(little_data, only("data", unseen=2.0))),
    ("recall", recalled("attention", 0.5)),
    ("recall", recalled("mamba2", 0.6, by=0.3)),
    ("recall", but(recall, few_recalled("gated delta", 0.28))),
    ("recall", but(recall, few_recalled("linear attention", 0.88))),
    ("recall", recalled("hybrid", 0.8, by=0.1)),
    *made_up.UNDECIDED,
]


def results(name: str, found: Found) -> list[CellResult]:
    return [CellResult(dict(cell), found(cell), 0.0, "made up") for cell in find(name).cells("quick")]


def word(name: str, found: Found) -> Word:
    return find(name).verdict(results(name, found)).word


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_plain_and_no_two_are_the_same(name: str) -> None:
    experiment, known = find(name), set[str]()
    assert experiment.file.stem == name
    for size in ("quick", "cpu", "gpu"):
        cells = experiment.cells(size)
        assert cells == [json.loads(json.dumps(cell)) for cell in cells]
        assert len({*map(key, cells)}) == len(cells) > 0
        known |= {*map(key, cells)}
    assert len(known) > len(experiment.cells("quick"))  # a larger size is another measurement


def test_every_claim_is_found_in_its_order() -> None:
    files = find(NAMES[0]).file.parent.glob("*.toml")
    assert sorted(NAMES) == sorted(file.stem for file in files)
    assert [find(name).number for name in NAMES] == list(range(1, len(NAMES) + 1))


@pytest.mark.parametrize("name", HOLDS)
def test_a_claim_that_the_data_bears_out_holds(name: str) -> None:
    found = results(name, HOLDS[name])
    assert find(name).verdict(found).word == "holds"
    head, *rest = find(name).table(found)
    assert rest
    assert all(len(row) == len(head) for row in rest)
    assert (find(name).remark(found) or ".").endswith(".")
    figure = find(name).draw(found)
    assert figure.get_size_inches()[0] == WIDTH
    assert min(text.get_fontsize() for text in figure.findobj(Text)) >= 9
    for axis in figure.axes:
        bars = [label.get_text() for label in axis.get_yticklabels()]
        assert axis.get_xlabel()
        named = any(name.strip("−0123456789.") for name in bars)
        assert axis.get_ylabel() or named or not axis.yaxis.get_tick_params()["labelleft"]  # or those of its neighbour
        assert axis.get_legend() is None or axis.get_legend().get_bbox_to_anchor().y0 >= axis.bbox.y1
    pyplot().close(figure)


@pytest.mark.parametrize(("name", "found"), FAILS, ids=lambda x: getattr(x, "__name__", x))
def test_a_claim_that_the_data_speaks_against_does_not(name: str, found: Found) -> None:
    assert word(name, found) == "does not hold here"


@pytest.mark.parametrize(("name", "found"), UNDECIDED)
def test_data_that_does_not_separate_says_nothing(name: str, found: Found) -> None:
    assert word(name, found) == "undecided at this size"


@pytest.mark.parametrize("name", LEARNT)
def test_nothing_learnt_says_nothing(name: str) -> None:
    """Where no model has learnt anything, no claim about learning holds."""

    def nothing(cell: Cell) -> dict[str, Any]:
        found = HOLDS[name](cell)
        bad = {"final": 2.3, "mean": 2.3, "loss": 2.3, "before": 2.3, "exact_match": 0.0, "right": 0.0}
        return found | {n: v for n, v in bad.items() if n in found}

    assert word(name, nothing) != "holds"
