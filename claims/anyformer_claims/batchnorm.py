"""Layer norm and batch norm on rows of unequal length, in large and in small batches."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from anyformer.config import Attention, BatchNorm, Block, LayerNorm, Norm, Plain, Sinusoidal, Stack
from anyformer.data.api import Cursor
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
from anyformer.lab.figures import FILL, bars, panels
from anyformer.recipe import Padded, Recipe
from anyformer.training.api import total_loss
from anyformer_claims.common import chain, found, language_model, seeds

POOLS = {"sorted": 50, "mixed": 1}  # batches whose rows are sorted by length together
NORMS: dict[str, Norm] = {"layer": LayerNorm(), "batch": BatchNorm()}
MARGIN = 0.01  # nats: smaller differences are ignored


class Claim(Experiment):
    kind: Literal["batchnorm"] = "batchnorm"

    def cells(self, size: Size) -> list[Cell]:
        width, letters, text, longest, sizes, steps = {
            "quick": (32, 8, 200_000, 32, (64, 512), 300),
            "cpu": (48, 8, 200_000, 32, (64, 512), 400),
            "gpu": (128, 12, 1_000_000, 64, (128, 4096), 800),
        }[size]
        rest = {"lr": 6e-3 * (32 / width) ** 0.5, "letters": letters, "text": text, "longest": longest}
        rest |= {"width": width, "depth": 2, "heads": 4, "steps": steps}
        return [
            {"norm": norm, "batches": batches, "tokens": tokens, **rest, "seed": seed}
            for norm in NORMS
            for batches in POOLS
            for tokens in sizes
            for seed in seeds(size, 10)  # batch norm varies much from seed to seed
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        with reading(cell) as recipe, trained(recipe) as over:
            return {"diverged": over.diverged, **_losses(over), "curve": over.curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        small, *_, large = _sizes(results)
        conditions: list[More | Fact] = [
            More(
                f"loss in {b} batches of {n} tokens, batch norm - layer norm",
                _values(results, "loss", "batch", b, n),
                _values(results, "loss", "layer", b, n),
                MARGIN,
            )
            for b, n in (("sorted", small), ("sorted", large), ("mixed", small))
        ]
        gap = {(b, n): _values(results, "gap", "batch", b, n) for b in POOLS for n in (small, large)}
        conditions += [
            More(
                f"harm of running statistics, sorted - mixed batches of {large}",
                gap["sorted", large],
                gap["mixed", large],
                MARGIN,
            ),
            More(
                f"harm of running statistics in mixed batches, of {small} - of {large}",
                gap["mixed", small],
                gap["mixed", large],
                MARGIN,
            ),
        ]
        lowest = min(summary(_values(results, "loss", "layer", b, n)).mean for b in POOLS for n in (small, large))
        learnt = lowest <= 0.95 * math.log(results[0]["letters"])
        return decide(conditions, requires=[Fact("layer norm learns the text", learnt)])

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        small, *_, large = _sizes(results)
        lowest = min(summary(_values(results, "loss", "layer", b, n)).mean for b in POOLS for n in (small, large))
        letters = results[0]["letters"]
        bound = f"bound 0.95 log {letters} = {0.95 * math.log(letters):.3f}"
        return {"layer norm learns the text": f"lowest mean loss {lowest:.3f}; {bound}"}

    def setting(self, results: Sequence[CellResult]) -> str:
        return f"""A decoder with sinusoidal positions predicts the next letter of rows of 4 to
{results[0]["longest"]} letters, each of which depends on the two before it. Unseen rows are batched as in training."""

    def result(self, results: Sequence[CellResult]) -> str:
        small, *_, large = _sizes(results)
        both = {
            (b, n): " against ".join(
                f"{summary(_values(results, 'loss', norm, b, n)).mean:.2f}" for norm in ("batch", "layer")
            )
            for b in POOLS
            for n in (small, large)
        }
        return (
            f"Loss on unseen rows, batch norm against layer norm: {both['sorted', small]} and {both['sorted', large]} "
            f"in sorted batches of {small:,} and {large:,} tokens, {both['mixed', small]} and {both['mixed', large]} "
            "in mixed ones (nats per letter)."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [
            (
                "norm",
                "batches",
                "tokens in a batch",
                "loss on unseen rows",
                "by the batches' own statistics",
                "harm of running statistics",
            )
        ]
        for norm in NORMS:
            for batches in POOLS:
                for n in _sizes(results):
                    some = (summary(_values(results, name, norm, batches, n)) for name in ("loss", "own", "gap"))
                    rows.append((norm, batches, f"{n:,}", *map(str, some)))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, axes = panels(2, height=1.2 + 0.5 * len(POOLS) * len(_sizes(results)), sharey=True)
        for axis, name in zip(axes, ("loss", "gap"), strict=True):
            named = {
                f"{norm} norm, {b}, {n:,} tokens": _values(results, name, norm, b, n)
                for b in POOLS
                for n in _sizes(results)
                for norm in NORMS
            }
            bars(axis, named, [FILL, "#E8C39C"])
        axes[0].set_xlabel("loss on unseen rows, nats per letter")
        axes[1].set_xlabel("harm of running statistics,\nnats per letter")
        return figure


def _sizes(results: Sequence[CellResult]) -> list[int]:
    return sorted({r["tokens"] for r in results})


def _values(results: Sequence[CellResult], name: str, norm: str, batches: str, tokens: int) -> list[float]:
    return found(results, name, norm=norm, batches=batches, tokens=tokens)


@contextmanager
def reading(cell: Cell) -> Iterator[Recipe]:
    """Return a language-modelling recipe: lines of 4 letters up to the longest, the same number of each length."""
    with scratch_folder() as folder:
        paths = [folder / name for name in ("train.txt", "valid.txt")]
        for part, (path, size) in enumerate(zip(paths, (cell["text"], 8000), strict=True)):
            lengths = np.random.default_rng([12, part]).integers(4, cell["longest"] + 1, size // 4)
            ends = [end for end in lengths.cumsum().tolist() if end <= size]
            text = chain(cell["letters"], 2, size, 0, part)[0]
            rows = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
            path.write_text("\n".join(rows), encoding="utf-8")
        norm = NORMS[cell["norm"]]
        block = Block(mixer=Attention(heads=cell["heads"]), feedforward=Plain(width=2 * cell["width"]), norm=norm)
        stack = Stack(depth=cell["depth"], blocks=(block,), position=Sinusoidal(), final_norm=norm)
        yield language_model(cell, stack, paths, Padded(tokens=cell["tokens"], pool=POOLS[cell["batches"]]))


@torch.no_grad()
def _losses(over: Trial) -> dict[str, float]:
    """Return the loss on unseen rows, batched as in training, with running statistics and with batch statistics."""
    job = over.job
    assert job.valid is not None
    loader, place, batches = over.task.loader(job.valid, job.recipe.batches, 0, job.model), Cursor(), []
    while place.epoch == 0:
        batch, place = loader.read(place)
        batches.append(batch)
    (total, count), (own, _) = (
        total_loss(job.model.train(training), batches, job.device) for training in (False, True)
    )
    return {"loss": total / count, "own": own / count, "gap": (total - own) / count}
