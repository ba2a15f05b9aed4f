"""Attention within short rows on a GPU: by `eager` in fp64, forward and backward, compiled or not, and its time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anyformer.attention.attend import attend, lower, mix, weigh
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import Layout, Role
from anyformer.attention.lowered import Dense, ShortRows
from anyformer.attention.position_module import Positions
from anyformer.attention.scores import Scoring
from anyformer.config import Causal, Full, NoPosition, Pattern, Window
from anyformer.kernels.dropout import keep_mask
from anyformer.kernels.runtime import Runtime

CUDA = torch.device("cuda")
TOLERANCE = 3e-2  # beside the largest value: a few roundings of bf16
PATTERNS: dict[str, Pattern] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(before=9, after=0),
    "both ways": Window(before=5, after=3),
}
SHAPES = [(3, 8, 8, 128, 64), (2, 8, 2, 100, 32), (5, 3, 3, 17, 64), (2, 4, 1, 65, 24), (300, 8, 8, 40, 64)]


def random(seed: int, *shape: int) -> Tensor:
    """Numbers that bf16 holds exactly, [b, heads, t, k] of memory [b, t, heads, k]."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.bfloat16().double().transpose(1, 2).to(CUDA)


def packed(seed: int, rows: int, length: int) -> Layout:
    """Documents of about nine tokens, and padding on the right of some rows."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.rand(rows, length, generator=generator) < 1 / 9
    segments = new.long().cumsum(1) - new[:, :1].long()
    ends = torch.randint(length // 2, 2 * length, (rows, 1), generator=generator)
    segments = segments.where(torch.arange(length) < ends, -1).to(CUDA)
    return Layout.packed_rows(segments, documents=rows * length)


def lowered_by(backend: str, pattern: Pattern, q: Layout, k: Layout, role: Role, width: int) -> ShortRows | Dense:
    at = Runtime("cuda", torch.bfloat16, training=True)
    found = lower(pattern, q, k, role, Positions(NoPosition(), 0, 1), Requirements(width, width), at, backend).lowered
    assert isinstance(found, ShortRows | Dense)
    assert isinstance(found, ShortRows) == (backend == "short")
    return found


def differentiate(
    run: Callable[..., Tensor], layout: Layout, shape: tuple[int, ...], s: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The output of real queries, and the gradients of queries, keys and values."""
    b, h, g, t, width = shape
    sizes = {"q": (b, t, h, width), "k": (b, s, g, width), "v": (b, s, g, width)}
    leaves = {n: random(i, *size).to(dtype).requires_grad_() for i, (n, size) in enumerate(sizes.items())}
    out = run(*leaves.values()) * (layout.segment_ids >= 0)[:, None, :, None].to(dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), random(6, b, t, h, width).to(dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def compare(ours: dict[str, Tensor], exact: dict[str, Tensor], measured: Callable[..., None]) -> None:
    errors = {}
    for name, x in ours.items():
        assert x.isfinite().all(), name
        errors[name] = float((x.double() - exact[name]).abs().max() / exact[name].abs().max().clamp(min=1e-6))
    measured(**errors)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_as_eager(name: str, compiled: bool, measured: Callable[..., None]):
    for i, shape in enumerate(SHAPES if not compiled else SHAPES[:2]):
        b, _, _, t, width = shape
        layout, scoring = packed(i, b, t), Scoring(width**-0.5)
        short, dense = (lowered_by(x, PATTERNS[name], layout, layout, "self", width) for x in ("short", "eager"))
        run = torch.compile(lambda q, k, v: attend(q, k, v, short, scoring), fullgraph=True) if compiled else None  # noqa: B023
        ours = differentiate(run or (lambda *x: attend(*x, short, scoring)), layout, shape, t, torch.bfloat16)  # noqa: B023
        exact = differentiate(lambda *x: attend(*x, dense, scoring), layout, shape, t, torch.float64)  # noqa: B023
        compare(ours, exact, measured)


def test_across(measured: Callable[..., None]):
    """Rows of another length, in which some targets have no source: these read zeros."""
    shape, s = (4, 8, 4, 120, 64), 77
    q, k = packed(1, 4, 120), packed(2, 4, s)
    short, dense = (lowered_by(x, Full(), q, k, "cross", 64) for x in ("short", "eager"))
    scoring = Scoring(0.125)
    ours = differentiate(lambda *x: attend(*x, short, scoring), q, shape, s, torch.bfloat16)
    exact = differentiate(lambda *x: attend(*x, dense, scoring), q, shape, s, torch.float64)
    compare(ours, exact, measured)
    alone = ~(q.segment_ids[:, :, None] == k.segment_ids[:, None]).any(2)
    assert alone.any()
    assert not ours["out"].transpose(1, 2)[alone].any()


def test_dropout(measured: Callable[..., None]):
    """Weights are dropped by the hash of a seed, alike in both passes."""
    shape, p = (3, 8, 4, 100, 64), 0.3
    layout, scoring = packed(3, 3, 100), Scoring(0.125)
    short, dense = (lowered_by(x, Causal(), layout, layout, "self", 64) for x in ("short", "eager"))

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights, seed = weigh(q, k, dense, scoring), torch.randint(2**31 - 1, (), device=CUDA, dtype=torch.int32)
        return mix(torch.where(keep_mask(weights, p, seed), weights / (1 - p), 0.0), v)

    torch.manual_seed(1)
    ours = differentiate(lambda *x: attend(*x, short, scoring._replace(dropout=p)), layout, shape, 100, torch.bfloat16)
    torch.manual_seed(1)
    compare(ours, differentiate(eager, layout, shape, 100, torch.float64), measured)


def timed(graph: torch.cuda.CUDAGraph) -> float:
    """Return the microseconds of a replay."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return 1e3 * began.elapsed_time(ended)


def test_time(measured: Callable[..., None]):
    """Microseconds of both passes beside `sdpa` with a mask: 128 packed rows of 128 tokens, 8 heads of 64."""
    layout, q = packed(4, 128, 128), random(0, 128, 128, 8, 64).bfloat16().requires_grad_()
    took = {}
    for backend in ("short", "sdpa"):
        lowered, graph = lowered_by(backend, Causal(), layout, layout, "self", 64), torch.cuda.CUDAGraph()

        def run(lowered: ShortRows | Dense = lowered) -> None:
            torch.autograd.grad(attend(q, q, q, lowered, Scoring(0.125)), q, q.detach())

        run()
        with torch.cuda.graph(graph):
            run()
        took[backend] = min(timed(graph) for _ in range(50))  # the shortest: other processes may share the GPU
    measured(short_us=took["short"], sdpa_us=took["sdpa"])
