"""Recipes that train in a moment, and what tests do with runs."""

import io
import json
import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from anyformer.config import LM, Attention, Block, Classifier, ModelConfig, Plain, Rotary, Stack, Tokens
from anyformer.data.batch import Batch
from anyformer.data.loader import Loader, Place
from anyformer.recipe import (
    AdamW,
    Batches,
    Characters,
    Classify,
    Crops,
    Data,
    LanguageModel,
    Packed,
    Padded,
    Recipe,
    Regress,
    ReverseDigits,
    Seq2Seq,
    TableFile,
    TextFile,
    Train,
    Words,
    columns,
)
from anyformer.run import Run
from anyformer.training.loop import Interrupted, Job, fit
from anyformer.training.prepare import prepare
from anyformer.training.state import checkpoints
from anyformer.training.train import finish

Shape = Literal["decoder", "encoder-decoder"]
PADDED, PACKED, CROPS = Padded(tokens=64), Packed(tokens=64, length=32), Crops(rows=4, length=16)
TEXT = "the quick brown fox jumps over the lazy dog and runs away from it again and again. " * 8


def model(shape: Shape = "decoder", dropout: float = 0.1, width: int = 8) -> ModelConfig:
    both = shape == "encoder-decoder"
    attention = Attention(heads=2)

    def stack(cross: bool) -> Stack:
        made = Block(mixer=attention, cross=attention if cross else None, feedforward=Plain(width=16), dropout=dropout)
        return Stack(depth=1, blocks=(made,), position=Rotary())

    tokens = Tokens(vocab=None)
    return ModelConfig(
        width=width,
        source=tokens if both else None,
        target=tokens,
        encoder=stack(False) if both else None,
        decoder=stack(both),
        head=LM(),
    )


def pairs(
    shape: Shape = "decoder", batches: Batches = PADDED, dropout: float = 0.1, valid: int | None = 8, **train: Any
) -> Recipe:
    """Digits to be reversed."""
    return Recipe(
        task=Seq2Seq(max_target=6),
        data=Data(
            train=ReverseDigits(count=60, shortest=2, longest=5),
            valid=None if valid is None else ReverseDigits(count=valid, shortest=2, longest=5),
        ),
        tokenizer=Words(),
        model=model(shape, dropout),
        batches=batches,
        train=settings(**train),
    )


def text(folder: Path, batches: Batches = CROPS, dropout: float = 0.1, **train: Any) -> Recipe:
    """A sentence to be known by heart."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    source = TextFile(path=str(folder / "text.txt"))
    return Recipe(
        task=LanguageModel(),
        data=Data(train=source, valid=source.model_copy(update={"start": 0.9})),
        tokenizer=Characters(),
        model=model("decoder", dropout),
        batches=batches,
        train=settings(**train),
    )


def labelled(
    folder: Path,
    task: Classify | Regress,
    rows: Sequence[tuple[str, ...]],
    width: int = 8,
    labels: int = 2,
    types: int = 0,
    **train: Any,
) -> Recipe:
    """Rows of a table: a text, its pair where the task has pairs, and its label; watched on the same rows."""
    names = columns(task)
    path, written = folder / "rows.tsv", "\n".join("\t".join(row) for row in (names, *rows))
    if not path.exists() or path.read_text(encoding="utf-8") != written:  # another process may be reading it
        path.write_text(written, encoding="utf-8")
    table = TableFile(path=str(path), **{name: name for name in names})
    block = Block(mixer=Attention(heads=2), feedforward=Plain(width=16), dropout=0.1)
    return Recipe(
        task=task,
        data=Data(train=table, valid=table),
        tokenizer=Words(),
        model=ModelConfig(
            width=width,
            source=Tokens(types=types),
            encoder=Stack(depth=2, blocks=(block,), position=Rotary()),
            head=Classifier(labels=labels, pool="mean"),
        ),
        batches=PADDED,
        train=settings(**train),
    )


def parities(count: int = 40) -> list[tuple[str, ...]]:
    """Some digits, and whether they begin with an even one."""
    chance = random.Random(0)
    drawn = [[chance.randint(0, 9) for _ in range(chance.randint(1, 6))] for _ in range(count)]
    return [(" ".join(map(str, digits)), "odd" if digits[0] % 2 else "even") for digits in drawn]


def distances(count: int = 40) -> list[tuple[str, ...]]:
    """Two digits among others, and how far they are from each other."""
    chance = random.Random(0)
    drawn = [(chance.randint(0, 9), chance.randint(0, 9)) for _ in range(count)]
    return [(f"{a} " * chance.randint(1, 3), f"{b}", f"{abs(a - b)}.5") for a, b in drawn]


def settings(**given: Any) -> Train:
    return Train(**{"steps": 12, "optimizer": AdamW(lr=1e-2), "log_every": 1, **given})


def quiet() -> Console:
    return Console(file=io.StringIO(), width=500)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def make(recipe: Recipe, out: Path, resume: bool = False, console: Console | None = None) -> Job:
    return prepare(recipe, out, resume, console or quiet())


def run(recipe: Recipe, out: Path, resume: bool = False) -> Run:
    job = make(recipe, out, resume)
    fit(job)
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):  # it takes longer than the training
        return finish(job)


class Watched:
    """A loader that does something before a batch is read for the n-th time."""

    def __init__(self, inner: Loader, number: int, act: Any):
        self.inner, self.left, self.act = inner, number, act

    def read(self, place: Place) -> tuple[Batch, Place]:
        self.left -= 1
        if self.left == 0:
            self.act()
        return self.inner.read(place)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stop_at(recipe: Recipe, out: Path, batch: int, resume: bool = False) -> bool:
    """Trains until a SIGTERM comes while the n-th batch is read; whether it came in time."""
    job = make(recipe, out, resume)
    job.loader = Watched(job.loader, batch, interrupt)
    try:
        fit(job)
    except Interrupted:
        return True
    return False


# -- what a run left ------------------------------------------------------------------------------------------------


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    speeds = ("tokens_per_second", "peak_share")
    return [{k: v for k, v in json.loads(line).items() if k not in speeds} for line in lines]


def result(out: Path) -> dict[str, Tensor]:
    """Everything that must not depend on interruptions: final weights, and the whole state of the last step."""
    last = checkpoints(out)[-1]
    return {
        **{f"final.{name}": x for name, x in load_file(out / "model.safetensors").items()},
        **{f"last.{name}": x for name, x in load_file(last / "model.safetensors").items()},
        **load_file(last / "state.safetensors"),
        "facts": torch.tensor(list((last / "state.json").read_bytes())),
    }


def assert_same_run(a: Path, b: Path) -> None:
    one, other = result(a), result(b)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert metrics(a) == metrics(b)


# -- a child that dies ----------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def child(recipe: str, out: Path, dies_at_sync: int | None, dies_after: float | None) -> None:
    """Trains in a process of its own, which dies at the n-th time that something is synced to disk, or by the clock."""
    from anyformer import run as folder
    from anyformer.config import io as config_io

    torch.set_num_threads(1)
    sync, count = folder._sync, 0

    def dying(path: Path) -> None:
        nonlocal count
        count += 1
        if count == dies_at_sync:
            die()
        sync(path)

    folder._sync = dying
    if dies_after is not None:
        threading.Timer(dies_after, die).start()
    run(config_io.loads(Recipe, recipe), out, resume=True)
