"""Training on sentence pairs of unequal length: our loop beside torch.nn with batches as they come, in real tokens."""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from anyformer.kernels.conventions import IGNORE
from anyformer.kernels.cross_entropy import token_loss
from anyformer.recipe.ready import read_recipe
from benchmarks.idle import Steps
from benchmarks.sheet import DEVICE, Sheet, finish
from benchmarks.side_by_side import alone
from benchmarks.training import TorchPair, stepping

PAIRS, WORDS = 3000, 4000

Taken = Iterator[int]
"""Run training steps; yield the number of real tokens of each."""


def pairs() -> list[tuple[str, str]]:
    """Made-up sentences as long as captions are: a dozen words, give or take a third."""
    drawn = np.random.default_rng(0)
    lengths = np.clip(np.exp(drawn.normal(np.log(12.0), 0.4, (PAIRS, 2))), 3, 50).astype(int)
    words = [[" ".join(f"w{i}" for i in drawn.integers(WORDS, size=n)) for n in row] for row in lengths]
    return [(source, target) for source, target in words]


def ours(width: int, depth: int, tokens: int) -> Taken:
    """By our loader and loop."""
    with tempfile.TemporaryDirectory() as folder:
        for number, side in enumerate(("en", "de")):
            text = "\n".join(pair[number] for pair in pairs())
            (Path(folder) / f"train.{side}").write_text(text + "\n", encoding="utf-8")
        changes = [
            f"data={{root='{folder}', train={{kind='parallel', source='train.en', target='train.de'}}}}",
            "tokenizer={kind='words', size=5000}",
            f"model.width={width}",
            *(f"model.{side}.depth={depth}" for side in ("encoder", "decoder")),
            *(f"model.{side}.blocks.0.feedforward.width={4 * width}" for side in ("encoder", "decoder")),
            *(f"model.{side}.blocks.0.mixer.heads=4" for side in ("encoder", "decoder")),
            "model.decoder.blocks.0.cross.heads=4",
            f"batches={{kind='padded', tokens={tokens}}}",
            "train.evaluate_every=none",
            "train.compile=off",
        ]
        yield from Steps(read_recipe("multi30k-en-de", changes)).each()


def torch_nn(width: int, depth: int, tokens: int) -> Taken:
    """Batches of the same number of pairs in shuffled order, padded to the longest."""
    lengths = torch.tensor([[len(side.split()) + 1 for side in pair] for pair in pairs()])
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    rows = max(1, int(tokens / lengths.float().mean()))
    model: nn.Module = TorchPair(width, 4, depth, 4 * width, WORDS + 1000, 64, 0.1).to(DEVICE).train()
    current: dict[str, Tensor] = {}

    def loss() -> Tensor:
        logits = model(current["source"], current["target"], current["pads"])
        return token_loss(logits, current["labels"], 0.1) / (current["labels"] != IGNORE).sum()

    step = stepping(model, loss)
    for start in itertools.cycle(range(0, len(order) - rows, rows)):
        some = lengths[order[start : start + rows]]
        (s, t), both = some.amax(0).tolist(), []
        for n, longest in ((some[:, 0], s), (some[:, 1], t)):
            both.append(torch.arange(longest) >= n[:, None])
        current.update(
            source=torch.randint(2, WORDS, (rows, s)).to(DEVICE),
            target=torch.randint(2, WORDS, (rows, t)).to(DEVICE),
            labels=torch.randint(2, WORDS, (rows, t)).masked_fill(both[1], IGNORE).to(DEVICE),
            pads=both[0].to(DEVICE),
        )
        float(step())
        yield int(some.sum())


def rates(
    ways: dict[str, Callable[[], Taken]], warm: int = 5, rounds: int = 5, each: int = 10
) -> dict[str, list[float]]:
    """Return the sorted real tokens/s of each implementation, measured in turns."""
    running = {name: make() for name, make in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for steps in running.values():
        for _ in range(warm):
            next(steps)
    with alone():
        for _, (name, steps) in itertools.product(range(rounds), running.items()):
            finish()
            began = time.perf_counter()
            tokens = sum(next(steps) for _ in range(each))
            finish()
            found[name].append(tokens / (time.perf_counter() - began))
    return {name: sorted(some) for name, some in found.items()}


def compare(sheet: Sheet, key: str, ways: dict[str, Callable[[], Taken]], data: str, **few: int) -> None:
    """Write the row that compares ours with torch.nn; `data` names the pairs."""
    found = rates(ways, **few)
    middle = {name: median(some) for name, some in found.items()}
    spread = {name: [some[0], some[-1]] for name, some in found.items()}
    how = {"peer_name": "torch.nn", "rates": middle, "spread": spread, "data": data}
    sheet.put(key, middle["ours"], middle["torch.nn"], "real tokens/s", **how)
