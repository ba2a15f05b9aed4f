"""Helpers shared by several experiments."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from anyformer import Transformer
from anyformer.config import LM, ModelConfig, Stack, Tokens, Xavier
from anyformer.lab.api import Cell, CellResult, Side, Size, alone, scratch_folder
from anyformer.nn.api import AuxOutputs, Backend
from anyformer.recipe import AdamW, Batches, Characters, Cosine, Crops, Data, LanguageModel, Recipe, TextFile, Train
from anyformer.training.api import read_recipe

FRESH = 200  # first seed of the cpu and gpu sizes: no run that was looked at while a rule was written had it
WIDER = 300  # the same for claims whose rule has asked for a wider range of learning rates since

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seeds(size: Size, count: int = 5, first: int = FRESH) -> range:
    """Return the seeds of a size: three at the quick size, which is for a first look, else at least five fresh ones."""
    return range(3) if size == "quick" else range(first, first + count)


@torch.no_grad()
def mixer_flops(model: Transformer, x: Tensor) -> tuple[int, int]:
    """Return torch's FLOP count of the first mixer: matmuls between tokens, and matmuls with weights."""
    before, model.backend = model.backend, "eager"  # torch's counter does not see into fused kernels
    with FlopCounterMode(display=False) as counter:
        model(x)
    model.backend = before
    found = counter.get_flop_counts()
    mixer = found[next(name for name in found if name.endswith("blocks.0.mixer"))]
    between = sum(n for op, n in mixer.items() if "bmm" in str(op))
    return between, sum(mixer.values()) - between


@torch.no_grad()
def median_seconds(model: Transformer, x: Tensor, repeats: int, backend: Backend = "auto") -> float:
    """Return the median time of a forward pass, after two warm-up runs."""
    before, model.backend = model.backend, backend
    found = seconds(lambda: model(x), repeats)
    model.backend = before
    return found


def seconds(run: Callable[[], object], repeats: int, after: Callable[[], object] = lambda: None) -> float:
    """Return the median time of `run` after two warm-up runs; `after` is called untimed after each run."""
    found = []
    with alone():
        for _ in range(repeats + 2):
            _finish()
            began = time.perf_counter()
            run()
            _finish()
            found.append(time.perf_counter() - began)
            after()
    return statistics.median(found[2:])


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def recipe_for(cell: Cell, base: str, changes: Mapping[str, Any], more: Sequence[str] = ()) -> Recipe:
    """Return a ready recipe by a cell's width, tokens, steps, lr and seed, without test data and with changes."""
    given = {
        "data.test": "none",
        "model.width": cell["width"],
        "batches.tokens": cell["tokens"],
        "train.steps": cell["steps"],
        "train.schedule.warmup": cell["steps"] // 10,
        "train.optimizer.lr": cell["lr"],
        "train.compile": "off",
        "seed": cell["seed"],
    }
    return read_recipe(base, [*(f"{name}={value}" for name, value in {**given, **changes}.items()), *more])


def sorting(cell: Cell, more: Sequence[str] = ()) -> Recipe:
    """Return a recipe for sorting digits, by a cell's depth, heads, longest, and what `recipe_for` reads."""
    rows = "{{kind='sort', count={}, shortest=4, longest={}}}"
    changes = {
        "data.train": rows.format(20_000, cell["longest"]),
        "data.valid": rows.format(300, cell["longest"]),
        "model.decoder.depth": cell["depth"],
        "model.decoder.blocks.0.mixer.heads": cell["heads"],
        "model.decoder.blocks.0.feedforward.width": 2 * cell["width"],
    }
    return recipe_for(cell, "sort", changes, more)


def chain(letters: int, order: int, length: int, seed: int, part: int = 0) -> tuple[str, float]:
    """Return a synthetic text, each letter drawn given the `order` letters before, and its entropy (nats per letter).

    One of four letters follows each context. Parts of one seed are different texts of the same distribution.
    """
    rules = np.random.default_rng(seed)
    chances = np.array([0.6, 0.25, 0.1, 0.05])
    following = np.array([rules.permutation(letters)[: len(chances)] for _ in range(letters**order)])
    drawn = np.random.default_rng([seed, part]).choice(len(chances), size=length, p=chances).tolist()
    state, made, table = 0, [], following.tolist()
    for choice in drawn:
        letter = table[state][choice]
        state = state * letters % letters**order + letter
        made.append(chr(ord("a") + letter))
    return "".join(made), float(-(chances * np.log(chances)).sum())


@contextmanager
def spelling(cell: Cell, decoder: Stack) -> Iterator[tuple[Recipe, str]]:
    """Yield a recipe that trains a language model on a synthetic text, by a cell's width, letters, text, rows, length,
    steps, lr and seed; and the validation text."""
    with scratch_folder() as folder:
        texts = [chain(cell["letters"], 2, cell["text"] // share, 0, part)[0] for part, share in enumerate((1, 10))]
        paths = [folder / name for name in ("train.txt", "valid.txt")]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
        yield language_model(cell, decoder, paths, Crops(rows=cell["rows"], length=cell["length"])), texts[1]


def language_model(cell: Cell, decoder: Stack, paths: Sequence[Path], batches: Batches) -> Recipe:
    """Return the recipe of a character language model on two files, the second for validation."""
    train, valid = (TextFile(path=str(p), document="file" if batches.kind == "crops" else "line") for p in paths)
    return Recipe(
        task=LanguageModel(),
        data=Data(train=train, valid=valid),
        tokenizer=Characters(),
        model=ModelConfig(width=cell["width"], target=Tokens(), decoder=decoder, head=LM(), init=Xavier()),
        batches=batches,
        train=Train(
            steps=cell["steps"],
            optimizer=AdamW(lr=cell["lr"], betas=(0.9, 0.98), weight_decay=0.0),
            schedule=Cosine(warmup=cell["steps"] // 10, floor=0.0),
            precision="fp32",
            compile="off",
            log_every=1,
        ),
        seed=cell["seed"],
    )


def found(results: Sequence[CellResult], name: str, **cell: Any) -> list[Any]:
    """Return a measurement of all cells with these values; a diverged training may lack it."""
    some = [r for r in results if all(r.cell[key] == value for key, value in cell.items())]
    return [r.found[name] for r in some if name in r.found]


def side(name: str, results: Sequence[CellResult], score: str, *, higher: bool = False, **cell: Any) -> Side:
    """Return one side of a comparison by learning rate: a measurement of all cells with these values."""
    rates = sorted({r["lr"] for r in results if all(r.cell[key] == value for key, value in cell.items())})
    return Side(name, {lr: found(results, score, **cell, lr=lr) for lr in rates}, higher)


def final(curve: Sequence[Sequence[float]]) -> float:
    """Return the final loss of a curve: the mean of its last tenth."""
    last = [loss for _, loss in curve[-max(1, len(curve) // 10) :]]
    return sum(last) / len(last)


def mean_token_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean cross-entropy over tokens; labels of -100 are ignored."""
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def learn(
    model: Transformer,
    batch: Callable[[], tuple[Tensor | tuple[Tensor, Tensor], Tensor]],
    steps: int,
    lr: float,
    points: int = 40,
    watch: Callable[[int], object] = lambda step: None,
) -> list[list[float]]:
    """Train on a stream of batches of ids and labels, with Adam, a short warm-up and a cosine schedule.

    An encoder-decoder takes pairs of ids. Auxiliary losses, such as the balance of experts, are added to the gradient.
    Returns about `points` pairs of step and training loss. `watch` is called at each of them.
    """
    optimizer, every, curve = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98)), max(1, steps // points), []
    for step in range(steps):
        done = (step + 1) / steps
        optimizer.param_groups[0]["lr"] = lr * min(10 * done, (1 + math.cos(math.pi * done)) / 2)
        ids, wanted = batch()
        aux = AuxOutputs()
        loss = mean_token_loss(model(*ids, aux=aux) if isinstance(ids, tuple) else model(ids, aux=aux), wanted)
        optimizer.zero_grad()
        sum(aux.losses, loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0:
            curve.append([float(step), round(loss.item(), 4)])
            watch(step)
    return curve
