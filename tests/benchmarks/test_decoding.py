"""The ways to decode that are timed beside each other say the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import decoding
from benchmarks.sheet import Way, agree, same

SIZES = {"depth": 2, "width": 32, "heads": 2, "vocab": 64, "rows": 2, "new": 6}
WORK: dict[str, tuple[Callable[..., tuple[int, dict[str, Way]]], dict[str, Any]]] = {
    "gpt2": (decoding.gpt2, {"prompt": 8}),
    "llama": (decoding.llama, {"prompt": 8, "kv_heads": 1, "ff": 64}),
    "greedy": (decoding.base, {"source": 8, "ff": 64, "beams": 1}),
    "beams": (decoding.base, {"source": 8, "ff": 64, "beams": 4}),
}


@pytest.mark.parametrize("name", WORK)
def test_they_begin_with_one_loss_and_say_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for what in ("generate", "beam_search"):  # without a compiler, which would take most of the time
        whole = getattr(decoding, what)
        monkeypatch.setattr(decoding, what, lambda *args, whole=whole, **how: whole(*args, **{**how, "compile": False}))
    build, sizes = WORK[name]
    _, ways = build(**SIZES, **sizes)
    pair = {name: ways[name] for name in ("ours", "transformers")}
    first = {name: way.first() for name, way in pair.items() if way.first}
    assert len(first) == 2
    assert agree(first) is True
    said = {name: way.make()() for name, way in pair.items()}
    assert said["ours"].shape == (SIZES["rows"], SIZES["new"])
    assert same(said) == {"transformers": 1.0}


def test_other_ids_are_told() -> None:
    assert same({"ours": torch.tensor([[1, 2]]), "other": torch.tensor([[1, 3]])}) == {"other": 0.5}
