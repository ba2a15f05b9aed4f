"""Rings: which tokens they hold, that windows lose nothing by them, and what they refuse."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.attention.cache.kv_cache import Cache
from anyformer.attention.cache.ring import Ring
from anyformer.attention.layout import Layout
from anyformer.config import LM, Attention, Block, Causal, Latent, ModelConfig, Rotary, Stack, Tokens, Window
from anyformer.kernels.conventions import PADDING
from anyformer.nn.model import Transformer
from tests.strategies import build, close, tokens

CPU = torch.device("cpu")
LENGTH = 16


def local(before: int, **fields) -> Block:
    return Block(mixer=Attention(heads=2, pattern=Window(before=before, after=0), **fields))


def model(*blocks: Block) -> Transformer:
    stack = Stack(depth=len(blocks), blocks=blocks, position=Rotary())
    return build(ModelConfig(width=8, target=Tokens(vocab=11), decoder=stack, head=LM()))


MIXED = model(
    local(3),
    Block(mixer=Attention(heads=2, pattern=Causal())),
    local(0),
    local(3, key_width=6, compress=Latent(rank=3, rotary_width=4)),
)
IDS = tokens(0, 2, LENGTH)


def rings(cache: Cache) -> list[int]:
    return [cache.rings[reach].size for reach in sorted(cache.rings)]


# -- which tokens -----------------------------------------------------------------------------------------------------

chunks = st.lists(
    st.lists(st.tuples(st.sampled_from([0, 0, 0, PADDING]), st.sampled_from([0, 0, PADDING])), min_size=1, max_size=9),
    max_size=5,
)


@given(chunks, st.integers(0, 4), st.integers(0, 3))
def test_a_ring_holds_the_newest_of_every_row(chunks: list, reach: int, slack: int):
    """Whatever the chunks and wherever the pads: of each row the last `size` real tokens, each exactly once; no pad."""
    ring, read = Ring(2, reach, slack, CPU), ([], [])
    assert ring.size == reach + max(slack, 1)
    for i, chunk in enumerate(chunks):
        segments = torch.tensor(chunk).T
        numbers = torch.arange(segments.shape[1]) + 100 * i  # each token its own
        keys, _ = ring.take(Layout(numbers.expand_as(segments), segments))
        for row in range(2):
            new = numbers[segments[row] == 0].tolist()
            shown = keys.positions[row][keys.segments[row] == 0].tolist()
            needed = read[row][-reach:] if reach else []  # what the first of the new tokens sees
            assert set(needed + new) <= set(shown)
            assert len(shown) == len(set(shown))
            read[row].extend(new)
            there = ring.positions[row][ring.segments[row] == 0].tolist()
            assert sorted(there) == sorted(read[row][-ring.size :])
            # a pad sees itself: no row of attention is empty
            pads = numbers[segments[row] == PADDING].tolist()
            assert set(pads) <= set(keys.positions[row][keys.segments[row] == PADDING].tolist())


# -- a model with windows of several widths, full layers and compressed ones ------------------------------------------


@pytest.mark.parametrize("slack", [0, 2])
@pytest.mark.parametrize(
    "cuts", [[0, 16], [0, 1, 16], [0, 9, 16], [0, 5, 7, 9, 16], [0, 3, *range(4, 17)], [*range(17)]], ids=str
)
def test_chunks_of_any_length(cuts: list[int], slack: int):
    cache = MIXED.new_cache(2, LENGTH, slack=slack)
    assert rings(cache) == [max(slack, 1), 3 + max(slack, 1)]
    outs = [MIXED.decode(IDS[:, a:b], cache=cache) for a, b in pairwise(cuts)]
    close(torch.cat(outs, dim=1), MIXED.decode(IDS))


@pytest.mark.parametrize("cuts", [[0, 12, *range(13, 17)], [0, 4, 9, *range(10, 17)], [*range(17)]], ids=str)
def test_ragged_rows(cuts: list[int]):
    """Pads at the start, in the middle and at a chunk's end take no slot, and rows run out of step."""
    segments = torch.zeros(2, LENGTH, dtype=torch.long)
    segments[0, [0, 1, 7, 11]] = segments[1, 5:9] = PADDING
    cache = MIXED.new_cache(2, LENGTH)
    outs = [MIXED.decode(IDS[:, a:b], segments=segments[:, a:b], cache=cache) for a, b in pairwise(cuts)]
    out = torch.cat(outs, dim=1)
    for row in range(2):
        is_real = segments[row] == 0
        close(out[row, is_real][None], MIXED.decode(IDS[row : row + 1, is_real]))
    assert out.isfinite().all()


def test_ring_equals_static():
    ring, static = MIXED.new_cache(2, LENGTH), MIXED.new_cache(2, LENGTH, kind="static")
    assert not static.rings
    for a, b in pairwise([0, 7, *range(8, 17)]):
        close(MIXED.decode(IDS[:, a:b], cache=ring), MIXED.decode(IDS[:, a:b], cache=static))


def test_segments_follow_each_other():
    """A new text in the same row starts afresh; it does not see the old one, which may still be stored."""
    cache, segment = MIXED.new_cache(2, LENGTH), torch.ones(2, 1, dtype=torch.long)
    MIXED.decode(IDS[:, :6], cache=cache)
    outs = [MIXED.decode(IDS[:, 6:7], segments=segment, cache=cache)]
    outs += [MIXED.decode(IDS[:, i : i + 1], cache=cache) for i in range(7, 12)]
    close(torch.cat(outs, dim=1), MIXED.decode(IDS[:, 6:12]))


def test_slots_never_move():
    cache = MIXED.new_cache(2, LENGTH)
    homes = [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
    for a, b in pairwise([0, 7, 8, 9, 16]):
        MIXED.decode(IDS[:, a:b], cache=cache)
    assert [x.data_ptr() for layer in cache.layers for x in layer.tensors()] == homes


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_by_the_window():
    """A window layer keeps its window, the newest token and a slot for pads, however long the cache."""
    windows = model(local(3), local(3))
    short, long = windows.new_cache(2, 6), windows.new_cache(2, 10_000)
    each = 2 * 2 * (4 + 4) * 8  # rows, heads, keys and values, bytes
    assert long.nbytes() == 2 * (3 + 2) * each
    assert short.nbytes() == long.nbytes()
    assert windows.new_cache(2, 10_000, kind="static").nbytes() == 2 * 10_000 * each
    assert windows.new_cache(2, 4).nbytes() == 2 * 4 * each  # no ring where there are fewer slots


# -- taking back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [1, 2, 4])
def test_as_much_as_the_slack_can_be_taken_back(slack: int):
    cache = MIXED.new_cache(2, 40, slack=slack)
    MIXED.decode(IDS[:, :9], cache=cache)
    for dropped in (slack, 1, slack):  # repeatedly: the tokens read in between are intact
        length = int(cache.length)
        cache.truncate(length - dropped)
        MIXED.decode(IDS[:, length - dropped : length + 1], cache=cache)
    length = int(cache.length)
    close(MIXED.decode(IDS[:, length:], cache=cache), MIXED.decode(IDS)[:, length:])


def test_more_than_the_slack_is_an_error_and_changes_nothing():
    cache = MIXED.new_cache(2, LENGTH, slack=2)
    MIXED.decode(IDS[:, :9], cache=cache)
    with pytest.raises(ValueError, match=r"can remove at most 2 tokens.*slack=n.*kind = 'static'"):
        cache.truncate(6)
    close(MIXED.decode(IDS[:, 9:10], cache=cache), MIXED.decode(IDS[:, :10])[:, 9:])
    cache.truncate(8)
    with pytest.raises(ValueError, match="can remove at most 2 tokens"):
        cache.truncate(7)  # three back from the furthest that was read
    close(MIXED.decode(IDS[:, 8:10], cache=cache), MIXED.decode(IDS[:, :10])[:, 8:])


def test_until_a_ring_is_full_anything_can_be_taken_back():
    cache = model(local(9)).new_cache(2, LENGTH)
    cache.rings[9].take(Layout(torch.arange(10)[None].expand(2, 10), torch.zeros(2, 10, dtype=torch.long)))
    cache.rings[9].check(torch.tensor([0, 3]))


@pytest.mark.parametrize("kind", ["auto", "static", "int8"])
def test_to_nothing(kind: str):
    cache = MIXED.new_cache(2, LENGTH, kind=kind, slack=5)
    first = MIXED.decode(IDS[:, :5], cache=cache)
    cache.truncate(0)
    assert torch.equal(MIXED.decode(IDS[:, :5], cache=cache), first)


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "segments"),
    [([[4, 5]], None), ([[6, 6]], None), ([[7, 6]], None), (None, [[2, 1]]), ([[6, 6]], [[0, 0]])],
    ids=["back", "twice", "turned", "an old segment", "twice in a segment"],
)
def test_tokens_come_in_order(positions: list | None, segments: list | None):
    """A window is the newest tokens only if they come in order; a static cache takes any order."""
    facts = {"positions": positions, "segments": segments}
    facts = {name: torch.tensor(value) for name, value in facts.items() if value is not None}
    ring, static = MIXED.new_cache(2, LENGTH), MIXED.new_cache(2, LENGTH, kind="static")
    for cache in (ring, static):
        MIXED.decode(IDS[:, :6], cache=cache)
    MIXED.decode(IDS[:, 6:8], cache=static, **facts)
    with pytest.raises(ValueError, match=r"a ring needs tokens in order.*kind 'static'"):
        MIXED.decode(IDS[:, 6:8], cache=ring, **facts)
    close(MIXED.decode(IDS[:, 6:8], cache=ring), MIXED.decode(IDS[:, :8])[:, 6:])


def test_positions_may_leap():
    cache, positions = MIXED.new_cache(2, LENGTH), torch.tensor([[0, 1, 4, 6, 7, 8, 20, 21]])
    outs = [MIXED.decode(IDS[:, a:b], positions=positions[:, a:b], cache=cache) for a, b in [(0, 3), (3, 4), (4, 8)]]
    close(torch.cat(outs, dim=1), MIXED.decode(IDS[:, :8], positions=positions))
