"""Positions beyond the training length: which schemes keep their loss."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn import functional as F

from anyformer.config import (
    Alibi,
    Attention,
    Block,
    LayerNorm,
    Learned,
    Plain,
    Position,
    Rotary,
    Sinusoidal,
    Stack,
    T5Bias,
    io,
)
from anyformer.lab.api import (
    Cell,
    CellResult,
    Experiment,
    Fact,
    More,
    Rows,
    Size,
    Trial,
    Verdict,
    decide,
    summary,
    trained,
)
from anyformer.lab.figures import GREY, label_ends, lines, log_ticks, panels, reference
from anyformer_claims.common import chain, seeds, spelling

SCHEMES = ("alibi", "t5", "rotary", "sinusoidal", "learned")
LABELS = {"alibi": "ALiBi", "t5": "T5"}  # on the page
APART = 0.02  # of a length, between the points of two schemes in the figure
FAR = ("alibi", "t5", "rotary")  # claimed to extrapolate
KEPT = 1.05  # times the loss within the trained length that counts as kept
LEARNT = 1.25  # times the entropy of the text, within the trained length: above it the model has not learnt the task


class Claim(Experiment):
    kind: Literal["extrapolation"] = "extrapolation"

    def cells(self, size: Size) -> list[Cell]:
        length, longest, letters, width, depth, steps, rows, lr = {
            "quick": (32, 512, 8, 48, 2, 600, 16, 5e-3),
            "cpu": (48, 768, 8, 48, 2, 700, 12, 5e-3),
            "gpu": (128, 2048, 8, 128, 4, 1000, 32, 2e-3),
        }[size]
        model = {"width": width, "depth": depth, "heads": 4, "steps": steps, "rows": rows, "lr": lr}
        text = {"length": length, "longest": longest, "letters": letters, "text": 12_500 * letters}
        return [{"scheme": p, **text, **model, "seed": seed} for p in SCHEMES for seed in seeds(size)]

    def measure(self, cell: Cell) -> dict[str, Any]:
        with spelling(cell, _stack(cell)) as (recipe, _):
            scaled = io.override(recipe, ["model.target.scale=sqrt_width"])  # else sinusoids outweigh the embeddings
            with trained(scaled) as over:
                return {"diverged": over.diverged, "losses": _by_length(over, cell), "curve": over.curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        entropy = chain(results[0]["letters"], 2, 1, 0)[1]
        conditions: list[More | Fact] = []
        for scheme in SCHEMES:
            within, beyond = _losses(results, scheme, "length"), _losses(results, scheme, "longest")
            bound = [KEPT * loss for loss in within]
            name = f"{scheme} {'keeps' if scheme in FAR else 'does not keep'} its loss"
            if summary(within).mean > LEARNT * entropy:
                conditions.append(Fact(name, None, f"not learnt: {summary(within)}"))
            elif scheme in FAR:
                conditions.append(More(f"{name}: {KEPT} times that within - that beyond", bound, beyond))
            else:
                conditions.append(More(f"{name}: that beyond - {KEPT} times that within", beyond, bound))
        return decide(conditions)

    def result(self, results: Sequence[CellResult]) -> str:
        both = {s: [summary(_losses(results, s, at)).mean for at in ("length", "longest")] for s in SCHEMES}
        each = ", ".join(f"{LABELS.get(s, s)} from {a:.2f} to {b:.2f}" for s, (a, b) in both.items())
        ratio = results[0]["longest"] // results[0]["length"]
        return f"At {ratio} times the training length the loss (nats per token) goes for {each}."

    def setting(self, results: Sequence[CellResult]) -> str:
        return """A decoder with the given position scheme, feed-forwards four times as wide as the model and layer
norm. T5's bucket for the largest distances occurs in training, so none is untrained; learned positions beyond it keep
their initial values."""

    def caption(self, results: Sequence[CellResult]) -> str:
        return "Points of the same length are drawn slightly side by side."

    def table(self, results: Sequence[CellResult]) -> Rows:
        lengths = sorted(map(int, results[0]["losses"]))
        rows: list[tuple[str, ...]] = [("position scheme", *(f"tokens {n // 2} to {n}" for n in lengths))]
        return rows + [(LABELS.get(s, s), *(str(summary(_losses(results, s, n))) for n in lengths)) for s in SCHEMES]

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (axis,) = panels(1, height=4)
        lengths = sorted(map(int, results[0]["losses"]))
        for i, scheme in enumerate(SCHEMES):
            beside = 1 + APART * (i - len(SCHEMES) // 2)
            points = {beside * n: _losses(results, scheme, n) for n in lengths}
            lines(axis, {LABELS.get(scheme, scheme): points}, first=i)
        letters = results[0]["letters"]
        entropy, guess = chain(letters, 2, 1, 0)[1], math.log(letters)
        reference(axis, results[0]["length"], "trained up to here", across=False)
        reference(axis, entropy, f"entropy of the text, {entropy:.2f}", below=True)
        axis.axhline(guess, color=GREY, linewidth=1.0, linestyle=(0, (1, 3)))
        axis.annotate(f"guessing, {guess:.2f}", (0.01, guess + 0.03), xycoords=("axes fraction", "data"), color=GREY)
        axis.set(
            xlabel="length of the text, tokens (loss of its second half)",
            ylabel="loss, nats per token",
            ylim=(0.8, None),
        )
        log_ticks(axis, lengths)
        label_ends(axis)
        return figure


def _stack(cell: Cell) -> Stack:
    positions: dict[str, Position] = {
        "alibi": Alibi(),
        "t5": T5Bias(max_distance=cell["length"]),  # no bucket that training never fills
        "rotary": Rotary(),
        "sinusoidal": Sinusoidal(),
        "learned": Learned(length=cell["longest"]),  # the rows beyond keep their initial values
    }
    block = Block(mixer=Attention(heads=cell["heads"]), feedforward=Plain(width=4 * cell["width"]))
    return Stack(depth=cell["depth"], blocks=(block,), position=positions[cell["scheme"]], final_norm=LayerNorm())


@torch.no_grad()
def _by_length(over: Trial, cell: Cell, tokens: int = 3 * 2**13) -> dict[str, float]:
    """Return the loss in the second half of texts of each length, on the same unseen tokens of the chain."""
    text, _ = chain(cell["letters"], 2, tokens + 1, seed=0, part=2)
    ids = torch.tensor(over.task.tokenizer.encode(text), device=over.job.device)
    losses = {}
    for n in (cell["length"] // 2 * 2**i for i in range(20)):
        if n <= cell["longest"]:
            read, said = (x.view(-1, n).split(tokens // 8 // n) for x in (ids[:-1], ids[1:]))
            logits = torch.cat([over.model(some)[:, n // 2 :] for some in read])  # [b, n/2, v]
            losses[str(n)] = float(F.cross_entropy(logits.flatten(0, 1), torch.cat(said)[:, n // 2 :].flatten()))
    return losses


def _losses(results: Sequence[CellResult], scheme: str, at: str | int) -> list[float]:
    """Return the losses of all seeds at a length, or at the trained or the longest one."""
    some = [r for r in results if r["scheme"] == scheme and not r["diverged"]]
    return [r["losses"][str(r[at] if isinstance(at, str) else at)] for r in some]
