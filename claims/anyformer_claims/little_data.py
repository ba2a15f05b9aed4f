"""Little data and much: attention, convolution and recurrence compared, and the symmetry of each."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anyformer import Transformer
from anyformer.config import (
    LM,
    Attention,
    Block,
    Convolution,
    LayerNorm,
    Mixer,
    ModelConfig,
    NoPosition,
    Plain,
    Position,
    Recurrent,
    Rotary,
    Stack,
    Tokens,
    Xavier,
)
from anyformer.lab.api import (
    Cell,
    CellResult,
    Experiment,
    Fact,
    More,
    Rows,
    Size,
    Verdict,
    decide,
    difference,
    summary,
    written_test,
)
from anyformer.lab.figures import dots, label_ends, lines, log_ticks, panels, reference
from anyformer_claims.common import DEVICE, found, learn, mean_token_loss, seeds

BLIND = "attention without positions"
MIXERS: dict[str, tuple[Mixer, Position]] = {
    "attention": (Attention(heads=4), Rotary()),
    "convolution": (Convolution(width=3), NoPosition()),
    "recurrence": (Recurrent(cell="gru"), NoPosition()),
    BLIND: (Attention(heads=4), NoPosition()),
}
OTHERS = ("convolution", "recurrence")
CHANGES = {"shift": "shifted", "order": "permuted"}
CHANCES = np.array([0.6, 0.25, 0.1, 0.05])  # probabilities of the letters that may follow
UNSEEN = 256  # rows
EXACT = 1e-9  # relative, in fp64
NOTHING = 1e-17  # an error of 0 is plotted here


class Claim(Experiment):
    kind: Literal["little_data"] = "little_data"

    def cells(self, size: Size) -> list[Cell]:
        width, letters, length, counts, steps = {
            "quick": (32, 6, 16, (32, 512, 8192), 500),
            "cpu": (48, 6, 20, (32, 256, 2048, 16_384), 600),
            "gpu": (128, 8, 64, (64, 512, 4096, 65_536), 1500),
        }[size]
        model = {"width": width, "depth": 2, "letters": letters, "keys": 2, "length": length}
        rest = {"rows": 32, "steps": steps, "lr": 5e-3 * (32 / width) ** 0.5}
        exact = [
            {"part": "symmetry", "mixer": m, "examples": 0, **model, "seed": s} for m in MIXERS for s in seeds(size)
        ]
        return exact + [
            {"part": "data", "mixer": m, "examples": n, **model, **rest, "seed": s}
            for m in ("attention", *OTHERS)
            for n in counts
            for s in seeds(size)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        torch.manual_seed(cell["seed"])
        if cell["part"] == "symmetry":
            return _errors(cell)
        model = _model(cell)
        train, unseen = (_rows(cell, n, part) for n, part in ((cell["examples"], 1 + cell["seed"]), (UNSEEN, 0)))
        watched: list[float] = []

        def batch() -> tuple[Tensor, Tensor]:
            some = train[torch.randint(len(train), (cell["rows"],), device=DEVICE)]
            return some[:, :-1], some[:, 1:]

        curve = learn(
            model, batch, cell["steps"], cell["lr"], 20, watch=lambda step: watched.append(_loss(model, unseen))
        )
        losses = {"unseen": _loss(model, unseen), "seen": _loss(model, train[:UNSEEN])}
        return {**losses, "best": min(*watched, losses["unseen"]), "entropy": _entropy(cell), "curve": curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        exact, learnt = _parted(results)
        shift, order = max(found(exact, "shift", mixer=OTHERS[0])), max(found(exact, "order", mixer=BLIND))
        counts = _counts(learnt)
        conditions: list[More | Fact] = [
            Fact("a convolution commutes with shifts, to rounding", shift < EXACT, f"off by {shift:.0e}"),
            Fact(
                "attention without positions commutes with permutations, to rounding",
                order < EXACT,
                f"off by {order:.0e}",
            ),
        ]
        for n in (counts[0], counts[-1]):
            mine, *others = (found(learnt, "unseen", mixer=m, examples=n) for m in ("attention", *OTHERS))
            for m, other in zip(OTHERS, others, strict=True):
                if n == counts[0]:
                    conditions.append(More(f"loss on unseen rows after {n} rows, attention - {m}", mine, other))
                else:
                    conditions.append(More(f"loss on unseen rows after {n:,} rows, {m} - attention", other, mine))
        return decide(conditions)

    def setting(self, results: Sequence[CellResult]) -> str:
        cell = _parted(results)[1][0].cell
        return (
            f"A decoder reads rows of a key and {cell['length']} letters and predicts each next letter. Attention has "
            "4 heads and rotary positions; the convolution reads 3 letters, the recurrence is a GRU, and neither has "
            f"positions. Feed-forwards are twice as wide as the model. Loss is measured on {UNSEEN} unseen rows."
        )

    def result(self, results: Sequence[CellResult]) -> str:
        _, learnt = _parted(results)
        counts = _counts(learnt)
        losses = {
            n: {m: found(learnt, "unseen", mixer=m, examples=n) for m in ("attention", *OTHERS)}
            for n in (counts[0], counts[-1])
        }
        few, most = (
            ", ".join(f"{summary(some).mean:.{digits}f} with {m}" for m, some in losses[n].items())
            for n, digits in ((counts[0], 2), (counts[-1], 3))
        )
        close = difference(losses[counts[-1]]["recurrence"], losses[counts[-1]]["attention"])
        return (
            f"The loss on unseen rows (nats per letter) after training on {counts[0]} rows is {few}; on {counts[-1]:,} "
            f"rows {most}, where {learnt[0]['entropy']:.3f} is the lowest possible. With {counts[-1]:,} rows "
            f"recurrence minus attention is {close}; above 0 attention is better."
        )

    def remark(self, results: Sequence[CellResult]) -> str:
        _, learnt = _parted(results)
        told = []
        for n in _counts(learnt)[1:-1]:
            mine, other = (found(learnt, "unseen", mixer=m, examples=n) for m in ("attention", "recurrence"))
            if summary(other).mean > summary(mine).mean:
                told.append(f"{summary(other)} against {summary(mine)} with {n:,} rows ({written_test(other, mine)})")
        few = _counts(learnt)[0]
        low = ", ".join(
            f"{m} {summary(found(learnt, 'best', mixer=m, examples=few)).mean:.2f}" for m in ("attention", *OTHERS)
        )
        worse = f"Between both ends recurrence is worse than attention: {' and '.join(told)}. " if told else ""
        return (
            f"No part of the rule: {worse[:1].lower()}{worse[1:]}{'S' if worse else 's'}topped at its lowest loss, "
            f"each mixer would have with {few} rows: {low}."
        )

    def caption(self, results: Sequence[CellResult]) -> str:
        return (
            "Lowest in training: as with early stopping. Below: errors of untrained encoders; a recurrence has neither "
            "symmetry, and its errors are in the table."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        exact, learnt = _parted(results)
        counts = _counts(learnt)
        rows: list[tuple[str, ...]] = [
            ("mixer", *(f"{n:,} rows: unseen (lowest), seen" for n in counts), "error if shifted", "if permuted")
        ]
        for m in MIXERS:
            losses = ["–"] * len(counts) if m == BLIND else [_losses(learnt, m, n) for n in counts]
            errors = (f"{max(found(exact, name, mixer=m)):.0e}" for name in CHANGES)
            rows.append((m, *losses, *errors))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        exact, learnt = _parted(results)
        figure, axes = panels("ab;cc", height=3)
        for axis, name, when in zip(axes, ("unseen", "best"), ("after training", "lowest in training"), strict=False):
            named = {m: {float(n): found(learnt, name, mixer=m, examples=n) for n in _counts(learnt)} for m in MIXERS}
            lines(axis, {m: points for m, points in named.items() if m != BLIND})
            floor = learnt[0]["entropy"]
            reference(axis, floor, "lowest possible", below=True)
            axis.set(title=f"unseen rows, {when}", xlabel="training rows", ylabel="loss, nats per letter")
            axis.set_ylim(bottom=floor - 0.12 * (axis.get_ylim()[1] - floor))
            log_ticks(axis, _counts(learnt))
        for axis in axes[:2]:
            label_ends(axis)
        shown = {"convolution": OTHERS[0], "attention without positions": BLIND, "attention": "attention"}
        errors = {f"{name},\n{CHANGES[n]}": found(exact, n, mixer=m) for name, m in shown.items() for n in CHANGES}
        dots(axes[2], {name: [max(x, NOTHING) for x in some] for name, some in errors.items()}, bars=False)
        axes[2].set(xscale="log", xlabel=f"error, divided by the norm of the output (0 is drawn at {NOTHING:g})")
        return figure


def _parted(results: Sequence[CellResult]) -> tuple[list[CellResult], list[CellResult]]:
    return [r for r in results if r["part"] == "symmetry"], [r for r in results if r["part"] == "data"]


def _counts(learnt: Sequence[CellResult]) -> list[int]:
    return sorted({r["examples"] for r in learnt})


def _losses(learnt: Sequence[CellResult], mixer: str, examples: int) -> str:
    """Return the final and lowest loss on unseen rows, and the loss on training rows."""
    end, best, seen = (summary(found(learnt, n, mixer=mixer, examples=examples)) for n in ("unseen", "best", "seen"))
    return f"{end} ({best.mean:.3f}), {seen.mean:.3f}"


def _model(cell: Cell) -> Transformer:
    """Return a decoder that predicts the next letter, or an encoder to measure symmetry."""
    mixer, position = MIXERS[cell["mixer"]]
    block = Block(mixer=mixer, feedforward=Plain(width=2 * cell["width"]))
    stack = Stack(depth=cell["depth"], blocks=(block,), position=position, final_norm=LayerNorm())
    width, tokens, init = cell["width"], Tokens(vocab=cell["letters"] + cell["keys"]), Xavier()
    config = ModelConfig(width=width, target=tokens, decoder=stack, head=LM(), init=init)
    if cell["part"] == "symmetry":
        config = ModelConfig(width=width, source=tokens, encoder=stack, init=init)
    with torch.device(DEVICE):
        return Transformer(config)


def _rows(cell: Cell, count: int, part: int) -> Tensor:
    """Return rows that begin with a key, which selects the table by which a letter follows the two before."""
    letters, keys = cell["letters"], cell["keys"]
    rules, chance = np.random.default_rng(14), np.random.default_rng([14, part])
    tables = np.array([rules.permutation(letters)[:4] for _ in range(keys * letters**2)])
    following = tables.reshape(keys, letters, letters, 4)
    key, made = chance.integers(keys, size=count), chance.integers(letters, size=(count, cell["length"] + 1))
    for t in range(3, cell["length"] + 1):
        drawn = chance.choice(4, size=count, p=CHANCES)
        made[:, t] = following[key, made[:, t - 2], made[:, t - 1], drawn]
    made[:, 0] = letters + key
    return torch.tensor(made, device=DEVICE)


def _entropy(cell: Cell) -> float:
    """Return the entropy of a letter given the key and all letters before it; the first two are uniform."""
    first, after = 2 * np.log(cell["letters"]), -(CHANCES * np.log(CHANCES)).sum() * (cell["length"] - 2)
    return float((first + after) / cell["length"])


@torch.no_grad()
def _errors(cell: Cell) -> dict[str, float]:
    """Return the equivariance error of an untrained encoder to shifts and permutations, relative to its output."""
    model, length = _model(cell).double(), 4 * cell["length"]
    x = torch.randint(cell["letters"], (8, length), device=DEVICE)
    ends = slice(cell["length"], -cell["length"])  # beyond which no convolution here reads over an end
    y, order = model(x), torch.randperm(length, device=DEVICE)
    shifted = model(x.roll(1, dims=1)) - y.roll(1, dims=1)
    permuted = model(x[:, order]) - y[:, order]
    return {"shift": float(shifted[:, ends].norm() / y[:, ends].norm()), "order": float(permuted.norm() / y.norm())}


@torch.no_grad()
def _loss(model: Transformer, rows: Tensor) -> float:
    return float(mean_token_loss(model(rows[:, :-1]), rows[:, 1:]))
