"""The cache as an object: what it holds, forgets and refuses. That cached equals uncached is in `tests/laws`."""

import pytest
import torch

from anyformer.attention.cache.kv_cache import Cache
from anyformer.attention.cache.layer_cache import ExactStore, Int8Store, LayerCache
from anyformer.attention.cache.ring import Slots
from anyformer.attention.layout import Layout
from anyformer.config import (
    LM,
    Attention,
    Block,
    FanIn,
    Gated,
    Latent,
    Mixer,
    ModelConfig,
    NoNorm,
    Norm,
    Recurrent,
    RMSNorm,
    Rotary,
    Stack,
    Tokens,
    Window,
)
from anyformer.config.cost import Sizes
from anyformer.kernels.conventions import PADDING
from anyformer.nn.inputs import Inputs, read_inputs
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.strategies import build, close, tokens

CPU = torch.device("cpu")
MIXERS = (
    Attention(heads=4, kv_heads=2, key_width=3, value_width=5),
    Attention(heads=2, kv_heads=1),
    Attention(heads=2, pattern=Window(before=1, after=0)),
    Attention(heads=2, key_width=6, compress=Latent(rank=3, rotary_width=4)),
)


def config(encoder: bool = False) -> ModelConfig:
    cross = Attention(heads=2, key_width=6) if encoder else None
    read, blocks = Tokens(vocab=11), tuple(Block(mixer=mixer, cross=cross) for mixer in MIXERS)
    plain = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2)),))
    return ModelConfig(
        width=8,
        source=read if encoder else None,
        target=read,
        encoder=plain if encoder else None,
        decoder=Stack(depth=5, blocks=blocks),
        head=LM(),
    )


def decoder(mixer: Mixer, width: int = 8, depth: int = 2) -> ModelConfig:
    block = Block(mixer=mixer, norm=RMSNorm(), feedforward=Gated())
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(), final_norm=RMSNorm())
    return ModelConfig(width=width, target=Tokens(vocab=11), decoder=stack, head=LM())


def empty(batch: int = 2, slots: int = 6) -> Cache:
    return Cache(batch, slots, (Sizes(1, 2, 3),), CPU, torch.float64)


def read(cache: Cache, segments: list[list[int]]) -> None:
    rows = torch.tensor(segments)
    cache.take(cache.make_layout(*rows.shape, rows, None))


def facts(cache: Cache) -> tuple:
    return cache.segments.tolist(), cache.segment.tolist(), cache.following.tolist(), int(cache.length)


# -- keys and values ------------------------------------------------------------------------------------------------


def test_a_layer_fills_its_slots_in_place():
    """Keys and values are written to their slots, at fixed addresses; all other slots stay zero."""
    layer = LayerCache(2, 6, Sizes(1, 2, 3), CPU, torch.float64)
    homes = tuple(x.data_ptr() for x in layer.tensors())
    assert not any(x.any() for x in layer.tensors())
    k, v = torch.randn(2, 1, 3, 2).double(), torch.randn(2, 1, 3, 3).double()
    keys, values = layer.append(k[:, :, :2], v[:, :, :2], Slots(torch.tensor([0, 1])))
    keys, values = layer.append(k[:, :, 2:], v[:, :, 2:], Slots(torch.tensor([2])))
    assert (keys.data_ptr(), values.data_ptr()) == homes
    assert torch.equal(keys[:, :, :3], k)
    assert torch.equal(values[:, :, :3], v)
    assert not keys[:, :, 3:].any()
    assert not values[:, :, 3:].any()


def test_new_tokens_follow_the_old():
    """New tokens continue the segment and position of a row's newest real token."""
    cache = empty()
    assert facts(cache) == ([[PADDING] * 6] * 2, [0, 0], [0, 0], 0)
    read(cache, [[0, 0, 0], [-1, 0, -1]])
    assert facts(cache) == ([[0, 0, 0, -1, -1, -1], [-1, 0, -1, -1, -1, -1]], [0, 0], [3, 1], 3)
    layout = cache.make_layout(2, 1, None, None)
    assert layout.positions.tolist() == [[3], [1]]
    keys, place = cache.take(layout)[None]
    assert place.at.tolist() == [3]
    assert keys.positions[:, :4].tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    read(cache, [[4, 4], [0, 4]])
    assert facts(cache)[1:] == ([4, 4], [2, 1], 6)


def test_given_positions_are_kept():
    cache = empty()
    cache.take(cache.make_layout(2, 2, None, torch.tensor([[5, 9]])))
    assert cache.make_layout(2, 2, None, None).positions.tolist() == [[10, 11]] * 2


def test_a_layout_is_as_good_as_its_tensors():
    model, ids = build(config()), tokens(0, 2, 2)
    one, two = model.new_cache(2, 4), model.new_cache(2, 4)
    segments, positions = torch.tensor([[0, 0], [-1, 0]]), torch.tensor([[3, 4], [0, 3]])
    model(ids, segments=segments, positions=positions, cache=one)
    model(Inputs(ids, Layout(positions, segments)), cache=two)
    assert facts(one) == facts(two)
    _, layout = read_inputs(model.target, False, Inputs(ids[:, :1], Layout(torch.tensor([[7]]))), {}, one)
    assert layout.segments.tolist() == [[0], [0]]


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


@pytest.mark.parametrize(("kind", "slots"), [("auto", 6), ("static", 6), ("int8", 6), ("auto", 5)])
def test_reorder_takes_everything_along(kind: str, slots: int):
    """All that belongs to a row: keys, values, what cross-attention keeps, positions, segments; in place."""
    model = build(config(encoder=True))
    cache, ids, source = model.new_cache(3, slots, kind=kind), tokens(0, 3, 4), tokens(1, 3, 5)
    assert len(cache.rings) == (kind != "static")
    segments, empty_slots = torch.tensor([[0] * 5, [0, 0, -1, -1, -1], [-1, 0, 0, 0, 0]]), torch.full((3, 4), 0)
    empty_slots[1, 0] = -1
    model(source, ids, source_segments=segments, target_segments=empty_slots, cache=cache)

    def state() -> list[torch.Tensor]:
        layers = [x for part in (*cache.layers, *cache.rings.values()) for x in part.tensors()]
        return [cache.positions, cache.segments, cache.segment, cache.following, *cache.source[:2], *layers]

    before, homes = [x.clone() for x in state()], [x.data_ptr() for x in state()]
    order = torch.tensor([2, 2, 1])
    cache.reorder(order)
    assert [x.data_ptr() for x in state()] == homes
    for old, new in zip(before, state(), strict=True):
        assert torch.equal(new, old[order])
    assert segments[0].tolist() == [0] * 5  # what the caller gave is the caller's


@pytest.mark.parametrize("kind", ["auto", "static", "int8"])
def test_copies_of_a_prompt_share_a_layout(kind: str):
    """Beams move within the copies of their prompt: what is not moved there is equal in all of them."""
    model, order = build(config(encoder=True)), torch.tensor([1, 1, 0, 3, 5, 5])
    prompts = model.new_cache(2, 6, kind=kind)
    segments = torch.tensor([[0, 0, 0], [-1, 0, 0]])
    model(tokens(1, 2, 5), tokens(0, 2, 3), target_segments=segments, cache=prompts)
    found = []
    for group_size in (3, None):
        cache = model.new_cache(6, 6, kind=kind)
        cache.fill(prompts, 3)
        present = torch.tensor([True] * 3 + [False] * 3)[:, None]
        for i in range(2):
            model.decode(Inputs(tokens(i, 6, 1), cache.next(1, present)), cache=cache)
            cache.reorder(order, group_size=group_size)
        found.append(cache._state())
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["auto", "static"])
def test_beams_read_rows_that_stay_in_place(kind: str):
    """As if keys and values moved with the beams; also in a cache that was used before, in rings and compressed."""
    model, ids, source = build(config(encoder=True)), tokens(0, 2, 3), tokens(1, 2, 5)
    shared, plain = (model.new_cache(6, 9, kind=kind) for _ in range(2))
    shared.share_rows()
    for seed in range(2):
        prompts = model.new_cache(2, 9, kind=kind)
        model(source, ids, cache=prompts)
        for cache in (shared, plain):
            cache.reset()
            cache.fill(prompts, 3)
        for i in range(6):
            new = tokens(10 * seed + i, 6, 1)
            close(model.decode(new, cache=shared), model.decode(new, cache=plain))
            choice = torch.randint(3, (2, 3), generator=torch.Generator().manual_seed(10 * seed + i))
            rows = (choice + torch.tensor([[0], [3]])).flatten()
            for cache in (shared, plain):
                cache.reorder(rows, group_size=3)
    assert all(len(x) == 2 for layer in shared.layers for x in layer.cross or ())  # a source is stored once
    unmoved = [x for layer in shared.layers for x in layer.own()]
    assert any(not torch.equal(x, y) for x, y in zip(unmoved, plain._state()[-len(unmoved) :], strict=True))


@pytest.mark.parametrize("rows", [[0], [0, 1, 1], [[0, 1]]])
def test_reorder_takes_one_row_for_each(rows: list):
    with pytest.raises(ValueError, match=r"rows has shape .*, expected \[2\] like the batch"):
        empty().reorder(torch.tensor(rows))


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_full_cache_says_so_and_stays_as_it_is():
    model = build(config())
    cache, ids = model.new_cache(2, 4), tokens(0, 2, 6)
    model(ids[:, :3], cache=cache)
    with pytest.raises(ValueError, match="the cache has 4 slots, 3 in use: 2 more do not fit"):
        model(ids[:, 3:5], cache=cache)
    close(model(ids[:, 3:4], cache=cache), model(ids[:, :4])[:, 3:])


@pytest.mark.parametrize("options", [{}, {"segments": torch.zeros(3, 2, dtype=torch.long)}])
def test_another_batch(options: dict):
    model = build(config())
    with pytest.raises(ValueError, match="the cache was made for a batch of 2, got 3"):
        model(tokens(0, 3, 2), cache=model.new_cache(2, 4), **options)
    with pytest.raises(ValueError, match="the cache was made for a batch of 2, got 3"):
        model(Inputs(tokens(0, 3, 2), Layout(torch.arange(2)[None])), cache=model.new_cache(2, 4))


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
    direct = 2 * 7 * (2 * (2 * (3 + 5)) + 1 * (4 + 4))  # layers 0 and 4, and layer 1
    ring, latent = 2 * (1 + 1 + 1) * 2 * (4 + 4), 2 * 7 * (3 + 4)
    assert cache.nbytes() == size * (direct + ring + latent)
    static = model.new_cache(2, 7, kind="static")
    assert static.nbytes() == size * (direct + 2 * 7 * 2 * (4 + 4) + latent)
    model(tokens(0, 2, 5), tokens(1, 2, 3), cache=cache)
    across = 5 * 2 * 5 * 2 * (6 + 6)
    assert cache.nbytes() == size * (direct + ring + latent + across)


def test_layers_that_share_weights_keep_their_own():
    shared = Stack(depth=3, blocks=(Block(mixer=Attention(heads=2)),), share=True)
    model = build(ModelConfig(width=8, target=Tokens(vocab=11), decoder=shared, head=LM()))
    assert len(model.decoder.blocks) == 1
    cache = model.new_cache(1, 4)
    model(tokens(0, 1, 3), cache=cache)
    keys = [layer.keys.read() for layer in cache.layers]
    assert len(keys) == 3
    assert not torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[1], keys[2])


def test_a_cached_step_keeps_no_graph():
    """A cache outlives the step that wrote it; nothing in it may hold on to that step's activations."""
    model = build(config(encoder=True))
    cache = model.new_cache(2, 7)
    hidden = model.decode(tokens(1, 2, 3), model.encode(tokens(0, 2, 5)), cache=cache)
    kept = [x for layer in cache.layers for x in layer.tensors()]
    assert not any(x.requires_grad for x in (hidden, *kept))
    assert model(tokens(0, 2, 5), tokens(1, 2, 3)).requires_grad  # training without a cache is unaffected


@pytest.mark.parametrize("norm", [NoNorm(), RMSNorm()], ids=lambda norm: norm.kind)
def test_a_cache_takes_the_precision_of_autocast(norm: Norm):
    """Whatever precision a norm of the keys gives back."""
    model, ids = build(decoder(Attention(heads=2, qk_norm=norm))).float(), tokens(0, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model.new_cache(2, 4)
        out = torch.cat([model.decode(ids[:, i : i + 1], cache=cache) for i in range(4)], dim=1)
        whole = model.decode(ids)
    assert cache.layers[0].keys.numbers.dtype == torch.bfloat16
    torch.testing.assert_close(out, whole, rtol=0.1, atol=0.1)


# -- eight bits -------------------------------------------------------------------------------------------------------

WIDE = {
    "direct": Attention(heads=4),
    "grouped, normed": Attention(heads=4, kv_heads=2, qk_norm=RMSNorm()),
    "window": Attention(heads=4, pattern=Window(before=5, after=0)),
    "latent": Attention(heads=4, key_width=16, compress=Latent(rank=24, rotary_width=8, query_rank=16)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_exact_to_half_a_step(dtype: torch.dtype):
    """|x - stored| ≤ max|x| / 254 for vectors of any size: each has a separate scale."""
    x = torch.randn(2, 3, 5, 16) * torch.logspace(-2, 2, 5)[:, None]
    x[0, 0, 0] = 0
    store = Int8Store(2, 3, 6, 16, CPU, dtype)
    kept = store.write(x.to(dtype), Slots(torch.arange(5)))
    assert kept.dtype == dtype
    assert torch.equal(kept, store.read())
    x, kept = x.to(dtype).double(), kept[:, :, :5].double()
    step = x.abs().amax(dim=-1, keepdim=True) / 127
    assert ((x - kept).abs() <= step / 2 + 2 * torch.finfo(dtype).eps * x.abs() + step * torch.finfo(dtype).eps).all()
    assert (x - kept).abs().max() > step.max() / 4  # and it is rounded


@pytest.mark.parametrize("name", WIDE)
@torch.no_grad()
def test_what_int8_costs(name: str):
    """Where scores have variance 1: an attention's output is off by less than 1 %, 1 greedy token in 50 differs."""
    torch.manual_seed(0)
    model = Transformer(decoder(WIDE[name], width=64, depth=4).model_copy(update={"init": FanIn()})).eval()
    ids, outs, heads = tokens(0, 4, 100), [], []
    for kind in ("auto", "int8"):
        cache = model.new_cache(4, 100, kind=kind)
        out, seen = run_with_taps(model, ["decoder.0.mixer.heads"], ids, cache=cache)
        outs.append(out.argmax(dim=-1))
        heads += seen.values()
    off = (heads[1] - heads[0]).norm() / heads[0].norm()
    assert 1e-4 < off < 0.01
    assert (outs[0] == outs[1]).double().mean() > 0.98


def test_int8_is_a_quarter_of_fp32():
    """One byte a number, and a scale for each vector."""
    model = build(decoder(WIDE["direct"], width=64)).float()
    exact, int8 = (model.new_cache(2, 10, kind=kind).nbytes() for kind in ("auto", "int8"))
    assert exact == 2 * 2 * 10 * 4 * (16 + 16) * 4
    assert int8 == 2 * 2 * 10 * 4 * (16 + 16) * 1 + 2 * 2 * 10 * 4 * 2 * 4


def test_only_attention_is_rounded():
    """An error in a recurrent state would grow with every token."""
    stack = Stack(depth=2, blocks=(Block(mixer=Recurrent(cell="lstm")),))
    model, ids = build(decoder(WIDE["direct"]).model_copy(update={"decoder": stack})), tokens(0, 2, 6)
    cache = model.new_cache(2, 6, kind="int8")
    assert all(type(layer.keys) is ExactStore for layer in cache.layers)
    close(model.decode(ids, cache=cache), model.decode(ids))


def test_another_kind():
    with pytest.raises(ValueError, match="slack = -1: must not be negative"):
        build(config()).new_cache(2, 4, slack=-1)
    with pytest.raises(ValueError, match="kind = 'int4': must be 'auto', 'static', 'int8' or 'none'"):
        build(config()).new_cache(2, 4, kind="int4")
