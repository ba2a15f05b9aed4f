"""Long-range credit: how much gradient flows back over a gap, and whether a copy over it is learnt."""

import math
from collections.abc import Sequence
from typing import Any, Literal

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
    Plain,
    Recurrent,
    Stack,
    Tokens,
    Xavier,
)
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, More, Rows, Side, Size, Verdict, decide, summary
from anyformer.lab.figures import label_ends, lines, log_ticks, panels, reference
from anyformer.nn.inspection.api import run_with_taps
from anyformer_claims.common import DEVICE, WIDER, found, learn, mean_token_loss, seeds, side

MIXERS: dict[str, Mixer] = {
    "attention": Attention(heads=4),
    "lstm": Recurrent(cell="lstm"),
    "rnn": Recurrent(cell="rnn"),
    "convolution": Convolution(width=3),
}
LABELS = {"lstm": "LSTM", "rnn": "tanh RNN"}  # in the figure
LETTERS, NOISE = 8, 4  # tokens to copy, and filler tokens; one more token is the query
VOCAB = LETTERS + NOISE + 1
NOTHING = 1e-15  # a gradient of 0 is plotted here
LEARNT = 0.9  # share of the letters copied


class Claim(Experiment):
    kind: Literal["credit"] = "credit"

    def cells(self, size: Size) -> list[Cell]:
        steps, gaps, rates = {
            "quick": (150, (1, 4, 16, 64), (2.5e-2, 5e-3, 1e-3)),
            "cpu": (300, (1, 4, 16, 64), (2.5e-2, 5e-3, 1e-3, 2e-4)),
            "gpu": (2000, (1, 4, 16, 64, 256), (2.5e-2, 5e-3, 1e-3, 2e-4)),
        }[size]
        task = {"width": 32, "depth": 2, "rows": 32, "steps": steps}
        return [
            {"mixer": m, "gap": gap, "lr": lr, **task, "seed": s}
            for m in MIXERS
            for gap in gaps
            for lr in rates
            for s in seeds(size, first=WIDER)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        torch.manual_seed(cell["seed"])
        model = _model(cell)
        ids, wanted = _copies(cell, 512)
        before = _gradient(model, ids, wanted)
        curve = learn(model, lambda: _copies(cell, cell["rows"]), cell["steps"], cell["lr"])
        with torch.no_grad():
            right = model(ids)[:, -1].argmax(dim=-1) == wanted[:, -1]
        return {"accuracy": right.float().mean().item(), "gradient": before, "curve": curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        gaps = sorted({r["gap"] for r in results})
        far = {m: _values(results, m, gaps[-1], "accuracy") for m in MIXERS}
        lost = {m: _lost(results, m) for m in MIXERS}
        conditions: list[More | Fact] = []
        for m in ("rnn", "convolution"):
            conditions += [
                Fact(f"not every seed of the {m} learns the copy", min(far[m]) < LEARNT, f"lowest {min(far[m]):.2f}"),
                More(f"letters copied over the largest gap, attention - {m}", far["attention"], far[m]),
            ]
        seen = f"{lost['rnn']:.1e} against {lost['attention']:.1e}"
        conditions.append(
            Fact("the rnn keeps a smaller share of its gradient than attention", lost["rnn"] < lost["attention"], seen)
        )
        return decide(
            conditions, requires=[Fact("attention learns the copy in every seed", min(far["attention"]) >= LEARNT)]
        )

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        gap = max(r["gap"] for r in results)
        return [_side(results, mixer, gap) for mixer in ("attention", "rnn", "convolution")]

    def setting(self, results: Sequence[CellResult]) -> str:
        return (
            f"Rows of a letter ({LETTERS} different ones), a gap of random signs ({NOISE} different ones) and a query "
            "token. A decoder with layer norms, residuals and feed-forwards twice as wide as the model; attention with "
            "4 heads, convolutions over 3 tokens, no positions. 512 rows are read to measure."
        )

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        gap = max(r["gap"] for r in results)
        lowest = min(_values(results, "attention", gap, "accuracy"))
        return {
            "attention learns the copy in every seed": f"lowest {lowest:.2f}",
            "the rnn keeps a smaller share of its gradient than attention": (
                f"attention keeps {_short(_lost(results, 'attention'))}"
            ),
        }

    def caption(self, results: Sequence[CellResult]) -> str:
        return (
            "Left: the gradient for the letter's embedding at initialisation, geometric means over seeds; 0 is drawn "
            f"at {NOTHING:g}."
        )

    def result(self, results: Sequence[CellResult]) -> str:
        gap = max(r["gap"] for r in results)
        copied = ", ".join(
            f"{LABELS.get(m, m)} {100 * summary(_values(results, m, gap, 'accuracy')).mean:.0f} %" for m in MIXERS
        )
        return (
            f"Over a gap of {gap} tokens these shares of the letters are copied: {copied} "
            f"(guessing: {100 / LETTERS:.0f} %). At initialisation the gradient over it is "
            f"{_short(_lost(results, 'attention'))} of that over one token with attention, "
            f"{_short(_lost(results, 'lstm'))} with an LSTM and {_short(_lost(results, 'rnn'))} with a tanh RNN "
            "(ratios of geometric means)."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        gaps = sorted({r["gap"] for r in results})
        rows: list[tuple[str, ...]] = [
            ("mixer", *(f"copied over {g}" for g in gaps), *(f"gradient over {g}" for g in gaps))
        ]
        for m in MIXERS:
            copied = (str(summary(_values(results, m, g, "accuracy"))) for g in gaps)
            slopes = (_short(_middle(_values(results, m, g, "gradient"))) for g in gaps)
            rows.append((LABELS.get(m, m), *copied, *slopes))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, right) = panels(2)
        gaps = sorted({r["gap"] for r in results})
        slopes = {m: {g: [max(_middle(_values(results, m, g, "gradient")), NOTHING)] for g in gaps} for m in MIXERS}
        copied = {m: {g: _values(results, m, g, "accuracy") for g in gaps} for m in MIXERS}
        lines(left, {LABELS.get(m, m): points for m, points in slopes.items()})
        left.set(title="before training", yscale="log", ylabel="gradient norm")
        lines(right, {LABELS.get(m, m): points for m, points in copied.items()})
        right.set(title="after training", ylabel="fraction of letters copied", ylim=(0, 1.05))
        for axis in (left, right):
            axis.set_xlabel("gap, tokens")
            log_ticks(axis, gaps)
        reference(right, 1 / LETTERS, "guessing", below=True)
        for axis in (left, right):
            label_ends(axis)
        return figure


def _model(cell: Cell) -> Transformer:
    block = Block(mixer=MIXERS[cell["mixer"]], feedforward=Plain(width=2 * cell["width"]))
    stack = Stack(depth=cell["depth"], blocks=(block,), final_norm=LayerNorm())
    config = ModelConfig(width=cell["width"], target=Tokens(vocab=VOCAB), decoder=stack, head=LM(), init=Xavier())
    with torch.device(DEVICE):
        return Transformer(config)


def _copies(cell: Cell, rows: int) -> tuple[Tensor, Tensor]:
    """Return rows of a letter, the gap and the query token, whose target is the letter."""
    letter = torch.randint(LETTERS, (rows, 1), device=DEVICE)
    gap = torch.randint(LETTERS, LETTERS + NOISE, (rows, cell["gap"]), device=DEVICE)
    ids = torch.cat((letter, gap, torch.full_like(letter, VOCAB - 1)), dim=1)
    wanted = torch.full_like(ids, -100)
    wanted[:, -1:] = letter
    return ids, wanted


def _gradient(model: Transformer, ids: Tensor, wanted: Tensor) -> float:
    """Return the gradient norm of the loss at the query token for the first embedding, averaged over rows."""
    logits, seen = run_with_taps(model, ["decoder.embed"], ids)
    (slope,) = torch.autograd.grad(mean_token_loss(logits, wanted) * len(ids), seen["decoder.embed"])
    return float(slope[:, 0].norm(dim=-1).mean())


def _short(value: float) -> str:
    """Return two digits of a value, small ones with a power of 10."""
    return f"{value:.2g}" if value == 0 or value >= 0.001 else f"{value:.1e}"


def _lost(results: Sequence[CellResult], mixer: str) -> float:
    """Return the gradient at the beginning over the largest gap, as a share of that over the smallest."""
    gaps = {r["gap"] for r in results}
    far, near = (_middle(_values(results, mixer, gap, "gradient")) for gap in (max(gaps), min(gaps)))
    return far / near


def _middle(values: Sequence[float]) -> float:
    """Return the geometric mean; 0 if any value is 0."""
    return math.exp(summary([math.log(value) for value in values]).mean) if all(values) else 0.0


def _values(results: Sequence[CellResult], mixer: str, gap: int, name: str) -> list[float]:
    """Return the values of all seeds at the best learning rate."""
    return found(results, name, mixer=mixer, gap=gap, lr=_side(results, mixer, gap).best)


def _side(results: Sequence[CellResult], mixer: str, gap: int) -> Side:
    return side(f"{LABELS.get(mixer, mixer)} over {gap} tokens", results, "accuracy", higher=True, mixer=mixer, gap=gap)
