"""Explanations name the kernel that a forward pass takes, and a reason."""

import pytest
import torch

from anyformer.attention import attend as attend_file
from anyformer.attention.explain import explain
from anyformer.config import Attention, Causal, Window
from anyformer.kernels.runtime import Runtime

SPEC = Attention(heads=12)


@pytest.mark.parametrize(
    ("kernel", "device", "sizes", "training"),
    [
        ("sdpa", "cpu", (8, 1024, 0), True),
        ("sdpa", "cpu", (1, 1, 1024), False),
        ("sdpa", "cuda", (8, 1024, 0), True),
        ("decode", "cuda", (1, 1, 1024), False),
        ("sdpa", "cuda", (1, 512, 1024), False),
    ],
)
def test_a_layer_of_gpt2(
    kernel: str, device: str, sizes: tuple[int, int, int], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_file, "HAS_TRITON", True)
    choice = explain(SPEC, 768, Causal(), Runtime(device, torch.bfloat16, training), *sizes)
    assert choice.kernel == kernel
    assert choice.reason


def test_a_long_window_takes_flex() -> None:
    choice = explain(SPEC, 768, Window(before=100, after=0), Runtime("cuda", torch.bfloat16, True), 1, 4096)
    assert choice[:2] == ("flex", "a mask between many tokens")
