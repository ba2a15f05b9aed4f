"""Without a mixer no token reads another: a bigram model, however deep."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from anyformer.config import (
    Attention,
    Block,
    Convolution,
    LayerNorm,
    Mixer,
    NoMixer,
    NoPosition,
    Plain,
    Sinusoidal,
    Stack,
)
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, More, Rows, Size, Verdict, decide, summary, trained
from anyformer.lab.figures import curves, dots, label_ends, panels, reference
from anyformer_claims.common import found, seeds, spelling

MIXERS: dict[str, Mixer] = {
    "none": NoMixer(),
    "the letter before": Convolution(width=2),
    "attention": Attention(heads=4),
}
MEETS = 0.02  # nats above the entropy
ROUNDING = 1e-4  # nats below it


class Claim(Experiment):
    kind: Literal["bigram"] = "bigram"

    def cells(self, size: Size) -> list[Cell]:
        width, letters, length, steps = {
            "quick": (32, 12, 32, 400),
            "cpu": (48, 16, 32, 700),
            "gpu": (256, 26, 128, 3000),
        }[size]
        models = [("none", 1), ("none", 2), ("none", 6), ("the letter before", 1), ("attention", 2)]
        text = {"letters": letters, "text": 200_000, "rows": 16, "length": length}
        rest = {"width": width, "steps": steps, "lr": 5e-3 * (32 / width) ** 0.5}
        return [{"mixer": m, "depth": d, **rest, **text, "seed": s} for m, d in models for s in seeds(size)]

    def measure(self, cell: Cell) -> dict[str, Any]:
        block = Block(mixer=MIXERS[cell["mixer"]], feedforward=Plain(width=4 * cell["width"]))
        position = Sinusoidal() if cell["mixer"] == "attention" else NoPosition()
        stack = Stack(depth=cell["depth"], blocks=(block,), position=position, final_norm=LayerNorm())
        with spelling(cell, stack) as (recipe, text), trained(recipe) as over:
            entropies = {"bigram": entropy(text, 1), "trigram": entropy(text, 2)}
            return {"diverged": over.diverged, "loss": over.valid["loss"], **entropies, "curve": over.curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        bigram = results[0]["bigram"]
        alone = _alone(results)
        lowest = min(min(x) for x in alone.values()) - bigram
        conditions: list[More | Fact] = [
            Fact("no model without a mixer is below the bigram entropy", lowest >= -ROUNDING, f"lowest {lowest:+.4f}")
        ]
        conditions += [
            More(
                f"{depth} layers without a mixer end less than {MEETS} nats above it",
                [bigram + MEETS - x for x in some],
                0.0,
            )
            for depth, some in alone.items()
        ]
        readers = [x for mixer in MIXERS if mixer != "none" for x in found(results, "loss", mixer=mixer)]
        return decide(
            conditions, requires=[Fact("models that read the letter before are below it", max(readers) < bigram)]
        )

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        highest = max(x for mixer in MIXERS if mixer != "none" for x in found(results, "loss", mixer=mixer))
        seen = f"highest loss {highest:.3f}, bigram entropy {results[0]['bigram']:.3f}"
        return {"models that read the letter before are below it": seen}

    def setting(self, results: Sequence[CellResult]) -> str:
        return """A decoder predicts the next letter of a text in which each letter depends on the two before it.
Attention has sinusoidal positions, the other models have none."""

    def result(self, results: Sequence[CellResult]) -> str:
        bigram, alone = results[0]["bigram"], _alone(results)
        above = ", ".join(f"{summary(x).mean - bigram:+.4f} at depth {depth}" for depth, x in alone.items())
        best = summary(found(results, "loss", mixer="attention"))
        return (
            f"Without a mixer the loss on unseen text differs from the bigram entropy of {bigram:.3f} nats per letter "
            f"by {above}; with attention it is {best}, and the trigram entropy, the least possible, is "
            f"{results[0]['trigram']:.3f}."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [("reads beside itself", "depth", "loss", "above the bigram entropy")]
        for mixer, depth in dict.fromkeys((r["mixer"], r["depth"]) for r in results):
            some = found(results, "loss", mixer=mixer, depth=depth)
            above = summary([loss - results[0]["bigram"] for loss in some])
            rows.append((mixer, str(depth), str(summary(some)), f"{above.mean:+.4f} ± {above.deviation:.1g}"))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, right) = panels("a;b", height=2.8)
        labels = {"none": "no mixer", "the letter before": "convolution of 2 letters", "attention": "attention"}
        kinds = {
            f"{labels[m]}, {d} layer{'s' * (d > 1)}": (m, d) for m, d in ((r["mixer"], r["depth"]) for r in results)
        }
        curves(left, {name: found(results, "curve", mixer=m, depth=d) for name, (m, d) in kinds.items()})
        dots(right, {name: found(results, "loss", mixer=m, depth=d) for name, (m, d) in kinds.items()})
        left.set_ylim(bottom=0.6)
        right.set(xlabel="loss on unseen text, nats per letter")
        for name in ("bigram", "trigram"):
            reference(left, results[0][name], f"{name} entropy", below=name == "trigram")
            reference(right, results[0][name], f"{name} entropy", across=False)
        label_ends(left)
        return figure


def entropy(text: str, order: int) -> float:
    """Return the conditional entropy of a letter given the letters before it, from counts in the text, in nats."""
    wholes = Counter(zip(*(text[i:] for i in range(order + 1)), strict=False))
    firsts = Counter[tuple[str, ...]]()
    for letters, n in wholes.items():
        firsts[letters[:-1]] += n
    return -sum(n * math.log(n / firsts[letters[:-1]]) for letters, n in wholes.items()) / wholes.total()


def _alone(results: Sequence[CellResult]) -> dict[int, list[float]]:
    """Return the losses without a mixer, by depth."""
    depths = sorted({r["depth"] for r in results if r["mixer"] == "none"})
    return {depth: found(results, "loss", mixer="none", depth=depth) for depth in depths}
