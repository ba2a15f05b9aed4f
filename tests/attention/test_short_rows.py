"""Attention within short rows: when it is chosen, and that it equals `eager`, with its gradients and its dropout.

The kernels run in Triton's interpreter (TRITON_INTERPRET=1); `tests/gpu/test_short_rows.py` runs them on a GPU.
"""

import os
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from anyformer.attention import attend as attend_file
from anyformer.attention.attend import attend, choose, lower_dense, mix, weigh
from anyformer.attention.choose import SHORT_MAX_MASKLESS_ROW, Requirements
from anyformer.attention.layout import Layout, Role, make_layout
from anyformer.attention.scores import Scoring
from anyformer.attention.short_rows import MAX_ROW, lower_short_rows, short_rows
from anyformer.config import Causal, Full, NoPosition, Pattern, T5Bias, Window
from anyformer.config.position import Position
from anyformer.kernels import short_rows as kernels
from anyformer.kernels.conventions import PADDING
from anyformer.kernels.dropout import keep_mask
from anyformer.kernels.runtime import Runtime

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
HERE, CPU = Runtime("cuda", torch.bfloat16, training=True), torch.device("cpu")
PLAIN = Requirements(64, 64)
PACKED, LONG = (
    Layout.packed_rows((torch.arange(length) // 50).expand(2, -1), documents=6) for length in (MAX_ROW, MAX_ROW + 1)
)
MARKED = PACKED._replace(marks=torch.zeros(2, MAX_ROW, dtype=torch.long))
NONE = NoPosition()


@pytest.mark.parametrize(
    ("kernel", "pattern", "layout", "role", "scheme", "needs", "runtime"),
    [
        ("short", Causal(), PACKED, "self", NONE, PLAIN, HERE),
        ("short", Full(), PACKED, "cross", NONE, PLAIN._replace(dropout=True), HERE),
        ("short", Window(before=9, after=0), make_layout(1, 64, CPU), "self", NONE, PLAIN, HERE),
        ("short", Full(), PACKED._replace(ordered=False), "self", NONE, PLAIN, HERE._replace(training=False)),
        ("short", Causal(), make_layout(2, SHORT_MAX_MASKLESS_ROW, CPU), "self", NONE, PLAIN, HERE),
        (
            "sdpa",
            Causal(),
            make_layout(2, SHORT_MAX_MASKLESS_ROW + 1, CPU),
            "self",
            NONE,
            PLAIN,
            HERE,
        ),  # no mask is needed
        ("sdpa", Causal(), LONG, "self", NONE, PLAIN, HERE),
        ("sdpa", Causal(), PACKED, "cached", NONE, PLAIN, HERE),
        ("sdpa", Causal(), PACKED, "cross", NONE, PLAIN, HERE),
        ("sdpa", Causal(), PACKED._replace(ordered=False), "self", NONE, PLAIN, HERE),
        ("sdpa", Causal(), PACKED._replace(documents=None), "self", NONE, PLAIN, HERE),
        ("sdpa", Causal(), MARKED, "self", NONE, PLAIN, HERE),
        ("sdpa", Window(before=9, after=0, globals=1), PACKED, "self", NONE, PLAIN, HERE),
        ("sdpa", Causal(), PACKED, "self", T5Bias(), PLAIN, HERE),
        ("sdpa", Causal(), PACKED, "self", NONE, PLAIN._replace(value_width=32), HERE),
        ("sdpa", Causal(), PACKED, "self", NONE, Requirements(128, 128), HERE),
        ("sdpa", Causal(), PACKED, "self", NONE, PLAIN, HERE._replace(device="cpu")),
        ("sdpa", Causal(), PACKED, "self", NONE, PLAIN, HERE._replace(dtype=torch.float16)),
        ("eager", Causal(), PACKED, "self", NONE, PLAIN._replace(cap=1.0), HERE),
    ],
)
def test_the_kernel_that_is_chosen(
    kernel: str,
    pattern: Pattern,
    layout: Layout,
    role: Role,
    scheme: Position,
    needs: Requirements,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(attend_file, "HAS_TRITON", True)
    problem = "auto", pattern, layout, layout, role, scheme, needs, runtime
    assert choose(*problem).kernel != "short"  # outside of the compiler
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose(*problem).kernel == kernel
    with torch.no_grad():
        assert choose(*problem).kernel != "short"


def test_torch_func_cannot_transform_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attend_file, "HAS_TRITON", True)

    def request(x: Tensor) -> Tensor:
        choice = choose("short", Full(), PACKED, PACKED, "self", NONE, PLAIN, HERE)
        assert choice[:2] == ("sdpa", "not short: torch.func cannot transform it")
        return x

    torch.func.vmap(request)(torch.zeros(2))


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("crosses", [False, True])
def test_one_graph(crosses: bool):
    """Without a kernel: torch 2.13 cannot trace a custom function whose inputs are the same tensor."""
    pattern = Full()

    def attended(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
        layout = Layout.packed_rows(segments, documents=2)
        keys = Layout.packed_rows(segments, documents=2) if crosses else layout
        rows = lower_short_rows(pattern, layout, keys, lambda: lower_dense(pattern, layout, keys, "self"))
        return short_rows(q, k, v, rows, 0.25, 0.1).sum()

    with FakeTensorMode():
        leaves = [torch.zeros(2, 2, 64, 16, requires_grad=True) for _ in range(3)]
        compiled = torch.compile(attended, backend="aot_eager", fullgraph=True)
        compiled(*leaves, torch.zeros(2, 64, dtype=torch.long)).backward()
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)


def test_recomputed_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch):
    """Without a kernel: a checkpoint computes saved tensors again when they are read, once."""
    monkeypatch.setattr(kernels, "attend_rows", kernels._like)
    monkeypatch.setattr(kernels, "attend_rows_backward", kernels._like_projections)
    rows = lower_short_rows(Full(), PACKED, PACKED, lambda: lower_dense(Full(), PACKED, PACKED, "self"))

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return short_rows(q, k, v, rows, 0.25, 0.0)

    leaves = [torch.zeros(2, 2, MAX_ROW, 16, requires_grad=True) for _ in range(3)]
    checkpoint(attended, *leaves, use_reentrant=False).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)


@st.composite
def segmented(draw: st.DrawFn, rows: int, length: int) -> Tensor:
    """Rows of documents in order, numbered from 0, of any number of tokens, with padding on the right."""
    numbers = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    found = torch.tensor([sorted(draw(numbers)) for _ in range(rows)])
    return found.where(found < 3, PADDING)


@st.composite
def layouts(draw: st.DrawFn, rows: int, length: int) -> Layout:
    """Documents that the layout knows, or any segments: padding between tokens, several runs of one segment."""
    if draw(st.booleans()):
        return Layout.packed_rows(draw(segmented(rows, length)), documents=3 * rows)
    return make_layout(rows, length, CPU, segments=draw(tensors(rows, length)))


def tensors(rows: int, length: int) -> st.SearchStrategy[Tensor]:
    numbers = st.lists(st.integers(-1, 1), min_size=length, max_size=length)
    return st.lists(numbers, min_size=rows, max_size=rows).map(torch.tensor)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_as_eager(data: st.DataObject):
    """Outputs of real queries, and gradients, for any documents, window, heads, width and share of dropped weights.

    In cross-attention a query may have no key.
    """
    draw = data.draw
    b, g, repeat = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    t, width, dropout = (
        draw(st.integers(1, 100)),
        draw(st.sampled_from([8, 16, 24, 32])),
        draw(st.sampled_from([0.0, 0.3])),
    )
    crosses = draw(st.booleans())
    pattern: Pattern = Full()
    if crosses:
        s = draw(st.integers(1, 40))
        q, k = (draw(layouts(b, n)) for n in (t, s))
    else:
        s, pattern = t, draw(st.sampled_from([Full(), Causal(), Window(before=3, after=0), Window(before=2, after=1)]))
        q = k = make_layout(b, t, CPU) if draw(st.booleans()) else draw(layouts(b, t))
    role: Role = "cross" if crosses else "self"
    with patch.object(attend_file, "HAS_TRITON", True):
        assume(choose("short", pattern, q, k, role, NONE, Requirements(width, width), HERE).kernel == "short")
    h = g * repeat
    leaves = [random(0, b, t, h, width), random(1, b, s, g, width), random(2, b, s, g, width)]
    for leaf in leaves:
        leaf.requires_grad_()
    lowered = lower_short_rows(pattern, q, k, lambda: lower_dense(pattern, q, k, role))
    scoring, is_real = Scoring(width**-0.5), (q.segment_ids >= 0).expand(b, t)[:, None, :, None]
    slopes = random(3, b, t, h, width) * is_real
    torch.manual_seed(5)
    found = attend(*leaves, lowered, scoring._replace(dropout=dropout))
    torch.manual_seed(5)
    weights = weigh(*leaves[:2], lowered, scoring)
    if dropout:
        kept = keep_mask(weights, dropout, torch.randint(2**31 - 1, (), dtype=torch.int32))
        weights = torch.where(kept, weights / (1 - dropout), 0.0)
    expected = mix(weights, leaves[2])
    torch.testing.assert_close(found * is_real, expected * is_real, rtol=1e-4, atol=1e-5)
    grads = (torch.autograd.grad((out * slopes).sum(), leaves) for out in (found, expected))
    for ours, eager in zip(*grads, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
