"""The cache as an object: what it holds, forgets and refuses. That cached equals uncached is in `tests/laws`."""

import pytest
import torch

from anyformer.config import LM, Attention, Block, ModelConfig, Stack, Tokens
from anyformer.nn.cache import Cache, LayerCache, Sizes
from anyformer.nn.mask import PADDING, Layout
from tests.strategies import build, close, tokens

CPU = torch.device("cpu")
MIXERS = (Attention(heads=4, kv_heads=2, key_width=3, value_width=5), Attention(heads=2, kv_heads=1))


def config(encoder: bool = False) -> ModelConfig:
    cross = Attention(heads=2, key_width=6) if encoder else None
    read, blocks = Tokens(vocab=11), tuple(Block(mixer=mixer, cross=cross) for mixer in MIXERS)
    plain = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2)),))
    return ModelConfig(
        width=8,
        source=read if encoder else None,
        target=read,
        encoder=plain if encoder else None,
        decoder=Stack(depth=3, blocks=blocks),
        head=LM(),
    )


def empty(batch: int = 2, slots: int = 6) -> Cache:
    return Cache(batch, slots, (Sizes(1, 2, 3),), CPU, torch.float64)


def read(cache: Cache, segments: list[list[int]]) -> None:
    rows = torch.tensor(segments)
    cache.take(cache.lay_out(*rows.shape, rows, None))


def facts(cache: Cache) -> tuple:
    return cache.segments.tolist(), cache.segment.tolist(), cache.following.tolist(), int(cache.length)


# -- keys and values ------------------------------------------------------------------------------------------------


def test_a_layer_fills_its_slots_in_place():
    """Keys and values go where they are told, at addresses that never move; the rest stays zero."""
    layer = LayerCache(2, 6, Sizes(1, 2, 3), CPU, torch.float64)
    homes = layer.keys.data_ptr(), layer.values.data_ptr()
    assert not layer.keys.any()
    assert not layer.values.any()
    k, v = torch.randn(2, 1, 3, 2).double(), torch.randn(2, 1, 3, 3).double()
    keys, values = layer.append(k[:, :, :2], v[:, :, :2], torch.tensor([0, 1]))
    keys, values = layer.append(k[:, :, 2:], v[:, :, 2:], torch.tensor([2]))
    assert (keys.data_ptr(), values.data_ptr()) == homes
    assert torch.equal(keys[:, :, :3], k)
    assert torch.equal(values[:, :, :3], v)
    assert not keys[:, :, 3:].any()
    assert not values[:, :, 3:].any()


def test_new_tokens_follow_the_old():
    """A row's newest real token says which segment goes on, and from where."""
    cache = empty()
    assert facts(cache) == ([[PADDING] * 6] * 2, [0, 0], [0, 0], 0)
    read(cache, [[0, 0, 0], [-1, 0, -1]])
    assert facts(cache) == ([[0, 0, 0, -1, -1, -1], [-1, 0, -1, -1, -1, -1]], [0, 0], [3, 1], 3)
    layout = cache.lay_out(2, 1, None, None)
    assert layout.positions.tolist() == [[3], [1]]
    keys, at = cache.take(layout)
    assert at.tolist() == [3]
    assert keys.positions[:, :4].tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    read(cache, [[4, 4], [0, 4]])
    assert facts(cache)[1:] == ([4, 4], [2, 1], 6)


def test_given_positions_are_kept():
    cache = empty()
    cache.take(cache.lay_out(2, 2, None, torch.tensor([[5, 9]])))
    assert cache.lay_out(2, 2, None, None).positions.tolist() == [[10, 11]] * 2


def test_a_layout_is_as_good_as_its_tensors():
    one, two = empty(), empty()
    segments, positions = torch.tensor([[0, 0], [-1, 0]]), torch.tensor([[3, 4], [0, 3]])
    one.take(one.lay_out(2, 2, segments, positions))
    two.take(two.lay_out(2, 2, Layout(positions, segments), None))
    assert facts(one) == facts(two)
    assert one.lay_out(2, 1, Layout(torch.tensor([[7]])), None).segments.tolist() == [[0], [0]]


# -- forgetting and reordering --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 5, 6])
def test_truncate_is_as_if_the_rest_had_not_been_read(keep: int):
    rows = [[0, 0, 2, 2], [-1, 0, 0, -1]]
    cache, shorter = empty(), empty()
    read(cache, rows)
    cache.truncate(keep)
    if keep:
        read(shorter, [row[:keep] for row in rows])
    assert facts(cache) == facts(shorter)


@pytest.mark.parametrize("length", [-1, 7])
def test_truncate_takes_lengths_that_exist(length: int):
    with pytest.raises(ValueError, match=f"length = {length}: must be from 0 to 6"):
        empty().truncate(length)


def test_reorder_takes_everything_along():
    """All that belongs to a row: keys, values, what cross-attention keeps, positions, segments; in place."""
    model = build(config(encoder=True))
    cache, ids, source = model.new_cache(3, 6), tokens(0, 3, 4), tokens(1, 3, 5)
    segments, empty_slots = torch.tensor([[0] * 5, [0, 0, -1, -1, -1], [-1, 0, 0, 0, 0]]), torch.full((3, 4), 0)
    empty_slots[1, 0] = -1
    model(source, ids, source_segments=segments, target_segments=empty_slots, cache=cache)

    def state() -> list[torch.Tensor]:
        layers = [x for layer in cache.layers for x in (layer.keys, layer.values, *layer.cross)]
        return [cache.positions, cache.segments, cache.segment, cache.following, *cache.source[:2], *layers]

    before, homes = [x.clone() for x in state()], [x.data_ptr() for x in state()]
    order = torch.tensor([2, 2, 1])
    cache.reorder(order)
    assert [x.data_ptr() for x in state()] == homes
    for old, new in zip(before, state(), strict=True):
        assert torch.equal(new, old[order])
    assert segments[0].tolist() == [0] * 5  # what the caller gave is the caller's


@pytest.mark.parametrize("rows", [[0], [0, 1, 1], [[0, 1]]])
def test_reorder_takes_one_row_for_each(rows: list):
    with pytest.raises(ValueError, match=r"rows has shape .*, expected \[2\] like the batch"):
        empty().reorder(torch.tensor(rows))


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_full_cache_says_so_and_stays_as_it_is():
    model = build(config())
    cache, ids = model.new_cache(2, 4), tokens(0, 2, 6)
    model(ids[:, :3], cache=cache)
    with pytest.raises(ValueError, match="the cache has 4 slots, 3 taken: 2 more do not fit"):
        model(ids[:, 3:5], cache=cache)
    close(model(ids[:, 3:4], cache=cache), model(ids[:, :4])[:, 3:])


@pytest.mark.parametrize("options", [{}, {"segments": torch.zeros(3, 2, dtype=torch.long)}])
def test_another_batch(options: dict):
    model = build(config())
    with pytest.raises(ValueError, match="the cache was made for a batch of 2, got 3"):
        model(tokens(0, 3, 2), cache=model.new_cache(2, 4), **options)
    with pytest.raises(ValueError, match="the cache was made for a batch of 2, got 3"):
        model(tokens(0, 3, 2), segments=Layout(torch.arange(2)[None]), cache=model.new_cache(2, 4))


@pytest.mark.parametrize("name", ["segments", "positions"])
@pytest.mark.parametrize("shape", [(3,), (2, 4), (3, 3)], ids=str)
def test_facts_of_the_wrong_shape(name: str, shape: tuple[int, ...]):
    model = build(config())
    with pytest.raises(ValueError, match=rf"{name} has shape .*, expected \[2, 3\] like the tokens"):
        model(tokens(0, 2, 3), cache=model.new_cache(2, 4), **{name: torch.zeros(shape, dtype=torch.long)})


def test_one_row_of_segments_stands_for_all():
    model, ids, row = build(config()), tokens(0, 2, 3), torch.tensor([[-1, 0, 0]])
    one, all_rows = (model(ids, segments=s, cache=model.new_cache(2, 4)) for s in (row, row.expand(2, 3)))
    assert torch.equal(one, all_rows)


# -- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)])
def test_nbytes(dtype: torch.dtype, size: int):
    """Layers · b · g · slots · (k + k_v) numbers, and those that cross-attention keeps once it has read."""
    model = build(config(encoder=True)).to(dtype)
    cache = model.new_cache(2, 7)
    own = 2 * 7 * (2 * (2 * (3 + 5)) + 1 * (4 + 4))  # layers 0 and 2, and layer 1
    assert cache.nbytes() == size * own
    model(tokens(0, 2, 5), tokens(1, 2, 3), cache=cache)
    across = 3 * 2 * 5 * 2 * (6 + 6)
    assert cache.nbytes() == size * (own + across)


def test_layers_that_share_weights_keep_their_own():
    shared = Stack(depth=3, blocks=(Block(mixer=Attention(heads=2)),), share=True)
    model = build(ModelConfig(width=8, target=Tokens(vocab=11), decoder=shared, head=LM()))
    assert len(model.decoder.blocks) == 1
    cache = model.new_cache(1, 4)
    model(tokens(0, 1, 3), cache=cache)
    keys = [layer.keys for layer in cache.layers]
    assert len(keys) == 3
    assert not torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[1], keys[2])


def test_a_cached_step_keeps_no_graph():
    """A cache outlives the step that wrote it; nothing in it may hold on to that step's activations."""
    model = build(config(encoder=True))
    cache = model.new_cache(2, 7)
    hidden = model.decode(tokens(1, 2, 3), model.encode(tokens(0, 2, 5)), cache=cache)
    kept = [x for layer in cache.layers for x in (layer.keys, layer.values, *layer.cross)]
    assert not any(x.requires_grad for x in (hidden, *kept))
    assert model(tokens(0, 2, 5), tokens(1, 2, 3)).requires_grad  # without a cache training goes on


def test_a_cache_takes_the_precision_of_autocast():
    model, ids = build(config()).float(), tokens(0, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model.new_cache(2, 4)
        out = torch.cat([model.decode(ids[:, i : i + 1], cache=cache) for i in range(4)], dim=1)
        whole = model.decode(ids)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    torch.testing.assert_close(out, whole, rtol=0.1, atol=0.1)
