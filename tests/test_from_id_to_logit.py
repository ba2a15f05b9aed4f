"""The page docs/from-id-to-logit.md names the functions that a token passes through, in the order of their calls."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import anyformer as af
from tests.pages import ROOT

PAGE = (ROOT / "docs" / "from-id-to-logit.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
Step = tuple[str, str]


def called(work: Callable[[], Any]) -> list[Step]:
    """File and name of each function of the package, in the order of their first calls."""
    package, seen = Path(af.__file__).parent.as_posix() + "/", dict[Step, None]()

    def hook(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename).as_posix()
        if event == "call" and file.startswith(package):
            seen.setdefault((file.removeprefix(package), frame.f_code.co_qualname))

    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return list(seen)


def steps(heading: str) -> list[Step]:
    """The rows of the table below a heading."""
    found = [(row[1], row[2]) for row in ROW.finditer(PAGE.split(f"## {heading}\n")[1].split("\n## ")[0])]
    assert len(found) > 5
    return found


@pytest.fixture
def llama() -> af.Transformer:
    return af.Transformer(af.presets.llama(depth=2, width=16, heads=4, kv_heads=2, vocab=9)).eval()


def test_a_forward_pass(llama: af.Transformer) -> None:
    order = called(lambda: llama(torch.randint(0, 9, (2, 5))))
    assert [step for step in order if step in steps("A forward pass")] == steps("A forward pass")


@torch.no_grad()
def test_a_further_token(llama: af.Transformer) -> None:
    cache = llama.new_cache(2, 6)
    llama(torch.randint(0, 9, (2, 5)), cache=cache)
    order = called(lambda: llama.decode(torch.randint(0, 9, (2, 1)), cache=cache))
    assert [step for step in order if step in steps("A further token")] == steps("A further token")
