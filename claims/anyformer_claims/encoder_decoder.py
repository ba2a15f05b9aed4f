"""A recurrent encoder–decoder with and without attention, and a Transformer: words translated by sentence length."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anyformer import Transformer, generate
from anyformer.config import (
    LM,
    Attention,
    Block,
    LayerNorm,
    ModelConfig,
    NoPosition,
    Plain,
    Recurrent,
    Sinusoidal,
    Special,
    SqrtWidth,
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
    Side,
    Size,
    Verdict,
    decide,
    summary,
    written_test,
)
from anyformer.lab.figures import curves, legend, lines, panels, reference
from anyformer_claims.common import DEVICE, learn, seeds, side

BARE, ATTENDING, TRANSFORMER = "rnn", "rnn with attention", "transformer"
LABELS = {BARE: "RNN", ATTENDING: "RNN with attention", TRANSFORMER: "Transformer"}
UNSEEN = 200  # sentences of each length
LEARNT = 0.9  # share of the words right, in the shortest sentences
MARGIN = 0.05  # smaller differences are ignored


class Claim(Experiment):
    kind: Literal["encoder_decoder"] = "encoder_decoder"

    def cells(self, size: Size) -> list[Cell]:
        width, words, lengths, steps, rates = {
            "quick": (48, 16, (2, 4, 8, 12), 600, (6e-3,)),
            "cpu": (64, 32, (2, 4, 8, 16), 1000, (5e-3,)),
            "gpu": (128, 64, (4, 8, 16, 32, 48), 4000, (1e-2, 4e-3, 1.5e-3, 6e-4)),
        }[size]
        rest = {"width": width, "depth": 1, "words": words, "lengths": list(lengths), "rows": 32, "steps": steps}
        return [{"model": m, "lr": lr, **rest, "seed": s} for m in LABELS for lr in rates for s in seeds(size)]

    def measure(self, cell: Cell) -> dict[str, Any]:
        torch.manual_seed(cell["seed"])
        with torch.device(DEVICE):
            model = Transformer(config_of(cell))
        lengths = range(cell["lengths"][0], cell["lengths"][-1] + 1, 2)
        drawn = np.random.default_rng([25, cell["seed"]])

        def batch() -> tuple[tuple[Tensor, Tensor], Tensor]:
            return _sentences(cell, int(drawn.choice(lengths)), cell["rows"])

        curve = learn(model, batch, cell["steps"], cell["lr"])
        model.eval()
        right, whole = [], []
        for length in cell["lengths"]:
            (source, _), wanted = _sentences(cell, length, UNSEEN)
            said = generate(model, source, max_new_tokens=length)[:, 1:]
            right.append(float((said == wanted).double().mean()))
            whole.append(float((said == wanted).all(dim=1).double().mean()))
        return {"right": right, "whole": whole, "parameters": model.num_parameters(), "curve": curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        shortest, *_, longest = results[0]["lengths"]
        first, last = ({m: [r["right"][at] for r in _best(results, m)] for m in LABELS} for at in (0, -1))
        lost = {m: [a - b for a, b in zip(first[m], last[m], strict=True)] for m in LABELS}
        conditions = [
            More(f"words right of {longest}, {LABELS[m]} - RNN", last[m], last[BARE], MARGIN)
            for m in (ATTENDING, TRANSFORMER)
        ]
        conditions.append(
            More(f"words lost from {shortest} to {longest}, RNN - RNN with attention", lost[BARE], lost[ATTENDING])
        )
        learnt = min(*first[BARE], *first[ATTENDING])
        return decide(
            conditions,
            requires=[Fact(f"both RNNs have {LEARNT} of the words right in the shortest sentences", learnt >= LEARNT)],
        )

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        longest = [replace(r, found={"right": r["right"][-1]}) for r in results]
        return [side(label, longest, "right", higher=True, model=m) for m, label in LABELS.items()]

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        lowest = {m: min(r["right"][0] for r in _best(results, m)) for m in (BARE, ATTENDING)}
        seen = ", ".join(f"{LABELS[m]} {x:.3f}" for m, x in lowest.items())
        return {f"both RNNs have {LEARNT} of the words right in the shortest sentences": f"lowest of all seeds: {seen}"}

    def setting(self, results: Sequence[CellResult]) -> str:
        shortest, *_, longest = results[0]["lengths"]
        return f"""Encoder–decoders whose feed-forwards are twice as wide as the model, with layer norms before each
sublayer. Attention has 4 heads; the Transformer has sinusoidal positions, the RNNs have none. They train on sentences
of {shortest} to {longest} words, an even number each, and translate {UNSEEN} unseen sentences of each length below."""

    def caption(self, results: Sequence[CellResult]) -> str:
        return "The loss jumps because each batch has sentences of one length, drawn at random."

    def result(self, results: Sequence[CellResult]) -> str:
        shortest, *_, longest = results[0]["lengths"]
        first, last = (
            ", ".join(
                f"{k} {100 * summary([r['right'][at] for r in _best(results, m)]).mean:.0f} %"
                for m, k in LABELS.items()
            )
            for at in (0, -1)
        )
        return (
            f"In sentences of {shortest} words these shares of the words are right: {first}; in sentences of {longest} "
            f"words: {last}."
        )

    def remark(self, results: Sequence[CellResult]) -> str:
        longest = results[0]["lengths"][-1]
        last = {m: [r["right"][-1] for r in _best(results, m)] for m in (ATTENDING, TRANSFORMER)}
        shown = " and ".join(f"{LABELS[m]} {summary(x)}" for m, x in last.items())
        p = written_test(last[ATTENDING], last[TRANSFORMER])
        return f"Words right in sentences of {longest} words: {shown} ({p}, not part of the rule)."

    def table(self, results: Sequence[CellResult]) -> Rows:
        lengths = results[0]["lengths"]
        rows: list[tuple[str, ...]] = [
            ("model", "rate", "parameters", *(f"{n} words: words (sentences) right" for n in lengths))
        ]
        for m, label in LABELS.items():
            some = _best(results, m)
            shown = []
            for at in range(len(lengths)):
                right, whole = (summary([r[name][at] for r in some]) for name in ("right", "whole"))
                shown.append(f"{right} ({whole.mean:.3f})")
            rows.append((label, f"{some[0]['lr']:g}", f"{some[0]['parameters']:,}", *shown))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, right) = panels(2)
        lengths = results[0]["lengths"]
        named = {
            label: {float(n): [r["right"][at] for r in _best(results, m)] for at, n in enumerate(lengths)}
            for m, label in LABELS.items()
        }
        lines(left, named)
        left.set(xlabel="words in a sentence", ylabel="fraction of words right", ylim=(0, 1.05))
        left.set_xticks(lengths)
        reference(left, 1 / results[0]["words"], "guessing")
        curves(right, {label: [r["curve"] for r in _best(results, m)] for m, label in LABELS.items()})
        right.set(title="sentences of all lengths", ylabel="training loss, nats per word")
        legend(figure, left)
        return figure


def config_of(cell: Cell) -> ModelConfig:
    width, words, depth = cell["width"], cell["words"], cell["depth"]
    feedforward = Plain(width=2 * width)
    if cell["model"] == TRANSFORMER:
        attention = Attention(heads=4)
        reading = Block(mixer=attention, feedforward=feedforward)
        writing = Block(mixer=attention, cross=attention, feedforward=feedforward)
    else:
        cross = Attention(heads=4) if cell["model"] == ATTENDING else None
        reading = Block(mixer=Recurrent(cell="gru", both_ways=True), feedforward=feedforward)
        writing = Block(mixer=Recurrent(cell="gru", begin="encoder"), cross=cross, feedforward=feedforward)
    position = Sinusoidal() if cell["model"] == TRANSFORMER else NoPosition()
    encoder, decoder = (
        Stack(depth=depth, blocks=(block,), position=position, final_norm=LayerNorm()) for block in (reading, writing)
    )
    source, target = (Tokens(vocab=size, scale=SqrtWidth()) for size in (words, words + 1))
    return ModelConfig(
        width=width,
        source=source,
        target=target,
        encoder=encoder,
        decoder=decoder,
        head=LM(),
        init=Xavier(),
        special=Special(start=words),
    )


def translation(source: Tensor, dictionary: Tensor) -> Tensor:
    """Return the words of the dictionary for sentences of even length, each two neighbours in the other order."""
    return dictionary[source].unflatten(1, (-1, 2)).flip(2).flatten(1)


def _sentences(cell: Cell, length: int, rows: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return source words with what the decoder reads, and the translation."""
    rules = np.random.default_rng(25).permutation(cell["words"])
    source = torch.randint(cell["words"], (rows, length), device=DEVICE)
    wanted = translation(source, torch.tensor(rules, device=DEVICE))
    start = torch.full_like(wanted[:, :1], cell["words"])
    return (source, torch.cat((start, wanted[:, :-1]), dim=1)), wanted


def _best(results: Sequence[CellResult], model: str) -> list[CellResult]:
    """Return the results of all seeds at the learning rate with the most words right in the longest sentences."""
    same = [r for r in results if r["model"] == model]
    each = [[r for r in same if r["lr"] == lr] for lr in sorted({r["lr"] for r in same})]
    return max(each, key=lambda some: summary([r["right"][-1] for r in some]).mean)
