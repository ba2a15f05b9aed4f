"""Tagging words by a fully connected window or by self-attention: tags that depend on near and on distant words."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anyformer import Transformer
from anyformer.config import (
    Attention,
    Block,
    Convolution,
    LayerNorm,
    Mixer,
    ModelConfig,
    NoMixer,
    NoPosition,
    Plain,
    Rotary,
    Stack,
    TokenLabels,
    Tokens,
    Xavier,
)
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, More, Rows, Size, Verdict, decide, summary, trial
from anyformer.lab.figures import bars, legend, lines, panels
from anyformer.recipe import Recipe
from anyformer.training.api import read_recipe
from anyformer_claims.common import DEVICE, found, learn, seeds

WINDOW, ATTENTION, ALONE = "window", "attention", "word alone"
MIXERS: dict[str, Mixer] = {WINDOW: Convolution(width=5), ATTENTION: Attention(heads=4), ALONE: NoMixer()}
LABELS = {WINDOW: "window of 5 words", ATTENTION: "self-attention", ALONE: "the word alone"}
OVERRIDES = {WINDOW: "{kind='convolution', width=5}", ATTENTION: "{heads=4, dropout=0.1}", ALONE: "none"}
DEPTH = 2
REACH = 2 * DEPTH  # words on each side that layers of windows see
MADE, EWT = "made up", "ewt"
CLASSES, MARKERS, TAGS = 5, 4, 8
WORDS = 200
UNSEEN = 512  # sentences
LEARNT = 0.9  # share of the words tagged right
FAR = 0.05  # smaller differences at distant words are ignored
NEAR = 0.02  # and at near ones
REAL = 0.01  # and in English text


class Claim(Experiment):
    kind: Literal["tagging"] = "tagging"

    def cells(self, size: Size) -> list[Cell]:
        width, length, steps = {
            "quick": (32, 16, 400),
            "cpu": (64, 24, 800),
            "gpu": (128, 48, 2000),
        }[size]
        rest = {"depth": DEPTH, "width": width, "steps": steps, "lr": 5e-3 * (32 / width) ** 0.5}
        made: list[Cell] = [
            {"text": MADE, "model": m, **rest, "length": length, "rows": 32, "seed": s}
            for m in MIXERS
            for s in seeds(size)
        ]
        if size != "gpu":
            return made
        real = {"depth": DEPTH, "width": width, "steps": 1000, "lr": 2e-3}
        return made + [{"text": EWT, "model": m, **real, "seed": s} for m in MIXERS for s in seeds(size)]

    def measure(self, cell: Cell) -> dict[str, Any]:
        if cell["text"] == EWT:
            return trial(recipe_of(cell))
        torch.manual_seed(cell["seed"])
        model = _model(cell)
        curve = learn(model, lambda: sentences(cell, cell["rows"])[:2], cell["steps"], cell["lr"])
        model.eval()
        words, tags, distance = sentences(cell, UNSEEN)
        with torch.no_grad():
            right = (model(words).argmax(dim=-1) == tags).double()
        by_distance = {n: right[distance == n] for n in range(1, cell["length"])}
        return {
            "near": float(right[distance == 0].mean()),
            "within": float(right[(distance > 0) & (distance <= REACH)].mean()),
            "beyond": float(right[distance > REACH].mean()),
            "by distance": {str(n): float(some.mean()) for n, some in by_distance.items() if len(some)},
            "parameters": model.num_parameters(),
            "curve": curve,
        }

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        made, real = _parted(results)
        near, beyond = ({m: found(made, name, model=m) for m in MIXERS} for name in ("near", "beyond"))
        conditions = [
            More("words right by the word before, window - attention", near[WINDOW], near[ATTENTION], -NEAR),
            More(
                f"words right by a marker more than {REACH} words away, attention - window",
                beyond[ATTENTION],
                beyond[WINDOW],
                FAR,
            ),
        ]
        if real:
            window, attention = (found(real, "accuracy", model=m) for m in (WINDOW, ATTENTION))
            conditions.append(More("English Web Treebank, window - attention", window, attention, -REAL))
        best = max(min(near[WINDOW]), min(near[ATTENTION]))
        return decide(
            conditions,
            requires=[
                Fact(f"attention tags {LEARNT} of the distant words in every seed", min(beyond[ATTENTION]) >= LEARNT),
                Fact(f"one of both tags {LEARNT} of the near words in every seed", best >= LEARNT),
            ],
        )

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        made, _ = _parted(results)
        lowest = min(found(made, "beyond", model=ATTENTION))
        near = (f"{LABELS[m]} {min(found(made, 'near', model=m)):.3f}" for m in (WINDOW, ATTENTION))
        return {
            f"attention tags {LEARNT} of the distant words in every seed": f"lowest {lowest:.3f}",
            f"one of both tags {LEARNT} of the near words in every seed": f"lowest: {', '.join(near)}",
        }

    def setting(self, results: Sequence[CellResult]) -> str:
        return f"""Encoders that tag sentences of {_parted(results)[0][0]["length"]} words. Self-attention has rotary
positions; the word alone has no mixer. Feed-forwards are twice as wide as the model."""

    def caption(self, results: Sequence[CellResult]) -> str:
        return "Beyond 4 words the window and the word alone guess among 4 markers."

    def result(self, results: Sequence[CellResult]) -> str:
        made, real = _parted(results)
        near, beyond = (_shares(made, name) for name in ("near", "beyond"))
        text = f" On English Web Treebank: {_shares(real, 'accuracy')}." if real else ""
        return (
            f"Of the words that depend on the word before these shares are tagged right: {near}; of those that depend "
            f"on a marker more than {REACH} words away: {beyond}.{text}"
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        made, real = _parted(results)
        rows: list[tuple[str, ...]] = [
            ("model", "parameters", "by the word before", f"marker within {REACH}", "marker beyond")
            + (("English Web Treebank",) if real else ())
        ]
        for m, label in LABELS.items():
            shown = [str(summary(found(made, name, model=m))) for name in ("near", "within", "beyond")]
            shown += [str(summary(found(real, "accuracy", model=m)))] if real else []
            rows.append((label, f"{found(made, 'parameters', model=m)[0]:,}", *shown))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        made, real = _parted(results)
        figure, axes = panels("abb;cc." if real else "abb")
        bars(axes[0], {label: found(made, "near", model=m) for m, label in LABELS.items()})
        axes[0].set(title="tag by the word before", xlabel="words tagged right", xlim=(0, 1.05))
        named: dict[str, dict[float, list[float]]] = {}
        for m, label in LABELS.items():
            each = found(made, "by distance", model=m)
            named[label] = {float(n): [x[n] for x in each if n in x] for n in each[0]}
        lines(axes[1], named, marks=False)
        axes[1].set(title="tag by a marker", xlabel="distance of the marker, words", ylim=(0, 1.05))
        axes[1].set_ylabel("words tagged right")
        if real:
            bars(axes[2], {label: found(real, "accuracy", model=m) for m, label in LABELS.items()})
            axes[2].set(title="English Web Treebank", xlabel="words tagged right", xlim=(0.6, 1))
        legend(figure, axes[1])
        return figure


def sentences(cell: Cell, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return words and tags [b, t], and for each word the distance of what its tag depends on.

    Distance 0: the tag depends on the word before. Words without a tag have distance -1: the marker, and
    those that would need a word before, where there is none.
    """
    rules = np.random.default_rng(24)
    near = torch.tensor(rules.integers(TAGS, size=(CLASSES, CLASSES)), device=DEVICE)
    far = torch.tensor(rules.integers(TAGS, size=(CLASSES, MARKERS)), device=DEVICE)
    words = torch.randint(WORDS, (count, cell["length"]), device=DEVICE)
    place = torch.randint(cell["length"], (count, 1), device=DEVICE)
    marker = torch.randint(MARKERS, (count, 1), device=DEVICE)
    kind = words % CLASSES
    at = torch.arange(cell["length"], device=DEVICE)
    is_far = words < WORDS // 2
    tags = torch.where(is_far, far[kind, marker], near[kind.roll(1, dims=1), kind])
    distance = torch.where(is_far, (at - place).abs(), 0)
    alone = (at == 0) | (at - place == 1)  # no word of a class before it
    hidden = (at == place) | (alone & ~is_far)
    words = words.scatter(1, place, WORDS + marker)
    return words, tags.masked_fill(hidden, -100), distance.masked_fill(hidden, -1)


def recipe_of(cell: Cell) -> Recipe:
    """Return the recipe for parts of speech, on words alone, with another mixer."""
    changes = {
        "model.source.spelling": "none",
        "model.width": cell["width"],
        "model.encoder.depth": cell["depth"],
        "model.encoder.blocks.0.feedforward.width": 2 * cell["width"],
        "model.encoder.blocks.0.mixer": OVERRIDES[cell["model"]],
        "model.encoder.position": "rotary" if cell["model"] == ATTENTION else "none",
        "train.steps": cell["steps"],
        "train.optimizer.lr": cell["lr"],
        "train.compile": "off",
        "seed": cell["seed"],
    }
    return read_recipe("ewt-pos", [f"{name}={value}" for name, value in changes.items()])


def _model(cell: Cell) -> Transformer:
    block = Block(mixer=MIXERS[cell["model"]], feedforward=Plain(width=2 * cell["width"]))
    position = Rotary() if cell["model"] == ATTENTION else NoPosition()
    stack = Stack(depth=cell["depth"], blocks=(block,), position=position, final_norm=LayerNorm())
    tokens, head = Tokens(vocab=WORDS + MARKERS), TokenLabels(labels=TAGS)
    with torch.device(DEVICE):
        return Transformer(ModelConfig(width=cell["width"], source=tokens, encoder=stack, head=head, init=Xavier()))


def _parted(results: Sequence[CellResult]) -> tuple[list[CellResult], list[CellResult]]:
    return [r for r in results if r["text"] == MADE], [r for r in results if r["text"] == EWT]


def _shares(results: Sequence[CellResult], name: str) -> str:
    return ", ".join(
        f"{label} {100 * summary(found(results, name, model=m)).mean:.1f} %" for m, label in LABELS.items()
    )
