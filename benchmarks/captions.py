"""Training on Multi30k, pairs of unequal length: packed in our loop, padded in random order for torch.nn.

Rates are in real tokens. Without the data (`anyformer data fetch multi30k`), captions are synthetic.
"""

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from anyformer.data.datasets.storage import find
from anyformer.data.loader import ExampleLoader
from anyformer.kernels.conventions import IGNORE
from anyformer.kernels.cross_entropy import token_loss
from anyformer.recipe import Recipe
from anyformer.recipe.ready import read_recipe
from benchmarks.idle import Steps
from benchmarks.ragged import pairs
from benchmarks.sheet import DEVICE
from benchmarks.training import TorchPair, begun, stepping, vaswani

SIZES: dict[str, int] = {"depth": 6, "width": 512, "heads": 8, "ff": 2048, "vocab": 32768}
TINY: dict[str, int] = {"depth": 1, "width": 32, "heads": 2, "ff": 64, "vocab": 16384}
LENGTH, STEP = 128, 8  # of packed rows; to a multiple of which others are padded: few shapes


def has_multi30k() -> bool:
    return find("multi30k/tok/train.lc.norm.tok.en") is not None


def recipe(sizes: dict[str, int], tokens: int, folder: Path) -> Recipe:
    """Transformer-base, with dropout where `TorchPair` has it."""
    changes = [f"batches={{kind='packed', tokens={tokens}, length={LENGTH}}}", "data.valid=none", "data.test=none"]
    if not has_multi30k():
        for number, side in enumerate(("en", "de")):
            text = "\n".join(pair[number] for pair in pairs())
            (folder / f"train.{side}").write_text(text + "\n", encoding="utf-8")
        changes += [f"data={{root='{folder}', train={{kind='parallel', source='train.en', target='train.de'}}}}"]
    return read_recipe("multi30k-en-de", changes).model_copy(update={"model": vaswani(**sizes, dropout=0.1)})


def ours(sizes: dict[str, int], tokens: int, folder: Path) -> Iterator[int]:
    """Run training steps; yield the number of real tokens of each."""
    yield from Steps(recipe(sizes, tokens, folder)).each()


@cache
def lengths(tokens: int, folder: Path) -> tuple[Tensor, int]:
    """Return the source and target lengths of each pair, and the number of pairs in a packed batch."""
    loader = Steps(recipe(TINY, tokens, folder)).job.loader
    assert isinstance(loader, ExampleLoader)
    sizes = torch.from_numpy(loader.sizes).flip(1)
    return sizes, len(sizes) // max(1, len(loader.plan(0)))


def torch_nn(sizes: dict[str, int], tokens: int, folder: Path) -> Iterator[int]:
    """The same pairs in shuffled order, the same number per batch, padded to the longest."""
    all_of_them, rows = lengths(tokens, folder)
    order = torch.randperm(len(all_of_them), generator=torch.Generator().manual_seed(0))
    vocab, config = sizes["vocab"], recipe(sizes, tokens, folder).model
    pair = TorchPair(sizes["width"], sizes["heads"], sizes["depth"], sizes["ff"], vocab, 2 * LENGTH, 0.1)
    model: nn.Module = pair.to(DEVICE).begin(begun(config))
    current: dict[str, Tensor] = {}

    def loss() -> Tensor:
        logits = model(current["source"], current["target"], current["pads"])
        return token_loss(logits, current["labels"], 0.1) / current["asked"]

    step = stepping(model.train(), loss)
    for start in itertools.cycle(range(0, len(order) - rows + 1, rows)):
        some = all_of_them[order[start : start + rows]]
        s, t = (-(-some.amax(0) // STEP) * STEP).tolist()
        here = some.to(DEVICE)
        pads = (torch.arange(longest, device=DEVICE) >= n[:, None] for n, longest in zip(here.T, (s, t), strict=True))
        source, target = pads
        current.update(
            source=torch.randint(2, vocab, (rows, s), device=DEVICE),
            target=torch.randint(2, vocab, (rows, t), device=DEVICE),
            labels=torch.randint(2, vocab, (rows, t), device=DEVICE).masked_fill(target, IGNORE),
            pads=source,
            asked=some[:, 1].sum().to(DEVICE),
        )
        for name in ("source", "target", "labels", "pads"):  # compiled once, for any width
            torch._dynamo.maybe_mark_dynamic(current[name], 1)
        step()
        yield int(some.sum())
