"""Every tutorial runs from its first to its last command and block of Python, with few steps, on small files."""

import contextlib
import io
import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.training import plan
from tests.interop.test_encoders import bert
from tests.interop.test_sentence_transformers import sentences
from tests.pages import Block, blocks, commands
from tests.test_tutorials import PAGES, write_file

STEPS = ("train.steps=4", "train.schedule.warmup=1", "train.evaluate_every=2")
NOT_RUN = (
    "anyformer explore",
    "anyformer data fetch",
    "pip ",
    "git ",
    "unzip ",
    "cp ",
    "head ",
    "cd ",
    "python examples/",
)  # only parsed


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the reader is assumed to have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYFORMER_DATA", "")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(plan, "MIN_TIMED_SECONDS", 0.0)
    monkeypatch.setattr(plan, "MIN_TIMED_STEPS", 1)
    book = "\n".join(f"CHAPTER {n}. It was a dark night, and the dog of No. {n * n} slept." for n in range(400))
    Path("book.txt").write_text(book, encoding="utf-8")
    for name, noun in (("train.en", "dog"), ("train.de", "Hund")):
        rows = [f"{'a' if name == 'train.en' else 'ein'} {noun} {n} {n % 7} ." for n in range(1500)]
        Path(name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    reviews = "".join(f'"ab {n}, ba {n % 9}",{("negative", "positive")[n % 2]}\n' for n in range(600))
    Path("reviews.csv").write_text("review,opinion\n" + reviews, encoding="utf-8")
    sentences(Path("minilm"), bert("Model"), "mean", unit=True)
    pixels = np.random.default_rng(0)
    for split, first, count in (("train", 0, 12), ("test", 60_000, 3)):
        for digit in range(10):
            folder = Path("mnist-pngs", split, str(digit))
            folder.mkdir(parents=True)
            for n in range(count):
                picture = Image.fromarray(pixels.integers(0, 256, (28, 28), dtype=np.uint8))
                picture.save(folder / f"{first + n}.png")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_runs(page: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block, below in pairwise([*blocks(page.read_text(encoding="utf-8")), None]):
        assert block is not None
        if block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(block.body, names)
            if below is not None and below.language == "text":
                assert alike(printed.getvalue(), below), printed.getvalue()
        elif block.language == "toml":
            write_file(block.body, Path())
        elif block.language == "bash":
            for line in commands(block.body):
                if not line.startswith(NOT_RUN):
                    act(re.sub(r"\s+# .*", "", line))


def alike(printed: str, shown: Block) -> bool:
    """Whether as many lines are printed as the page shows; numbers depend on the training."""
    return "…" in shown.body or len(printed.splitlines()) == len(shown.body.splitlines())


def act(line: str) -> None:
    """Run `anyformer ...` in this process, maybe after `echo ... |`; training takes few steps."""
    before, _, after = line.rpartition(" | ")
    program, *rest = shlex.split(after)
    assert program == "anyformer", line
    if rest[0] == "train" and "--dry-run" not in rest:
        rest += STEPS
    done = CliRunner().invoke(app, rest, input=" ".join(shlex.split(before)[1:]) + "\n" if before else None)
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
    assert done.output, line
