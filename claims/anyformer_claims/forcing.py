"""Teacher forcing and free running: do errors compound, and do smoothed labels harm decoding?"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import functional as F

from anyformer import generate
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
    scratch_folder,
    summary,
    trained,
)
from anyformer.lab.figures import bars, dots, legend, lines, panels
from anyformer.recipe import Recipe
from anyformer_claims.common import found, recipe_for, seeds

WORDS = LEANS, ALONE = "after another", "by themselves"  # how words are translated
LABELS = {LEANS: "dependent words", ALONE: "independent words"}  # in the figure
SMOOTHING = 0.0, 0.1
FIRST = ("perplexity", "right free")
SHOWN = {
    "perplexity": "perplexity, teacher-forced",
    "right forced": "words right, teacher-forced",
    "right free": "words right, free running",
    "rows right": "rows right, free running",
}
MARGIN = 0.01  # smaller differences are ignored
FORMS = 4  # words of the other language
VALID = 400  # rows


class Claim(Experiment):
    kind: Literal["forcing"] = "forcing"

    def cells(self, size: Size) -> list[Cell]:
        width, words, length, rows, steps = {
            "quick": (48, 30, 12, 8000, 800),
            "cpu": (48, 30, 15, 12_000, 1000),
            "gpu": (256, 60, 24, 200_000, 4000),
        }[size]
        rest = {"words": words, "illegible": 0.05, "length": length, "rows": rows}
        rest |= {"width": width, "tokens": 32 * (length + 1)}
        needed = {LEANS: steps, ALONE: steps // 2}
        lr = 8e-3 * (48 / width) ** 0.5
        return [
            {"word": word, "smoothing": smoothing, **rest, "steps": needed[word], "lr": lr, "seed": seed}
            for word in WORDS
            for smoothing in SMOOTHING
            for seed in seeds(size)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        with translating(cell) as recipe, trained(recipe) as over:
            return {"diverged": over.diverged, **_said(over), "curve": over.curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        (early, late), (_, beside) = _lost(results, LEANS), _lost(results, ALONE)
        conditions: list[More | Fact] = [
            More("words lost by free running, last third - first third of a row", late, early, MARGIN),
            More("words lost in the last third, dependent - independent words", late, beside, MARGIN),
        ]
        for word in WORDS:
            loss, right = ([found(results, n, word=word, smoothing=s) for s in SMOOTHING] for n in FIRST)
            conditions += [
                More(f"perplexity of {LABELS[word]}, with - without smoothing", loss[1], loss[0], MARGIN),
                More(f"{LABELS[word]} right in free running, with - without smoothing", right[1], right[0], -MARGIN),
            ]
        least = min(summary(found(results, "right forced", word=word, smoothing=0.0)).mean for word in WORDS)
        learnt = least >= 1 - 2 * results[0]["illegible"]
        return decide(conditions, requires=[Fact("the legible words are learnt", learnt)])

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        right = (
            f"{summary(found(results, 'right forced', word=word, smoothing=0.0)).mean:.3f} of the {LABELS[word]}"
            for word in WORDS
        )
        illegible = results[0]["illegible"]
        seen = f"right when teacher-forced without smoothing: {' and '.join(right)}"
        return {"the legible words are learnt": f"{seen}; bound 1 - 2 · {illegible:g} = {1 - 2 * illegible:g}"}

    def setting(self, results: Sequence[CellResult]) -> str:
        return """An encoder–decoder with one layer on each side. Words that depend on each other take twice the steps
of those that do not: they are harder to learn."""

    def caption(self, results: Sequence[CellResult]) -> str:
        return (
            "For independent words both curves coincide. All models read the same unseen rows, with illegible words at "
            "the same places: hence the same zigzag."
        )

    def result(self, results: Sequence[CellResult]) -> str:
        (early, late), (_, beside) = _lost(results, LEANS), _lost(results, ALONE)
        plain, smooth = ([summary(found(results, n, word=LEANS, smoothing=s)).mean for n in FIRST] for s in SMOOTHING)
        lost = [100 * summary(some).mean for some in (early, late, beside)]
        return (
            f"Where words depend on each other, free running loses {lost[0]:.1f} % of them in the first third of "
            f"a row and {lost[1]:.1f} % in the last ({lost[2]:.1f} % where they do not); smoothing changes "
            f"their perplexity from {plain[0]:.2f} to {smooth[0]:.2f} and the words right in free running from "
            f"{100 * plain[1]:.1f} % to {100 * smooth[1]:.1f} %."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [("words are translated", "smoothing", *SHOWN.values())]
        for word in WORDS:
            for smoothing in SMOOTHING:
                some = (str(summary(found(results, name, word=word, smoothing=smoothing))) for name in SHOWN)
                rows.append((word, f"{smoothing:g}", *some))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (top, left, right) = panels("aa;bc", height=2.9)
        named = {}
        for word, label in LABELS.items():
            for name, reads in (("forced", "reads the right ones"), ("free", "reads its own")):
                shares = zip(*found(results, name, word=word, smoothing=SMOOTHING[0]), strict=True)
                named[f"{label}; {reads}"] = {float(t): values for t, values in enumerate(shares, 1)}
        lines(top, named)
        top.set(title="no label smoothing", xlabel="position of a word in its row", ylabel="fraction of words right")
        legend(figure, top, columns=2, where="upper")
        for axis, name in zip((left, right), FIRST, strict=True):
            values = {
                f"{label},\nsmoothing {s:g}": found(results, name, word=w, smoothing=s)
                for w, label in LABELS.items()
                for s in SMOOTHING
            }
            dots(axis, values) if name == "perplexity" else bars(axis, values)
            axis.set(xlabel=SHOWN[name])
            axis.locator_params(axis="x", nbins=5)
        right.tick_params(axis="y", labelleft=False)
        return figure


def _lost(results: Sequence[CellResult], word: str) -> tuple[list[float], list[float]]:
    """Return the loss of free running without smoothing in the first and in the last third of a row, by seed."""
    some = [r for r in results if (r["word"], r["smoothing"]) == (word, SMOOTHING[0])]
    lost = np.array([r["forced"] for r in some]) - np.array([r["free"] for r in some])
    third = lost.shape[1] // 3
    return lost[:, :third].mean(axis=1).tolist(), lost[:, -third:].mean(axis=1).tolist()


@contextmanager
def translating(cell: Cell) -> Iterator[Recipe]:
    """Return a recipe of a small encoder–decoder for a synthetic language."""
    with scratch_folder() as folder:
        sides = [f"model.{side}" for side in ("encoder", "decoder")]
        changes = {
            **{f"data.{part}": _written(cell, part, folder) for part in ("train", "valid")},
            **{f"{side}.blocks.0.feedforward.width": 2 * cell["width"] for side in sides},
            **{f"{side}.depth": 1 for side in sides},
            "tokenizer": "words",
            "task.max_target": "none",
            "train.label_smoothing": cell["smoothing"],
            "train.precision": "fp32",
            "train.log_every": 1,
        }
        yield recipe_for(cell, "dates", changes)


def _written(cell: Cell, part: str, folder: Path) -> str:
    """Write source and target rows, all translated by the same table."""
    words: int = cell["words"]
    count, seed = (cell["rows"], 1 + cell["seed"]) if part == "train" else (VALID, 0)
    rules = np.random.default_rng(0).integers(FORMS, size=(words, FORMS))
    chances = 1 / np.arange(1, words + 1)
    chance = np.random.default_rng([11, seed])
    x = chance.choice(words, (count, cell["length"]), p=chances / chances.sum())
    y = np.zeros_like(x)
    for t in range(cell["length"]):
        y[:, t] = rules[x[:, t], y[:, t - 1] if t and cell["word"] == LEANS else 0]
    x[chance.random(x.shape) < cell["illegible"]] = words
    for name, letter, ids in (("source", "x", x), ("target", "y", y)):
        text = "\n".join(" ".join(f"{letter}{i}" for i in row) for row in ids.tolist())
        (folder / f"{part}.{name}").write_text(text + "\n", encoding="utf-8")
    return f"{{kind='parallel', source='{folder}/{part}.source', target='{folder}/{part}.target'}}"


@torch.no_grad()
def _said(over: Trial) -> dict[str, Any]:
    """Return the share of correct words at each position, with teacher forcing and in free running."""
    assert over.job.valid is not None
    task: Any = over.task
    pieces = task.encode(over.job.valid, both_sides=True)
    source, read, asked = (
        torch.tensor([getattr(piece, name) for piece in pieces], device=over.job.device)
        for name in ("source", "ids", "labels")
    )
    logits, length = over.model(source, read)[:, :-1], asked.shape[1] - 1  # but <eos>
    free = generate(over.model, source, max_new_tokens=length)[:, 1:] == asked[:, :-1]
    forced = logits.argmax(dim=-1) == asked[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), asked[:, :-1].flatten())
    return {
        "perplexity": float(loss.exp()),
        "right forced": float(forced.double().mean()),
        "right free": float(free.double().mean()),
        "rows right": float(free.all(dim=1).double().mean()),
        "forced": forced.double().mean(dim=0).tolist(),
        "free": free.double().mean(dim=0).tolist(),
    }
