"""Scores without 1/sqrt(k): their variance, the entropy of softmax, and the loss of training."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer import Transformer
from anyformer.lab.api import (
    Cell,
    CellResult,
    Experiment,
    Fact,
    MeanDifference,
    More,
    Power,
    Rows,
    Side,
    Size,
    Verdict,
    decide,
    difference,
    power,
    summary,
    trial,
)
from anyformer.lab.figures import Points, label_ends, legend, lines, log_ticks, panels, reference
from anyformer.nn.api import MultiHeadAttention
from anyformer.nn.inspection.api import run_with_taps
from anyformer_claims.common import WIDER, seeds, sorting

MIXER = "model.decoder.blocks.0.mixer"
NAMES = {"inv_sqrt_key": "with 1/sqrt(k)", "none": "without 1/sqrt(k)"}
VOCAB = 14  # digits and special tokens
SEEN = {"variance": "variance of scores", "entropy": "entropy of softmax / highest", "gradient": "gradient of Q and K"}
INITS = ("unit", "small")
GUESSING = math.log(VOCAB)  # the loss of a training that diverged


class Claim(Experiment):
    kind: Literal["scale"] = "scale"

    def cells(self, size: Size) -> list[Cell]:
        width, depth, steps = {"quick": (64, 1, 150), "cpu": (64, 1, 200), "gpu": (128, 2, 600)}[size]
        model = {"width": width, "depth": depth, "heads": 2, "value_width": width // 2}
        ways = [("unit", lr) for lr in (2.5e-4, 1e-3, 4e-3, 1.6e-2)] + [("small", 4e-3)]
        ways += [("small", 1e-3)] if size == "gpu" else []
        begin = [
            {"part": "beginning", "init": init, "k": 2**n, "scale": scale, **model, "rows": 32, "length": 24, "seed": s}
            for init in INITS
            for n in range(3, 10)
            for scale in NAMES
            for s in seeds(size, first=WIDER)
        ]
        task = {**model, "longest": 11, "tokens": 512, "steps": steps}
        train = [
            {"part": "training", "init": init, "k": k, "scale": scale, "lr": lr, **task, "seed": s}
            for init, lr in ways
            for k in (8, 64, 512)
            for scale in NAMES
            for s in seeds(size, first=WIDER)
        ]
        return [*begin, *train]

    def measure(self, cell: Cell) -> dict[str, Any]:
        std = cell["width"] ** -0.5 if cell["init"] == "unit" else 0.02
        changes = [
            f"{MIXER}.key_width={cell['k']}",
            f"{MIXER}.value_width={cell['value_width']}",
            f"{MIXER}.scale={cell['scale']}",
            f"model.init={{kind='normal', std={std}}}",
            "train.precision=fp32",
        ]
        if cell["part"] == "training":
            return trial(sorting(cell, changes))
        whole = {**cell, "longest": 11, "tokens": 512, "steps": 10, "lr": 1e-3}
        torch.manual_seed(cell["seed"])
        model = Transformer(sorting(whole, [*changes, f"model.target.vocab={VOCAB}"]).model)
        return _beginning(model, torch.randint(VOCAB, (cell["rows"], cell["length"])))

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        ks = sorted({r["k"] for r in results if r["part"] == "training"})
        growth = {s: _variance(results, s).exponent for s in NAMES}
        few, many = (_gaps(results, "unit", k) for k in (ks[0], ks[-1]))
        entropy = [summary(_values(results, "beginning", "unit", k, "none", "entropy")).mean for k in (ks[0], ks[-1])]
        return decide(
            [
                Fact(
                    "without the factor the variance of scores grows as k^1 ± 0.15",
                    abs(growth["none"] - 1) <= 0.15,
                    f"exponent {growth['none']:.2f}",
                ),
                Fact(
                    "with it the variance grows as k^0 ± 0.15",
                    abs(growth["inv_sqrt_key"]) <= 0.15,
                    f"exponent {growth['inv_sqrt_key']:.2f}",
                ),
                Fact(
                    "without it the entropy of softmax falls with k",
                    entropy[1] < entropy[0],
                    f"{entropy[0]:.2f} to {entropy[1]:.2f} of the highest",
                ),
                More(f"loss at k = {ks[-1]}, without - with the factor", many, 0.0),
                More(f"that difference at k = {ks[-1]} - at k = {ks[0]}", many, few),
            ]
        )

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        ks = sorted({r["k"] for r in results if r["part"] == "training"})
        return [_side(results, "unit", k, scale) for k in (ks[0], ks[-1]) for scale in NAMES]

    def result(self, results: Sequence[CellResult]) -> str:
        ks = sorted({r["k"] for r in results if r["part"] == "training"})
        gaps = ", ".join(f"{summary(_gaps(results, 'unit', k)).mean:+.2f} at k = {k}" for k in ks)
        slope = {s: summary(_values(results, "beginning", "unit", ks[-1], s, "gradient")).mean for s in NAMES}
        times = slope["none"] / slope["inv_sqrt_key"]
        grows = difference(_gaps(results, "unit", ks[-1]), _gaps(results, "unit", ks[0]))
        vanishes = "does not vanish" if times >= 1 else "is smaller"
        return (
            f"Without the factor the loss (nats per token, unit initialisation) is higher by {gaps}. This harm at "
            f"k = {ks[-1]} minus that at k = {ks[0]} is {_with_interval(grows)}. The first gradient of Q and K "
            f"{vanishes}: at k = {ks[-1]} it is {times:.1f} times as large."
        )

    def setting(self, results: Sequence[CellResult]) -> str:
        some = {init: {r["lr"] for r in results if r["part"] == "training" and r["init"] == init} for init in INITS}
        return (
            "A decoder reads a row of 4 to 11 digits and outputs them sorted. The width of values does not depend on "
            "k. Unit initialisation: weights of variance 1/d; small: of standard deviation 0.02, as in GPT-2. "
            f"The small one is trained at {' and '.join(f'{lr:g}' for lr in sorted(some['small']))}, the other at "
            f"{' and '.join(f'{lr:g}' for lr in sorted(some['unit']))}."
        )

    def remark(self, results: Sequence[CellResult]) -> str:
        ks = sorted({r["k"] for r in results if r["part"] == "training"})
        gaps = {k: _gaps(results, "unit", k) for k in ks}
        most = max(gaps, key=lambda k: summary(gaps[k]).mean)
        unit, small = (", ".join(f"{summary(_gaps(results, init, k))} at k = {k}" for k in ks) for init in INITS)
        order = f"The mean is largest at k = {most}"
        if most != ks[-1]:
            more = _with_interval(difference(gaps[most], gaps[ks[-1]]))
            order += f"; minus that at k = {ks[-1]} it is {more}: beyond k = {most} no growth is shown"
        return (
            f"Loss without minus with the factor at unit initialisation, mean ± over seeds: {unit}. {order}. At the "
            f"small initialisation, which is not judged: {small}."
        )

    def caption(self, results: Sequence[CellResult]) -> str:
        return (
            "Variance, entropy and gradient: at initialisation. The lowest panel is the difference between the curves "
            "of the loss panel, each at its best learning rate; the claim is about unit initialisation."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        head = ("initialisation", "k", "scores", *SEEN.values(), "best rate", "loss after training")
        rows: list[tuple[str, ...]] = [head]
        for init in INITS:
            for k in sorted({r["k"] for r in results if r["part"] == "training"}):
                for scale, name in NAMES.items():
                    found = (_values(results, "beginning", init, k, scale, what) for what in SEEN)
                    means = (f"{summary(v).mean:.3g}" for v in found)
                    best = f"{_side(results, init, k, scale).best:g}", str(summary(_best(results, init, k, scale)))
                    rows.append((init, str(k), name, *means, *best))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        labels = {
            "variance": "variance of scores",
            "entropy": "entropy of softmax / highest",
            "gradient": "gradient norm of Q and K",
            "loss": "validation loss after training",
        }
        figure, (*axes, below) = panels("ab;cd;ee", height=2.9)
        for axis, (what, label) in zip(axes, labels.items(), strict=True):
            lines(axis, _by_k(results, what))
            axis.set(title=label, ylabel="nats per token" if what == "loss" else "before training")
        for axis in (axes[0], axes[2]):
            axis.set_yscale("log")
        ks = sorted({r["k"] for r in results if r["part"] == "training"})
        lines(below, {f"{init} initialisation": {k: _gaps(results, init, k) for k in ks} for init in INITS}, first=4)
        reference(below, 0)
        below.set(title="loss after training, without minus with 1/sqrt(k)", ylabel="difference, nats per token")
        for axis in (*axes, below):
            axis.set_xlabel("head width k")
            log_ticks(axis, [8, 16, 32, 64, 128, 256, 512])
        label_ends(below)
        legend(figure, axes[0], columns=2)
        return figure


def _beginning(model: Transformer, ids: Tensor) -> dict[str, float]:
    """Return statistics of scores, weights and gradients of the first layer, averaged over heads and queries."""
    logits, seen = run_with_taps(model, ["decoder.0.mixer.*"], ids)
    mixer = next(m for m in model.modules() if isinstance(m, MultiHeadAttention))
    q, k, weights = (seen[f"decoder.0.mixer.{name}"] for name in ("q", "k", "weights"))
    scores = q @ k.transpose(-1, -2) * mixer.scale
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    entropy = torch.special.entr(weights).sum(dim=-1)[..., 1:] / torch.arange(2, ids.shape[1] + 1).log()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    asked = mixer.qkv.rows().grad
    assert asked is not None
    return {
        "variance": scores[..., visible].var().item(),
        "entropy": entropy.mean().item(),
        "gradient": asked[: 2 * mixer.heads * q.shape[-1]].norm().item(),
    }


def _values(results: Sequence[CellResult], part: str, init: str, k: int, scale: str, what: str) -> list[float]:
    way = (part, init, k, scale)
    return [r.found.get(what, GUESSING) for r in results if (r["part"], r["init"], r["k"], r["scale"]) == way]


def _variance(results: Sequence[CellResult], scale: str) -> Power:
    """Return how the variance of scores grows with k at unit initialisation."""
    ks = sorted({r["k"] for r in results if r["part"] == "training"})
    return power(ks, [summary(_values(results, "beginning", "unit", k, scale, "variance")).mean for k in ks])


def _gaps(results: Sequence[CellResult], init: str, k: int) -> list[float]:
    """Return how much higher the loss of each seed is without the factor."""
    pairs = zip(_best(results, init, k, "inv_sqrt_key"), _best(results, init, k, "none"), strict=True)
    return [without - given for given, without in pairs]


def _best(results: Sequence[CellResult], init: str, k: int, scale: str) -> list[float]:
    """Return the losses of all seeds at the best learning rate."""
    side = _side(results, init, k, scale)
    return list(side.scores[side.best])


def _side(results: Sequence[CellResult], init: str, k: int, scale: str) -> Side:
    """Return the losses of all seeds by learning rate."""
    way = ("training", init, k, scale)
    scores: dict[float, list[float]] = {}
    for r in results:
        if (r["part"], r["init"], r["k"], r["scale"]) == way:
            scores.setdefault(r["lr"], []).append(r.found.get("loss", GUESSING))
    return Side(f"{NAMES[scale]} at k = {k}", scores)


def _with_interval(found: MeanDifference) -> str:
    return f"{found.mean:+.4f} (95 %: {found.low:+.4f} to {found.high:+.4f})"


def _by_k(results: Sequence[CellResult], what: str) -> dict[str, Points]:
    part = "training" if what == "loss" else "beginning"
    ks = sorted({r["k"] for r in results if r["part"] == part})
    named: dict[str, Points] = {}
    for init in INITS:
        for scale, name in NAMES.items():
            seen = {k: _values(results, part, init, k, scale, what) for k in ks}
            named[f"{name}, {init} initialisation"] = (
                {k: _best(results, init, k, scale) for k in ks} if what == "loss" else seen
            )
    return named
