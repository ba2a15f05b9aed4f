"""Experts in a step that is captured as a CUDA graph, simulated on a CPU: nothing is read on the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anyformer import presets
from anyformer.config import Experts, Gated
from anyformer.generation import buffers
from anyformer.generation.beam_search import beam_search
from anyformer.generation.buffers import DecodeBuffers
from anyformer.kernels import expert_matmul as kernels
from anyformer.kernels.cuda_graph import for_capture
from anyformer.kernels.expert_matmul import MAX_GATHERED_ROWS, ExpertRows, expert_matmul
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.quantise import quantise
from anyformer.nn.transforms.rounding import Bits, RoundedFormat, round_off
from tests.nn.small_experts import NOWHERE
from tests.strategies import seeds


@contextmanager
def unread() -> Iterator[None]:
    """No values may be read."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("values are read on the host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", refuse)
        yield


def build(bits: Bits | None) -> torch.nn.Module:
    """The sizes of the smallest deepseek in tests on a GPU, with fewer experts."""
    torch.manual_seed(0)
    mixture = Experts(count=8, top_k=6, expert=Gated(width=44, bias=True), shared=1).build(64).eval()
    for x in mixture.parameters():
        torch.nn.init.normal_(x, std=0.2)
    if bits is not None:
        for layer in (mixture.up, mixture.down):
            rounded = round_off(layer.weight.detach(), bits, 32)
            layer.weight, layer.format = None, RoundedFormat(rounded, torch.float32)
    return mixture


@pytest.mark.parametrize("kernel", ["loop", "opaque_loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(
    seed=seeds,
    count=st.integers(1, 9),
    sizes=st.tuples(st.integers(0, 150), st.integers(1, 20), st.integers(1, 20)),
    used=st.integers(1, 9),
)
def test_all_rows_by_all_experts_equal_the_loop(
    kernel: Any, dtype: torch.dtype, seed: int, count: int, sizes: tuple[int, int, int], used: int
):
    """Also where experts read nothing."""
    torch.manual_seed(seed)
    rows, inputs, outputs = sizes
    x, weight = torch.randn(rows, inputs, dtype=dtype), torch.randn(count, outputs, inputs, dtype=dtype)
    of = (torch.randint(0, used, (rows,)) % count).sort().values
    of_experts = ExpertRows(of, of.bincount(minlength=count))
    exact = expert_matmul(x, weight, of_experts, "loop")
    with for_capture(), unread():
        ours = expert_matmul(x, weight, of_experts, kernel)
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("bits", [None, 8, 4])
@torch.no_grad()
def test_a_mixture_reads_nothing_on_the_host(bits: Bits | None, tokens: int):
    """A tensor without values raises where one is needed."""
    mixture, x = build(bits), torch.randn(tokens, 1, 64)
    exact = mixture(x, NOWHERE)
    with for_capture():
        torch.testing.assert_close(mixture(x, NOWHERE), exact)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert mixture(mode.from_tensor(x), NOWHERE).shape == x.shape


@pytest.mark.parametrize("bits", [None, 4])
@torch.no_grad()
def test_compiled_for_a_capture(bits: Bits | None):
    """The call that compiles runs the same kernels."""
    mixture, x = build(bits), torch.randn(12, 1, 64)
    exact = mixture(x, NOWHERE)
    torch._dynamo.reset()
    call = torch.compile(mixture, backend="aot_eager", fullgraph=True)
    for stance in ("default", "fail_on_recompile"):
        with for_capture(), unread(), torch.compiler.set_stance(stance):
            torch.testing.assert_close(call(x, NOWHERE), exact)
    torch.testing.assert_close(call(x, NOWHERE), exact)  # not captured: compiled again
    torch._dynamo.reset()


@pytest.mark.parametrize("bits", [None, 8])
def test_beams_read_nothing_on_the_host_in_a_step(bits: Bits | None, monkeypatch: pytest.MonkeyPatch):
    """3 texts, 4 beams and 6 experts: more rows than are gathered on a GPU."""
    torch.manual_seed(0)
    model = Transformer(presets.deepseek(depth=2, width=64, heads=4, vocab=97)).double().eval()
    for x in model.parameters():
        x.data.mul_(6 if x.dim() > 1 else 1)
    if bits is not None:
        model = quantise(model, bits, way="plain")
    ids = torch.randint(3, 97, (3, 7), generator=torch.Generator().manual_seed(1))
    exact, keys = beam_search(model, ids, beams=4, max_new_tokens=6), []

    def run(self: DecodeBuffers, key: Any, function: Callable[[], Any]) -> Any:
        keys.append(key)
        with for_capture(), unread():
            return function()

    monkeypatch.setattr(buffers, "captures", lambda device: True)
    monkeypatch.setattr(DecodeBuffers, "run", run)
    ours = beam_search(model, ids, beams=4, max_new_tokens=6)
    assert len(keys) >= 5
    assert torch.equal(ours.ids, exact.ids)
    torch.testing.assert_close(ours.scores, exact.scores)


@pytest.mark.parametrize(
    ("dtype", "width", "major", "rows", "kernel"),
    [
        (torch.bfloat16, 64, 9, 72, "grouped_mm"),
        (torch.bfloat16, 64, 10, 72, "grouped_mm"),
        (torch.bfloat16, 64, 8, 72, "loop"),  # where grouped_mm is a loop of torch
        (torch.bfloat16, 64, 12, MAX_GATHERED_ROWS, "gather"),
        (torch.bfloat16, 44, 9, 72, "loop"),  # rows of 88 bytes
        (torch.float32, 64, 9, 72, "loop"),
        (torch.float32, 64, 9, MAX_GATHERED_ROWS, "gather"),
    ],
)
@torch.no_grad()
def test_kernels_on_a_gpu(
    dtype: torch.dtype, width: int, major: int, rows: int, kernel: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    size = torch.empty(0, dtype=dtype).element_size()
    x: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=dtype, shape=(rows, width), element_size=lambda: size, is_cuda=True
    )
    weight: Any = SimpleNamespace(shape=(8, 64, width))
    assert kernels._choose_kernel(x, weight) == kernel
