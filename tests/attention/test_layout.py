"""Who sees whom: the definition by a plain loop, every lowering by the definition."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.attention.attend import lower_dense
from anyformer.attention.cache.kv_cache import Cache
from anyformer.attention.cache.ring import Step
from anyformer.attention.layout import Layout, make_layout, sees, segment_positions
from anyformer.attention.lowered import Dense
from anyformer.config import (
    LM,
    Attention,
    BigBird,
    Block,
    BlockLocal,
    Causal,
    ConfigError,
    Dilated,
    Full,
    Graph,
    ModelConfig,
    Pattern,
    Stack,
    Tokens,
    Window,
    pattern_of,
)
from anyformer.config.spec import members
from anyformer.kernels.conventions import PADDING, PLAIN, SEEN, SEER
from anyformer.nn.inputs import Inputs
from tests.strategies import PATTERNS, build, close, seeds, tokens

CPU = torch.device("cpu")
few, ways = st.integers(0, 3), st.sampled_from([None, True, False])
patterns = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.builds(Window, before=few, after=few, globals=few),
    st.builds(Dilated, before=few, after=few, step=st.integers(1, 3)),
    st.builds(BlockLocal, size=st.integers(1, 4), ahead=ways),
    st.builds(
        BigBird,
        block=st.integers(1, 3),
        before=st.integers(0, 1),
        after=st.integers(0, 1),
        globals=st.integers(0, 1),
        randoms=st.integers(0, 2),
        seed=st.integers(0, 9),
        ahead=ways,
    ),
    st.builds(
        Graph, nodes=st.just(6), edges=st.lists(st.tuples(few, st.integers(0, 5))), loops=st.booleans(), ahead=ways
    ),
)


def rows(elements: st.SearchStrategy[int], batch: int, length: int) -> st.SearchStrategy[Tensor]:
    row = st.lists(elements, min_size=length, max_size=length)
    return st.lists(row, min_size=batch, max_size=batch).map(torch.tensor)


@st.composite
def layouts(draw: st.DrawFn, batch: int, length: int) -> Layout:
    """Tokens laid out in every way there is, with the facts that go with it."""
    way = draw(st.sampled_from(["plain", "right", "segments", "positions"]))
    marks = draw(st.one_of(st.none(), rows(st.sampled_from([PLAIN, SEEN, SEER]), batch, length)))
    if way == "plain":
        return make_layout(batch, length, CPU, marks=marks)
    if way == "right":
        real = draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch))
        index = torch.arange(length)[None]
        segments = torch.where(index < torch.tensor(real)[:, None], 0, PADDING)
        return Layout(index, segments, marks, ordered=True, packed=False, padding="right")
    if way == "positions":
        positions = draw(rows(st.integers(0, 5), batch, length))
        segments = draw(st.one_of(st.none(), rows(st.integers(PADDING, 1), batch, length)))
        return make_layout(batch, length, CPU, segments=segments, positions=positions, marks=marks)
    segments = draw(rows(st.integers(PADDING, 2), batch, length))
    return make_layout(batch, length, CPU, segments=segments, marks=marks)


sizes = st.tuples(st.integers(1, 2), st.integers(1, 5))
alone = sizes.flatmap(lambda size: layouts(*size))
pairs = st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda size: st.tuples(layouts(size[0], size[1]), layouts(size[0], size[2]))
)


def allows(pattern: Pattern, q: int, k: int) -> bool:
    match pattern:
        case Full():
            return True
        case Causal():
            return k <= q
        case Window(before=before, after=after, globals=first):
            return q - before <= k <= q + after or (min(q, k) < first and (after > 0 or k <= q))
        case Dilated(before=before, after=after, step=step):
            return k in [q + i * step for i in range(-before, after + 1)]
        case BlockLocal(size=size):
            return q // size == k // size and (pattern.ahead is not False or k <= q)
        case BigBird(block=size, before=before, after=after):
            a, b = q // size, k // size
            near = a - before <= b <= a + after or min(a, b) < pattern.globals
            linked = any(pattern.link(max(a, b), i) == min(a, b) for i in range(pattern.randoms))
            return (near or linked) and (pattern.ahead is not False or k <= q)
        case Graph(edges=edges):
            return ((q, k) in edges or (pattern.loops and q == k)) and (pattern.ahead is not False or k <= q)


def at(facts: Tensor | None, b: int, i: int) -> int:
    return 0 if facts is None else int(facts[b % facts.shape[0], i])


def loop(pattern: Pattern, q: Layout, k: Layout, batch: int) -> Tensor:
    """One segment, and: the pattern, or a key for all of its segment, or a query that sees all of its segment."""
    out = torch.zeros(batch, q.positions.shape[1], k.positions.shape[1], dtype=torch.bool)
    for b in range(batch):
        for i in range(out.shape[1]):
            for j in range(out.shape[2]):
                together = at(q.segments, b, i) == at(k.segments, b, j)
                near = allows(pattern, at(q.positions, b, i), at(k.positions, b, j))
                marked = at(k.marks, b, j) in (SEEN, SEER) or at(q.marks, b, i) == SEER
                out[b, i, j] = together and (near or marked)
    return out


def rows_in(*layouts: Layout) -> int:
    return max(x.shape[0] for layout in layouts for x in layout[:3] if x is not None)


@given(patterns, pairs)
def test_sees_by_a_plain_loop(pattern: Pattern, pair: tuple[Layout, Layout]):
    q, k = pair
    batch = rows_in(q, k)
    seen = sees(pattern, q, k)
    assert torch.equal(seen.expand(batch, -1, -1), loop(pattern, q, k, batch))


def test_marks():
    """A SEEN key is seen by all, a SEER is seen by all and sees all; the rest is causal. Segments hold all the same."""
    layout = make_layout(1, 5, CPU, marks=torch.tensor([[PLAIN, PLAIN, SEEN, SEER, PLAIN]]))
    by_query = ["x.xx.", "xxxx.", "xxxx.", "xxxxx", "xxxxx"]
    assert sees(Causal(), layout, layout)[0].tolist() == [[mark == "x" for mark in row] for row in by_query]
    apart = layout._replace(segments=torch.tensor([[0, 0, 0, 1, 1]]))
    by_query = ["x.x..", "xxx..", "xxx..", "...xx", "...xx"]
    assert sees(Causal(), apart, apart)[0].tolist() == [[mark == "x" for mark in row] for row in by_query]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_looks_ahead(pattern: Pattern):
    """Says whether any query sees a key after it; position schemes that depend on direction ask for it."""
    layout = make_layout(1, 24, CPU)
    for side in ("encoder", "decoder"):
        turned = pattern_of(Attention(heads=1, pattern=pattern), side)
        assert turned.looks_ahead == bool(sees(turned, layout, layout).triu(1).any())
        assert turned.sees_self == bool(sees(turned, layout, layout)[0].diagonal().all())
    if "ahead" in type(pattern).model_fields:  # it has no direction of its own, so a decoder gives it one
        assert not turned.looks_ahead
        assert pattern_of(Attention(heads=1, pattern=pattern.model_copy(update={"ahead": True})), "decoder").looks_ahead


def test_the_laws_draw_every_pattern():
    assert {type(pattern) for pattern in PATTERNS} == set(members(Pattern))


@given(st.integers(0, 99), st.integers(1, 4), st.integers(2, 40))
def test_random_blocks_belong_to_the_config(seed: int, randoms: int, blocks: int):
    """Links go to earlier blocks, are the same at any length, and another seed draws others."""
    pattern, block = BigBird(block=1, before=0, after=0, globals=0, randoms=randoms, seed=seed), torch.arange(blocks)
    links = torch.stack([pattern.link(block, i) for i in range(randoms)])
    assert (links[:, 0] == -1).all()
    assert ((links[:, 1:] >= 0) & (links[:, 1:] < block[1:])).all()
    layout, shorter = make_layout(1, blocks, CPU), make_layout(1, blocks - 1, CPU)
    seen = sees(pattern, layout, layout)[0]
    assert torch.equal(seen, seen.T)
    assert torch.equal(seen[:-1, :-1], sees(pattern, shorter, shorter)[0])


def test_random_blocks_are_spread():
    """Each earlier block is drawn about equally often, and seeds and numbers draw apart from each other."""
    block = torch.full((4000,), 10)
    drawn = torch.stack([BigBird(randoms=1, seed=seed).link(block[:1], 0)[0] for seed in range(4000)])
    shares = torch.bincount(drawn, minlength=10) / 4000
    assert (shares - 0.1).abs().max() < 0.02
    far = torch.arange(1000, 3000)
    first, second = (BigBird(randoms=2).link(far, i) for i in range(2))
    assert (first == second).double().mean() < 0.01
    assert 0.45 < (first / far).mean() < 0.55


def test_a_position_past_the_graph_is_an_error():
    """Told where the graph is made, and where a text is longer than it."""
    with pytest.raises(ConfigError, match=r"edges.0 = \(0, 3\): must join positions below nodes = 3"):
        Graph(nodes=3, edges=((0, 3),))
    graph = Block(mixer=Attention(heads=2, pattern=Graph(nodes=3, edges=((1, 0),))))
    model = build(CONFIG.model_copy(update={"decoder": Stack(depth=1, blocks=(graph,))}))
    assert model(tokens(0, 1, 3)).isfinite().all()
    with pytest.raises(ValueError, match="position 3 is past the end of 3 positions of the 'graph' pattern"):
        model(tokens(0, 1, 4))


# -- lowerings ------------------------------------------------------------------------------------------------------


def meaning(dense: Dense, batch: int, t: int, s: int) -> Tensor:
    """Who sees whom by the lowered mask, bool [b, t, s]."""
    seen = torch.ones(batch, 1, t, s, dtype=torch.bool)
    if dense.causal:
        seen = seen.tril()
    if dense.mask is not None:
        seen = seen & dense.mask
    if dense.bias is not None:
        seen = seen & (dense.bias[:, :1] > -torch.inf)
    if dense.has_key is not None:
        seen = seen & dense.has_key
    return seen[:, 0]


@given(patterns, alone, st.booleans())
def test_every_lowering_means_the_same_for_real_tokens(pattern: Pattern, layout: Layout, biased: bool):
    batch, length = rows_in(layout), layout.positions.shape[1]
    bias = torch.randn(1, 2, length, length) if biased else None
    dense = lower_dense(pattern, layout, layout, "self", bias)
    seen, lowered = sees(pattern, layout, layout).expand(batch, -1, -1), meaning(dense, batch, length, length)
    real = slice(None) if layout.segments is None else layout.segments.expand(batch, length) >= 0
    assert torch.equal(lowered[real], seen[real])
    if pattern.sees_self:
        assert lowered.any(dim=-1).all()  # no row is empty, pads included
        assert dense.has_key is None
    if bias is not None:
        kept = seen[:, None].expand(batch, 2, length, length)
        assert torch.equal(dense.bias.expand_as(kept)[kept], bias.expand_as(kept)[kept])


@given(patterns, pairs)
def test_across_a_row_may_see_nothing(pattern: Pattern, pair: tuple[Layout, Layout]):
    """The lowered mask has no empty row, and `has_key` is false for fully masked queries."""
    q, k = pair
    batch, t, s = rows_in(q, k), q.positions.shape[1], k.positions.shape[1]
    dense = lower_dense(pattern, q, k, "cross")
    seen = sees(pattern, q, k).expand(batch, t, s)
    assert torch.equal(meaning(dense, batch, t, s), seen)
    assert meaning(dense._replace(has_key=None), batch, t, s).any(dim=-1).all()
    if dense.has_key is not None:
        assert torch.equal(dense.has_key[:, 0, :, 0].expand(batch, t), seen.any(dim=-1))


RIGHT = Layout(
    torch.arange(4)[None], torch.tensor([[0, 0, 0, 0], [0, 0, -1, -1]]), ordered=True, packed=False, padding="right"
)


@pytest.mark.parametrize(
    ("pattern", "layout", "role", "shortcut"),
    [
        (Full(), make_layout(2, 4, CPU), "self", "nothing"),
        (Full(), make_layout(2, 4, CPU), "cross", "nothing"),
        (Full(), make_layout(2, 4, CPU, positions=torch.tensor([[3, 1, 0, 2]])), "self", "nothing"),
        (Causal(), make_layout(2, 4, CPU), "self", "causal"),
        (Causal(), RIGHT, "self", "causal"),
        (Full(), RIGHT, "self", "mask"),
        (Full(), RIGHT, "cross", "mask"),
        (Causal(), RIGHT._replace(ordered=False), "self", "mask"),
        (Causal(), RIGHT._replace(segments=RIGHT.segments.flip(1), padding="any"), "self", "mask"),
        (Causal(), RIGHT._replace(packed=True), "self", "mask"),
        (Causal(), make_layout(2, 4, CPU), "cached", "mask"),  # torch's flag aligns at the top left
        (Causal(), make_layout(2, 4, CPU, positions=torch.tensor([[3, 1, 0, 2]])), "self", "mask"),
        (Causal(), make_layout(2, 4, CPU, segments=RIGHT.segments), "self", "mask"),  # may be padded on the left
        (Causal(), make_layout(2, 4, CPU, marks=torch.ones(2, 4, dtype=torch.long)), "self", "mask"),
        (Full(), make_layout(2, 4, CPU, segments=torch.tensor([[0, 0, 1, 1]])), "self", "mask"),
        (Window(before=3, after=0), make_layout(2, 4, CPU), "self", "mask"),
    ],
)
def test_shortcuts_are_taken_where_they_are_right(pattern: Pattern, layout: Layout, role: str, shortcut: str):
    dense = lower_dense(pattern, layout, layout, role)
    assert dense.causal == (shortcut == "causal")
    assert (dense.mask is None) == (shortcut != "mask")


CONFIG = ModelConfig(
    width=8,
    target=Tokens(vocab=11),
    decoder=Stack(depth=2, blocks=(Block(mixer=Attention(heads=2)),)),
    head=LM(),
)


@given(seeds, st.integers(1, 6), st.lists(st.integers(0, 6), min_size=2, max_size=2))
def test_causal_with_right_padding_needs_no_mask(seed: int, length: int, shorter: list[int]):
    """A layout that says so runs by the kernels' own flag, and real tokens come out as with the dense mask."""
    model, ids = build(CONFIG, seed), tokens(seed, 3, length)
    segments = torch.where(torch.arange(length) < torch.tensor([length, *shorter])[:, None], 0, PADDING)
    layout = Layout(torch.arange(length)[None], segments, ordered=True, packed=False, padding="right")
    assert model.decoder.relations([layout], {None: Step(layout)}, cached=False)[0].lowered.causal
    for backend in ("eager", "sdpa"):
        model.backend = backend
        out = model(Inputs(ids, layout))
        assert out.isfinite().all()
        close(out[segments >= 0], model(ids, segments=segments)[segments >= 0])


# -- laying out -----------------------------------------------------------------------------------------------------


def count(row: list[int], segment: int | None = None, following: int = 0) -> list[int]:
    """Positions by a plain loop: from 0 wherever a real token's segment differs from the last real token's."""
    out = []
    for new in row:
        if new == PADDING:
            out.append(0)
            continue
        if new != segment:
            segment, following = new, 0
        out.append(following)
        following += 1
    return out


segment_rows = st.tuples(st.integers(1, 3), st.integers(1, 8)).flatmap(
    lambda size: rows(st.sampled_from([PADDING, 0, 0, 1, 2]), *size)
)


@given(segment_rows)
def test_positions_count_within_segments(segments: Tensor):
    assert segment_positions(segments).tolist() == [count(row) for row in segments.tolist()]


@given(segment_rows, st.data())
def test_positions_go_on_from_a_cache(segments: Tensor, data: st.DataObject):
    batch = segments.shape[0]
    last, following = (data.draw(st.lists(st.integers(0, n), min_size=batch, max_size=batch)) for n in (2, 20))
    expected = [count(*state) for state in zip(segments.tolist(), last, following, strict=True)]
    assert segment_positions(segments, torch.tensor(last), torch.tensor(following)).tolist() == expected


@given(segment_rows, st.data())
def test_positions_by_chunks_equal_positions_at_once(segments: Tensor, data: st.DataObject):
    """Wherever a batch is cut, and wherever its pads stand."""
    batch, length = segments.shape
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    cache, found = Cache(batch, length, (), CPU, torch.float32), []
    for a, b in pairwise(cuts):
        layout = cache.make_layout(batch, b - a, segments[:, a:b], None)
        cache.take(layout)
        found.append(layout.positions)
    assert torch.equal(torch.cat(found, dim=1), segment_positions(segments))


@given(segment_rows)
def test_the_facts_of_a_layout_from_segments(segments: Tensor):
    """Within a segment that stands in one run (pads aside) positions grow with the index, and stay below the bound."""
    segments = torch.where(segments < 0, segments, segments.cummax(dim=1).values)  # no segment comes back
    layout = make_layout(*segments.shape, CPU, segments=segments)
    assert layout.ordered
    for places, row in zip(layout.positions, segments, strict=True):
        for segment in range(3):
            assert all(a < b for a, b in pairwise(places[row == segment].tolist()))
    assert int(layout.positions.max()) < layout.position_bound == segments.shape[1]


@pytest.mark.parametrize("name", ["segments", "positions", "marks"])
@pytest.mark.parametrize("shape", [(5,), (2, 4), (3, 5), (2, 5, 1), ()], ids=str)
def test_a_wrong_shape_is_an_error(name: str, shape: tuple[int, ...]):
    facts = {name: torch.zeros(shape, dtype=torch.long)}
    with pytest.raises(ValueError, match=rf"{name} has shape .*, expected \[2, 5\] like the tokens"):
        make_layout(2, 5, CPU, **facts)
    with pytest.raises(ValueError, match=rf"{name} has shape .*, expected \[2, 5\] like the tokens"):
        Layout(**{"positions": torch.arange(5)[None], **facts}).checked(2, 5)


@pytest.mark.parametrize("name", ["segments", "positions", "marks"])
def test_facts_are_whole_numbers(name: str):
    with pytest.raises(ValueError, match=f"{name} must be integers"):
        make_layout(2, 5, CPU, **{name: torch.zeros(2, 5)})


@pytest.mark.parametrize("pattern", [one for one in PATTERNS if one.as_window], ids=str)
def test_a_window_says_all_that_a_pattern_sees(pattern: Pattern) -> None:
    """Kernels take the window of a pattern in place of its mask."""
    assert pattern.as_window is not None
    back, ahead = (math.inf if size == -1 else size for size in pattern.as_window)
    positions = torch.arange(9)
    q, k = positions[:, None], positions[None, :]
    assert torch.equal(pattern.sees(q, k), (q - k <= back) & (k - q <= ahead))
