"""Without a mixer no token reads another: a bigram model, however deep."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

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
from anyformer.lab.cells import Cell, Result
from anyformer.lab.decision import Fact, More, decide
from anyformer.lab.experiment import Experiment, Rows, Size, Verdict
from anyformer.lab.experiments.common import found, seeds, spelling
from anyformer.lab.figures import curves, dots, label_ends, panels, reference
from anyformer.lab.stats import summary
from anyformer.lab.trial import trained

MIXERS: dict[str, Mixer] = {
    "none": NoMixer(),
    "the letter before": Convolution(width=2),
    "attention": Attention(heads=4),
}
MEETS = 0.02  # nats above the entropy
ROUNDING = 1e-4  # nats below it


class Claim(Experiment):
    name = "bigram"
    number = 18
    claim = "Without a mixer a model is a bigram model: its loss reaches the bigram entropy and goes no lower."
    idea = """Feed-forward layers, norms and residuals act on each vector alone; only the mixer moves
information from one token to another. Without it, and without positions, the logits at $t$ are a function $f(x_t)$,
and the loss of any such function is at least $H(x_{t+1} \\mid x_t) = -\\sum_{a,b} p(a,b) \\log p(b \\mid a)$, with the
frequencies $p$ of the pairs in the text that is evaluated: no depth or width goes below it. The text is synthetic:
each letter depends on the two before it, so a bigram model is not optimal. A convolution over two letters can learn
the true distribution, and so can attention."""
    prediction = """At each depth the loss on unseen text is less than 0.02 nats above its bigram entropy (p < 0.05)
and in no seed below it. Nothing is concluded unless models that read the letter before are below it."""
    explanation = """The observed difference of a depth is the bigram entropy plus 0.02 nats minus the loss: above 0,
the loss is less than 0.02 nats above the entropy."""
    unit = "nats per letter"
    sizes: ClassVar = {"letters": "{} letters"}
    columns = """Reads beside itself: what a model reads beside the newest letter. None: nothing; the letter before: a
convolution over two letters. Above the bigram entropy: loss minus bigram entropy."""
    measured = "Loss on unseen text, in nats per letter, and the bigram and trigram entropies of that text."
    limits = """A synthetic text of few letters, on which the bigram floor is known exactly. Only small models; depth
up to 6."""
    sources = (
        "Shannon (1951), [Prediction and Entropy of Printed "
        "English](https://doi.org/10.1002/j.1538-7305.1951.tb01366.x)",
        "Elhage et al. (2021), [A Mathematical Framework for Transformer "
        "Circuits](https://transformer-circuits.pub/2021/framework/index.html), on zero-layer models",
    )
    parts = ("config/mixer.py", "nn/block.py", "nn/convolution.py")
    minutes = (1.3, 5, 3)
    alt = "Training loss by step and final loss of models without a mixer, beside the bigram and trigram entropies"
    spread = (
        "Bands (above): one standard deviation over seeds. Below, a dot is one seed, and the error bar one "
        "standard deviation."
    )

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

    def judge(self, results: Sequence[Result]) -> Verdict:
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

    def beside(self, results: Sequence[Result]) -> dict[str, str]:
        highest = max(x for mixer in MIXERS if mixer != "none" for x in found(results, "loss", mixer=mixer))
        seen = f"highest loss {highest:.3f}, bigram entropy {results[0]['bigram']:.3f}"
        return {"models that read the letter before are below it": seen}

    def setting(self, results: Sequence[Result]) -> str:
        return """A decoder predicts the next letter of a text in which each letter depends on the two before it.
Attention has sinusoidal positions, the other models have none."""

    def result(self, results: Sequence[Result]) -> str:
        bigram, alone = results[0]["bigram"], _alone(results)
        above = ", ".join(f"{summary(x).mean - bigram:+.4f} at depth {depth}" for depth, x in alone.items())
        best = summary(found(results, "loss", mixer="attention"))
        return (
            f"Without a mixer the loss on unseen text differs from the bigram entropy of {bigram:.3f} nats per letter "
            f"by {above}; with attention it is {best}, and the trigram entropy, the least possible, is "
            f"{results[0]['trigram']:.3f}."
        )

    def table(self, results: Sequence[Result]) -> Rows:
        rows: list[tuple[str, ...]] = [("reads beside itself", "depth", "loss", "above the bigram entropy")]
        for mixer, depth in dict.fromkeys((r["mixer"], r["depth"]) for r in results):
            some = found(results, "loss", mixer=mixer, depth=depth)
            above = summary([loss - results[0]["bigram"] for loss in some])
            rows.append((mixer, str(depth), str(summary(some)), f"{above.mean:+.4f} ± {above.deviation:.1g}"))
        return rows

    def draw(self, results: Sequence[Result]) -> Any:
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


def _alone(results: Sequence[Result]) -> dict[int, list[float]]:
    """Return the losses without a mixer, by depth."""
    depths = sorted({r["depth"] for r in results if r["mixer"] == "none"})
    return {depth: found(results, "loss", mixer="none", depth=depth) for depth in depths}
