"""Recipes that train in a moment, and what tests do with runs."""

import io
import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from anyformer.config import (
    LM,
    Attention,
    Block,
    ByteSpelling,
    Classifier,
    Embedder,
    LoRA,
    MaskedLM,
    ModelConfig,
    NoSpelling,
    Plain,
    Rotary,
    Stack,
    TokenLabels,
    Tokens,
)
from anyformer.data.batch import Batch
from anyformer.data.chunks import ChunkedFiles
from anyformer.data.loader import Cursor, Loader
from anyformer.data.shard_writer import prepare as prepare_shards
from anyformer.recipe import (
    AdamW,
    AnyTokenizer,
    Batches,
    Characters,
    Classify,
    ConllFile,
    Crops,
    Data,
    DataTokenizer,
    Embed,
    LanguageModel,
    MaskedLanguageModel,
    MixedSource,
    MixedSources,
    Mixture,
    MixturePart,
    Packed,
    Padded,
    PrefixLM,
    Recipe,
    Regress,
    ReverseDigits,
    RunTokenizer,
    Seq2Seq,
    Shards,
    SpanCorruption,
    TableFile,
    Tag,
    TextFile,
    Tokenizer,
    Train,
    Words,
)
from anyformer.runs.run import Run
from anyformer.training.checkpoint import checkpoints
from anyformer.training.job import Job
from anyformer.training.loop import Interrupted, fit
from anyformer.training.prepare import prepare
from anyformer.training.train import finish

Shape = Literal["decoder", "encoder-decoder"]
CHARACTERS = Characters()
PADDED, PACKED, CROPS = Padded(tokens=64), Packed(tokens=64, length=32), Crops(rows=4, length=16)
WORDS = Words()
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


def corrupted(
    folder: Path,
    task: MaskedLanguageModel | SpanCorruption | PrefixLM,
    batches: Batches = PADDED,
    tokenizer: Tokenizer = WORDS,
    **train: Any,
) -> Recipe:
    """Sentences of some words, of which something is hidden."""
    path, written = folder / "sentences.txt", "\n".join(sentences())
    if not path.exists() or path.read_text(encoding="utf-8") != written:  # another process may be reading it
        path.write_text(written, encoding="utf-8")
    source = TextFile(path=str(path), document="line")
    shaped = {"mlm": _encoder(MaskedLM()), "spans": model("encoder-decoder"), "prefix_lm": model("decoder")}
    return Recipe(
        task=task,
        data=Data(train=source, valid=source.model_copy(update={"start": 0.8})),
        tokenizer=tokenizer,
        model=shaped[task.kind],
        batches=batches,
        train=settings(**train),
    )


def sentences(count: int = 40) -> list[str]:
    """Each counts on from some number."""
    chance = random.Random(0)
    return [" ".join(f"n{n % 10}" for n in range(a, a + chance.randint(3, 12))) for a in range(count)]


def _encoder(head: MaskedLM | Classifier, width: int = 8, types: int = 0) -> ModelConfig:
    block = Block(mixer=Attention(heads=2), feedforward=Plain(width=16), dropout=0.1)
    stack = Stack(depth=2, blocks=(block,), position=Rotary())
    return ModelConfig(width=width, source=Tokens(types=types), encoder=stack, head=head)


def shards(folder: Path, batches: Batches = CROPS, **train: Any) -> Recipe:
    """The same sentence as tokens, in several files."""
    recipe, out = text(folder, batches, **train), folder / "shards"
    (folder / "lines.txt").write_text(TEXT.replace(". ", ".\n"), encoding="utf-8")
    with mock.patch("anyformer.data.chunks.SIZE", 100):
        prepare_shards([folder / "lines.txt"], out, Characters(), ChunkedFiles())
    data = Data(train=Shards(path=str(out)), valid=Shards(path=str(out), start=0.9))
    return Recipe(**{**dict(recipe), "data": data, "tokenizer": DataTokenizer()})


def mixed(folder: Path, shape: Shape = "encoder-decoder", weight: float = 1.0, **train: Any) -> Recipe:
    """Letters to be made large, or to be copied: only the task's token tells."""
    rows = []
    for name, made in (("large", str.upper), ("copy", str)):
        path = folder / f"{name}.tsv"
        path.write_text("source\ttarget\n" + "".join(f"{c}\t{made(c)}\n" for c in "abcdefgh"), encoding="utf-8")
        rows.append(MixedSource(name=name, rows=TableFile(path=str(path), source="source", target="target")))
    parts = MixturePart(name="large", max_target=2), MixturePart(name="copy", weight=weight, max_target=2)
    data = MixedSources(parts=tuple(rows))
    change = {"task": Mixture(parts=parts), "data": Data(train=data, valid=data)}
    return pairs(shape, **train).model_copy(update=change)


def labelled(
    folder: Path,
    task: Classify | Regress | Embed,
    rows: Sequence[tuple[str, ...]],
    width: int = 8,
    labels: int = 2,
    types: int = 0,
    **train: Any,
) -> Recipe:
    """Rows of a table: a text, its pair and its label where the task has them; watched on the same rows."""
    names = task.columns
    path, written = folder / "rows.tsv", "\n".join("\t".join(row) for row in (names, *rows))
    if not path.exists() or path.read_text(encoding="utf-8") != written:  # another process may be reading it
        path.write_text(written, encoding="utf-8")
    table = TableFile(path=str(path), **{name: name for name in names})
    apart = isinstance(task, Embed) or (isinstance(task, Regress) and task.apart)
    return Recipe(
        task=task,
        data=Data(train=table, valid=table),
        tokenizer=Words(),
        model=_encoder(Embedder() if apart else Classifier(labels=labels, pool="mean"), width, types),
        batches=PADDED,
        train=settings(**train),
    )


def tagging(
    folder: Path,
    task: Tag | None = None,
    rows: Sequence[Sequence[tuple[str, str]]] | None = None,
    head: TokenLabels | None = None,
    batches: Batches = PADDED,
    tokenizer: AnyTokenizer = CHARACTERS,
    spelled: bool = False,
    width: int = 8,
    **train: Any,
) -> Recipe:
    """Words with tags, one a line; watched on the same sentences."""
    path = folder / "words.conll"
    written = "\n\n".join("\n".join("\t".join(pair) for pair in row) for row in (evens() if rows is None else rows))
    if not path.exists() or path.read_text(encoding="utf-8") != written:  # another process may be reading it
        path.write_text(written, encoding="utf-8")
    block = Block(mixer=Attention(heads=2), feedforward=Plain(width=16), dropout=0.1)
    spelling = ByteSpelling(width=4, channels=8, longest=4) if spelled else NoSpelling()
    return Recipe(
        task=task or Tag(),
        data=Data(train=ConllFile(path=str(path)), valid=ConllFile(path=str(path))),
        tokenizer=tokenizer,
        model=ModelConfig(
            width=width,
            source=Tokens(spelling=spelling),
            encoder=Stack(depth=2, blocks=(block,), position=Rotary()),
            head=head or TokenLabels(labels=3),
        ),
        batches=batches,
        train=settings(**train),
    )


def evens(count: int = 40) -> list[list[tuple[str, str]]]:
    """Numbers, of which the even ones that stand together are spans."""
    chance, out = random.Random(0), []
    for _ in range(count):
        numbers = [chance.randint(0, 120) for _ in range(chance.randint(1, 6))]
        before = [True, *(n % 2 for n in numbers)]
        tags = ["O" if n % 2 else "B-even" if odd else "I-even" for n, odd in zip(numbers, before, strict=False)]
        out.append(list(zip(map(str, numbers), tags, strict=True)))
    return out


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


def spellings(count: int = 40) -> list[tuple[str, ...]]:
    """Some digits, and the letters that stand for them."""
    chance = random.Random(0)
    drawn = [[chance.randint(0, 9) for _ in range(chance.randint(2, 6))] for _ in range(count)]
    return [(" ".join(map(str, digits)), " ".join("abcdefghij"[n] for n in digits)) for digits in drawn]


def adapter(folder: Path, **train: Any) -> Recipe:
    """Labels by a model with an adapter, which begins from a run that told other labels."""
    out = folder / "first"
    if not out.exists():
        first = folder / "others"
        first.mkdir(exist_ok=True)
        run(labelled(first, Classify(), [(text, f"is {label}") for text, label in parities()], steps=2), out)
    recipe = labelled(folder, Classify(), parities(), init_from=str(out), **train)
    changes = {"adapter": LoRA(rank=2, dropout=0.1)}
    model = recipe.model.model_copy(update=changes)
    return recipe.model_copy(update={"tokenizer": RunTokenizer(), "model": model})


def settings(**given: Any) -> Train:
    return Train(**{"steps": 12, "optimizer": AdamW(lr=1e-2), "log_every": 1, "snapshots": 0, **given})


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

    def read(self, place: Cursor) -> tuple[Batch, Cursor]:
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


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    speeds = ("tokens_per_second", "peak_share")
    return [{k: v for k, v in json.loads(line).items() if k not in speeds} for line in lines]


def result(out: Path) -> dict[str, Tensor]:
    """Everything that must not depend on interruptions: final weights, and the whole state of the last step."""
    last = checkpoints(out)[-1]
    facts = json.loads((last / "state.json").read_text(encoding="utf-8"))
    del facts["data"]  # fingerprints of files, which may hold the same in another form
    return {
        **{f"final.{name}": x for name, x in load_file(out / "model.safetensors").items()},
        **{f"last.{name}": x for name, x in load_file(last / "model.safetensors").items()},
        **load_file(last / "state.safetensors"),
        "facts": torch.tensor(list(json.dumps(facts).encode())),
    }


def assert_same_run(a: Path, b: Path) -> None:
    one, other = result(a), result(b)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert metrics(a) == metrics(b)
