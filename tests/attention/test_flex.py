"""FlexAttention: its blocks by brute force, its results by `eager`. The compiled kernels are in `tests/gpu`."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from anyformer.attention import flex
from anyformer.attention.attend import attend, choose, lower, lower_dense, weigh
from anyformer.attention.choose import VARLEN_MIN_ROW, Requirements
from anyformer.attention.layout import Layout, Role, make_layout, sees
from anyformer.attention.lowered import Blocks, Dense
from anyformer.attention.position_module import Positions
from anyformer.attention.scores import Scoring
from anyformer.attention.varlen import lower_documents
from anyformer.config import BigBird, BlockLocal, Causal, Dilated, Full, ModelConfig, Pattern, Window, pairs
from anyformer.kernels.runtime import Runtime
from tests.attention.test_attend import random
from tests.attention.test_layout import CPU, pairs as two_layouts, patterns, rows_in
from tests.strategies import PATTERNS, RELATIVE, build, close, models, seeds, tokens

HERE = Runtime("cpu", torch.float64, training=False)
BIASES = tuple(scheme for scheme in RELATIVE if scheme.biases() or scheme.kind == "none")  # rotary acts before kernels
SMALL = (4, 2)  # tokens in a block, so that a few tokens are several; the second fits blocks of the patterns


@contextmanager
def in_tiles(size: int) -> Iterator[None]:
    """Blocks of so many tokens, whatever the pattern."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Pattern, BlockLocal, BigBird):
            patch.setattr(kind, "tile", property(lambda pattern: size))
        patch.setattr(flex, "_arange_mask", flex._arange_mask.__wrapped__)  # cached masks have the real sizes
        yield


@pytest.fixture(autouse=True)
def _plainly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's own reference in place of a compiled kernel."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.no_grad():
        yield


def real_rows(layout: Layout, batch: int) -> Tensor:
    shape = batch, layout.positions.shape[1]
    return torch.ones(shape, dtype=torch.bool) if layout.segments is None else layout.segments.expand(shape) >= 0


def in_blocks(x: Tensor, size: int) -> Tensor:
    """[b, t, s] -> [b, blocks, size, blocks, size], nothing visible past the end."""
    x = F.pad(x, (0, -x.shape[2] % size, 0, -x.shape[1] % size))
    return x.unflatten(2, (-1, size)).unflatten(1, (-1, size))


def check_blocks(pattern: Pattern, q: Layout, k: Layout, size: int) -> None:
    batch = rows_in(q, k)
    visible = sees(pattern, q, k).expand(batch, -1, -1)
    visible = in_blocks(visible & real_rows(q, batch)[:, :, None] & real_rows(k, batch)[:, None, :], size)
    listed, full = (x.expand(batch, -1, -1) for x in flex.find_blocks(pattern, q, k))
    assert not (visible.any(4).any(2) & ~listed).any()
    assert not (full & ~visible.all(4).all(2)).any()
    assert not (full & ~listed).any()


@given(patterns, two_layouts)
def test_blocks_by_brute_force(pattern: Pattern, pair: tuple[Layout, Layout]):
    """Every block that holds a visible pair of real tokens is listed, and a full block is full."""
    for size in SMALL:
        with in_tiles(size):
            check_blocks(pattern, *pair, size)


LONG: tuple[Pattern, ...] = (
    Window(before=100, after=0),
    Window(before=100, after=30, globals=3),
    Dilated(before=3, after=1, step=90),
    BlockLocal(size=200),
    BlockLocal(size=128, ahead=False),
    BigBird(block=64, randoms=1),
    BigBird(block=64, randoms=3, globals=2, ahead=False),
    BigBird(block=50, randoms=2, ahead=False),
)


@pytest.mark.parametrize("pattern", LONG, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_of_the_real_size(pattern: Pattern, packed: bool):
    """Where rows are plain no block is listed in vain, and `count` knows them."""
    t, size = 1300, pattern.tile
    segments = torch.tensor([[0] * 300 + [1] * 700 + [-1] * 300, [-1] * 200 + [0] * 1100]) if packed else None
    layout = make_layout(2, t, CPU, segments=segments)
    check_blocks(pattern, layout, layout, size)
    if not packed:
        listed, _ = flex.find_blocks(pattern, layout, layout)
        visible = in_blocks(sees(pattern, layout, layout), size).any(4).any(2)
        assert torch.equal(listed, visible)
        sizes = torch.tensor([size] * (t // size) + [t % size])
        assert pairs(pattern, t, t) == int((listed[0] * sizes[:, None] * sizes).sum())


@pytest.mark.parametrize(
    ("pattern", "tile"),
    [
        (Window(before=64, after=0), 128),
        (BigBird(), 64),
        (BigBird(block=128), 128),
        (BigBird(block=192), 64),
        (BigBird(block=32), 128),
        (BlockLocal(size=64), 64),
    ],
    ids=str,
)
def test_tiles_follow_the_blocks_of_a_pattern(pattern: Pattern, tile: int):
    """Then no block is seen in part, and the predicate is never asked; what it would say of each is known."""
    assert pattern.tile == tile
    layout = make_layout(1, 1536, CPU)
    listed, full = flex.find_blocks(pattern, layout, layout)
    if isinstance(pattern, (BigBird, BlockLocal)) and pattern != BigBird(block=32):
        assert torch.equal(listed, full)
        assert 0 < int(full.sum()) < full.numel()


def test_a_sparse_pattern_costs_a_fixed_part_of_each_token():
    """The share of blocks that are listed falls with the length; of a causal pattern it stays a half."""
    for pattern in LONG:
        short, long = (pairs(pattern, t, t) / t for t in (8192, 16384))
        assert long == pytest.approx(short, rel=0.6 if isinstance(pattern, BigBird) else 0.05)
    assert pairs(Causal(), 64, 64) == pairs(Full(), 64, 64) == 64 * 64


# -- results ----------------------------------------------------------------------------------------------------------


def check(
    pattern: Pattern, q: Layout, k: Layout, role: Role, positions: Positions, seed: int, cap: float | None, sunk: bool
) -> None:
    """flex = eager where queries are real, with grouped heads and values of another width than keys."""
    batch, t, s = rows_in(q, k), q.positions.shape[1], k.positions.shape[1]
    needs = Requirements(4, 3, cap=cap, sinks=sunk)
    lowered = lower(pattern, q, k, role, positions, needs, HERE, "flex").lowered
    assert isinstance(lowered, Blocks)
    dense = lower(pattern, q, k, role, positions, needs, HERE, "eager").lowered
    a, b, c = random(seed, batch, 4, t, 4), random(seed + 1, batch, 2, s, 4), random(seed + 2, batch, 2, s, 3)
    scoring = Scoring(0.7, cap=cap, sinks=random(seed + 3, 4) if sunk else None)
    expected = attend(a, b, c, dense, scoring)
    real = real_rows(q, batch)[:, None, :, None].expand_as(expected)
    close(attend(a, b, c, lowered, scoring)[real], expected[real])
    close(weigh(a, b, lowered, Scoring(0.7)), weigh(a, b, dense, Scoring(0.7)))  # the dense form on demand


def placed(position, seed: int) -> Positions:
    positions = Positions(position, 8, 4).double()
    for table in positions.tables.values():
        table.copy_(random(seed, *table.shape))
    return positions


def segments(*rows: list[int]) -> Layout:
    return make_layout(len(rows), len(rows[0]), CPU, segments=torch.tensor(rows))


MARKS = torch.tensor([[1, 0, 0, 0, 2, 0, 0, 1, 0, 0]])
LAYOUTS = {
    "plain": make_layout(1, 10, CPU),
    "right": segments([0] * 10, [0] * 4 + [-1] * 6),
    "counted": Layout.right_padded(torch.tensor([[0] * 10, [0] * 4 + [-1] * 6])),
    "left": segments([0] * 10, [-1] * 7 + [0] * 3),
    "packed": segments([0] * 3 + [1] * 6 + [2], [5] * 5 + [6] * 4 + [-1]),
    "marked": make_layout(1, 10, CPU, marks=MARKS),
    "grouped": make_layout(1, 10, CPU, marks=torch.tensor([[0, -1, -1, -1, 0, 1, -2, -2, -2, -1]])),
    "moved": make_layout(1, 10, CPU, positions=torch.arange(10)[None] + 7),
}


BLOCKED = [pattern for pattern in PATTERNS if isinstance(pattern, (BigBird, BlockLocal))]


@pytest.mark.parametrize(("pattern", "size"), [*product(PATTERNS, SMALL[:1]), *product(BLOCKED, SMALL[1:])], ids=str)
def test_flex_equals_eager(pattern: Pattern, size: int):
    """With every scheme that acts on scores, for rows padded on either side, packed and marked; across, too."""
    with in_tiles(size):
        check_all(pattern)


def check_all(pattern: Pattern) -> None:
    for seed, position in enumerate(BIASES):
        for name, layout in LAYOUTS.items():
            cap, sunk = (None, False) if name in ("plain", "left") else (0.8, True)
            check(pattern, layout, layout, "self", placed(position, seed), seed, cap, sunk)
    check(
        pattern,
        LAYOUTS["packed"],
        segments([0] * 6 + [2], [5, 5, 6, -1, -1, -1, -1]),
        "cross",
        placed(BIASES[0], 0),
        3,
        None,
        True,
    )
    check(pattern, LAYOUTS["plain"], make_layout(1, 3, CPU), "cross", placed(BIASES[0], 0), 4, 0.8, False)


@given(models(), seeds)
def test_whole_models(config: ModelConfig, seed: int):
    """With padding; layers that flex cannot run fall to others."""
    model, ids = build(config, seed), tokens(seed, 2, 6)
    segments = torch.tensor([[0, 0, 0, 0, 0, 0], [-1, -1, 0, 0, 0, 0]])
    args, name = ((ids, ids), "target_segments") if config.shape == "encoder-decoder" else ((ids,), "segments")
    outs = []
    for model.backend in ("eager", "flex"):
        with in_tiles(SMALL[0]):
            outs.append(model(*args, **{name: segments})[segments >= 0])
    close(outs[1], outs[0])


# -- choosing ---------------------------------------------------------------------------------------------------------

CUDA = Runtime("cuda", torch.bfloat16, training=True)


def packed(length: int) -> Layout:
    return Layout.packed_rows(torch.zeros(1, length, dtype=torch.long), documents=1)


ROW, PACKED = make_layout(1, 2048, CPU), packed(2048)
PADDED = Layout.right_padded(torch.zeros(1, 2048, dtype=torch.long))
PLAIN = Requirements(64, 64)


@pytest.mark.parametrize(
    ("kernel", "pattern", "layout", "needs", "runtime", "position"),
    [
        ("sdpa", Causal(), ROW, PLAIN, CUDA, "none"),
        ("sdpa", Causal(), PADDED, PLAIN, CUDA, "none"),
        ("flex", Causal(), ROW, PLAIN, CUDA, "alibi"),
        ("flex", Causal(), ROW, PLAIN._replace(cap=1.0), CUDA, "none"),
        ("eager", Causal(), ROW, PLAIN._replace(cap=1.0, key_width=8), CUDA, "none"),
        ("flex", Window(before=9, after=0), ROW, PLAIN, CUDA, "none"),
        ("sdpa", Window(before=9, after=0), make_layout(1, 64, CPU), PLAIN, CUDA, "none"),
        ("sdpa", Window(before=9, after=0), ROW, PLAIN._replace(dropout=True), CUDA, "none"),
        ("flex", Window(before=9, after=0), ROW, PLAIN._replace(dropout=True), CUDA._replace(training=False), "none"),
        ("sdpa", Window(before=9, after=0), ROW, PLAIN, CUDA._replace(device="cpu"), "none"),
        ("sdpa", Window(before=9, after=0), ROW, PLAIN, CUDA._replace(dtype=torch.float64), "none"),
        ("eager", Window(before=9, after=0), ROW, PLAIN._replace(normalizer="relu"), CUDA, "none"),
        ("varlen", Full(), PADDED, PLAIN, CUDA, "none"),
        ("varlen", Causal(), PACKED, PLAIN, CUDA, "rotary"),
        ("varlen", Causal(), packed(VARLEN_MIN_ROW), PLAIN, CUDA, "none"),
        ("sdpa", Causal(), packed(VARLEN_MIN_ROW - 1), PLAIN, CUDA, "none"),
        ("varlen", Window(before=9, after=0), PACKED, PLAIN, CUDA, "none"),
        ("flex", Window(before=9, after=0, globals=1), PACKED, PLAIN, CUDA, "none"),
        ("flex", Causal(), PACKED, PLAIN, CUDA, "t5"),
        ("flex", Causal(), PACKED, PLAIN, CUDA._replace(dtype=torch.float32), "none"),
        ("flex", Causal(), PACKED._replace(documents=None), PLAIN, CUDA, "none"),
        ("flex", Causal(), PACKED, PLAIN._replace(value_width=32), CUDA, "none"),
    ],
)
def test_the_kernel_that_is_chosen(
    kernel: str, pattern: Pattern, layout: Layout, needs: Requirements, runtime: Runtime, position
):
    scheme = next(scheme for scheme in RELATIVE if scheme.kind == position)
    choice = choose("auto", pattern, layout, layout, "self", scheme, needs, runtime)
    assert choice.kernel == kernel
    assert choice.reason


@pytest.mark.parametrize("backend", ["flash", "", "SDPA"])
def test_an_unknown_backend(backend: str):
    with pytest.raises(
        ValueError, match=r"backend = .*must be 'auto', 'eager', 'sdpa', 'short', 'flex', 'varlen' or 'decode'"
    ):
        choose(backend, Full(), ROW, ROW, "self", RELATIVE[0], PLAIN, HERE)


def test_what_cannot_run_falls_to_what_can():
    """No backward pass on the CPU, so with gradients `flex` is `sdpa`, and says why."""
    with torch.enable_grad():
        choice = choose("flex", Causal(), ROW, ROW, "self", RELATIVE[0], PLAIN, HERE)
    assert choice[:2] == ("sdpa", "not flex: it has no backward pass on the CPU")
    assert choose("varlen", Causal(), PACKED, PACKED, "self", RELATIVE[0], PLAIN, HERE).kernel == "sdpa"


def test_documents():
    """Where each document begins: a run of pads is one more, and empty ones end the list."""
    segments = torch.tensor([[0, 0, 1, 1, 1, -1], [4, 4, 4, 4, 5, 6]])
    layout = Layout.packed_rows(segments, documents=6)
    found = lower_documents(Causal(), layout, layout, Dense)
    assert found.starts.tolist() == [0, 2, 5, 6, 10, 11, 12, 12, 12]
    assert found.key_starts is found.starts
    assert (found.longest, found.window) == (6, (-1, 0))


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4), min_size=1, max_size=3))
def test_documents_of_two_texts(rows: list[list[tuple[int, int]]]):
    """The n-th document of one is the n-th of the other, empty or not, and pads see pads: as segments say."""
    sides = []
    for side in (0, 1):
        width = max(1, max(sum(pair[side] for pair in row) for row in rows)) + side
        filled = [[i for i, pair in enumerate(row) for _ in range(pair[side])] for row in rows]
        segments = torch.tensor([row + [-1] * (width - len(row)) for row in filled])
        sides.append(Layout.packed_rows(segments, documents=sum(map(len, rows))))
    q, k = sides
    found = lower_documents(Full(), q, k, Dense)
    assert len(found.starts) == len(found.key_starts)
    assert found.starts[-1] == q.positions.numel()
    assert found.key_starts[-1] == k.positions.numel()
    mask = torch.zeros(q.positions.numel(), k.positions.numel(), dtype=torch.bool)
    starts, keys = found.starts.tolist(), found.key_starts.tolist()
    for n in range(len(starts) - 1):
        mask[starts[n] : starts[n + 1], keys[n] : keys[n + 1]] = True
    wanted = torch.block_diag(*sees(Full(), q, k).float()).bool()
    assert torch.equal(mask, wanted)


def test_a_graph_is_message_passing():
    """Each node takes the average of its neighbours' values, weighted by the softmax of its scores to them."""
    from anyformer.config import Graph

    edges = ((0, 3), (1, 0), (1, 2), (3, 1), (4, 4))
    q, k, v = (random(i, 1, 1, 5, 3) for i in range(3))
    layout = make_layout(1, 5, CPU)
    for loops in (False, True):
        dense = lower_dense(Graph(nodes=5, edges=edges, loops=loops), layout, layout, "self")
        out = attend(q, k, v, dense, Scoring(1.0))[0, 0]
        for node in range(5):
            near = sorted({b for a, b in edges if a == node} | ({node} if loops else set()))
            weights = (torch.stack([q[0, 0, node] @ k[0, 0, n] for n in near]) if near else torch.zeros(0)).exp()
            total = sum((w * v[0, 0, n] for w, n in zip(weights, near, strict=True)), torch.zeros(3, dtype=v.dtype))
            close(out[node], total / weights.sum() if near else total)


def test_steps_share_the_blocks_of_whole_rows():
    """They depend on nothing but the lengths; padding, packing and marks are asked each time."""
    pattern, (row, again) = BigBird(block=64, randoms=2), (make_layout(1, 300, CPU) for _ in range(2))
    first = flex.lower_blocks(pattern, row, row, Dense)
    assert flex.lower_blocks(pattern, again, again, Dense).mask is first.mask
    assert flex.lower_blocks(pattern, *[make_layout(1, 301, CPU)] * 2, Dense).mask is not first.mask
    padded = Layout.right_padded(torch.tensor([[0] * 200 + [-1] * 100]))
    assert (
        flex.lower_blocks(pattern, padded, padded, Dense).mask
        is not flex.lower_blocks(pattern, padded, padded, Dense).mask
    )
    with torch.inference_mode():
        assert flex.lower_blocks(pattern, row, row, Dense).mask is not first.mask
    assert not first.mask.kv_indices.is_inference()


def test_links_are_one_step_for_a_compiler():
    """Written into one another, the steps of their hash take minutes; what is found is the same."""
    pattern, steps = BigBird(block=64, randoms=3), []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        steps.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def blocks(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layout = make_layout(*ids.shape, ids.device)
        return flex.find_blocks(pattern, layout, layout)

    ids = torch.zeros(1, 1024, dtype=torch.long)
    found = torch.compile(blocks, backend=count, fullgraph=True)(ids)
    assert all(torch.equal(a, b) for a, b in zip(found, blocks(ids), strict=True))
    assert any("anyformer.links" in step for step in steps)
    assert not any("shift" in step for step in steps)
