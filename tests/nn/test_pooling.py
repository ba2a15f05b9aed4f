"""Pooled stages: windows by segment and position, upsampling, cost, and errors."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from anyformer.attention.layout import Layout
from anyformer.config import (
    LM,
    Attention,
    Block,
    ConfigError,
    ModelConfig,
    Pooling,
    Recurrent,
    Rotary,
    Stack,
    Tokens,
    io,
)
from anyformer.nn.context import Tap
from anyformer.nn.inspection.attention_maps import attention_maps
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from anyformer.nn.pooling import Windows
from tests.strategies import RELATIVE, VOCAB, build, close, seeds, tokens

hows = st.sampled_from(["mean", "max"])


def encoder(pooling: Pooling | None, depth: int | None = None, **stack: object) -> ModelConfig:
    depth = depth or (len(pooling.levels) if pooling else 1)
    block = Block(mixer=Attention(heads=2, key_width=4))
    made = Stack(depth=depth, blocks=stack.pop("blocks", block), pooling=pooling, **{"position": Rotary(), **stack})
    return ModelConfig(width=8, source=Tokens(vocab=VOCAB), encoder=made, head=LM())


# -- windows ----------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Rows of segments in any order, with pads anywhere; sometimes positions that begin elsewhere."""
    length = draw(st.integers(1, 9))
    row = st.lists(st.sampled_from([-1, 0, 0, 0, 3]), min_size=length, max_size=length)
    segments = torch.tensor([draw(row), draw(row)])
    rank = torch.zeros_like(segments)
    for segment in (0, 3):
        rank = torch.where(segments == segment, (segments == segment).cumsum(dim=1) - 1, rank)
    return Layout(rank + draw(st.integers(0, 4)), segments)


@given(layouts(), st.integers(1, 4), hows, seeds)
def test_windows_by_the_definition(layout: Layout, factor: int, how: str, seed: int):
    """Each window is the mean or maximum of its tokens, and every token finds its window again."""
    x = torch.randn(2, layout.positions.shape[1], 3, generator=torch.Generator().manual_seed(seed))
    windows = Windows.of(layout, factor, 2)
    pooled, spread = windows.pool(x, how), windows.spread(windows.pool(x, how), x.shape[1])
    assert layout.segments is not None
    assert windows.layout.segments is not None
    for r in range(2):
        names = [(int(s), int(p) // factor) for s, p in zip(layout.segments[r], layout.positions[r], strict=True)]
        expected = sorted({name for name in names if name[0] >= 0})
        found = zip(windows.layout.segments[r].tolist(), windows.layout.positions[r].tolist(), strict=True)
        assert [name for name in found if name[0] >= 0] == expected
        for i, name in enumerate(expected):
            members = torch.stack([x[r, t] for t, other in enumerate(names) if other == name])
            close(pooled[r, i], members.mean(dim=0) if how == "mean" else members.amax(dim=0), 1e-6)
            for t, other in enumerate(names):
                assert other != name or torch.equal(spread[r, t], pooled[r, i])
        assert (pooled[r, len(expected) :] == 0).all()


@given(st.integers(1, 9), st.integers(1, 4), st.lists(st.integers(0, 9), min_size=2, max_size=2), hows, seeds)
def test_rows_that_count_from_zero_take_the_short_way(length: int, factor: int, ends: list[int], how: str, seed: int):
    """It needs no sorting, and says the same."""
    segments = torch.stack([torch.where(torch.arange(length) < max(n, 1), 0, -1) for n in ends])
    x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(seed))
    short, long = (
        Windows.of(Layout.right_padded(segments), factor, 2),
        Windows.of(Layout(torch.arange(length)[None], segments), factor, 2),
    )
    assert short.rank is None
    assert long.rank is not None
    n = long.layout.positions.shape[1]
    close(short.pool(x, how)[:, :n], long.pool(x, how), 1e-6)
    assert torch.equal(short.layout.segments[:, :n], long.layout.segments)
    assert short.layout.positions.shape[1] == -(-length // factor)
    is_real = segments >= 0
    one, two = (w.spread(w.pool(x, how), length)[is_real] for w in (short, long))
    close(one, two, 1e-6)


@pytest.mark.parametrize("how", ["mean", "max"])
def test_gradients_are_finite_where_windows_are_empty(how: str):
    segments = torch.tensor([[-1, -1, 0, 0, 0], [-1, -1, -1, -1, -1]])
    for layout in (Layout(torch.tensor([[0, 0, 0, 1, 2]] * 2), segments), Layout.right_padded(segments.flip(1))):
        x = torch.randn(2, 5, 3, requires_grad=True)
        windows = Windows.of(layout, 2, 2)
        windows.spread(windows.pool(x, how), 5).square().sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert (x.grad[layout.segments < 0] == 0).all()


def test_marks_stay_with_their_window():
    layout = Layout(torch.arange(5)[None], None, torch.tensor([[0, 1, 0, 0, 2]]), ordered=True, packed=False)
    assert Windows.of(layout, 2, 1).layout.marks.tolist() == [[1, 0, 2]]


# -- the stack --------------------------------------------------------------------------------------------------------


@given(st.sampled_from(RELATIVE), st.integers(0, 2), seeds, st.integers(1, 9), hows)
def test_factor_one_is_the_plain_stack_and_the_skip(position, tail: int, seed: int, length: int, how: str):
    """With windows of one token nothing is lost: what the first stage made is added once, after the last."""
    pooling = Pooling(stages=(1, 2, 1), factor=1, how=how, tail=tail)
    pooled = build(encoder(pooling, position=position), seed)
    plain = build(encoder(None, depth=4 + tail, position=position), seed)
    plain.load_state_dict(pooled.state_dict())
    ids, first = tokens(seed, 2, length), list[Tensor]()

    def skip(name: str, x: Tensor) -> Tensor:
        if name == "encoder.0.out":
            first.append(x)
        return x + first[0] if name == "encoder.3.out" else x

    close(pooled(ids), plain(ids, taps=Tap(skip)))


@pytest.mark.parametrize("length", [1, 2, 5, 8, 11])
def test_the_formula(length: int):
    """Pool, layers, pool, layers, back to the tokens, skip, tail: by hand, from what the taps show."""
    pooling = Pooling(stages=(1, 1, 1), factor=3, tail=1)
    model, ids = build(encoder(pooling)), tokens(1, 2, length)
    seen: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> Tensor:
        return seen.setdefault(name, x)

    model(ids, taps=Tap(keep))
    stages = [seen[f"encoder.{i}.out"] for i in range(3)]
    sizes = [length, -(-length // 3), -(-length // 9)]
    assert [x.shape[1] for x in stages] == sizes
    blocks = model.encoder.blocks
    for i, (x, size) in enumerate(zip(stages, sizes[1:], strict=False)):
        pooled = torch.stack([x[:, 3 * n : 3 * n + 3].mean(dim=1) for n in range(size)], dim=1)
        sublayer = blocks[i + 1].mixer  # reads the pooled stream through its norm
        close(seen[f"encoder.{i + 1}.mixer.in"], sublayer.norm_in(pooled))
    back = stages[2].repeat_interleave(9, dim=1)[:, :length] + stages[0]
    close(seen["encoder.3.mixer.in"], blocks[3].mixer.norm_in(back))
    assert seen["encoder.final"].shape == (2, length, 8)


def test_maps_by_level():
    model, ids = build(encoder(Pooling(stages=(2, 1, 1), tail=1))), tokens(0, 2, 7)
    maps = attention_maps(model, ids)
    assert {name: tuple(x.shape) for name, x in maps.items()} == {
        "encoder": (3, 2, 2, 7, 7),
        "encoder.1": (1, 2, 2, 4, 4),
        "encoder.2": (1, 2, 2, 2, 2),
    }
    for x in maps.values():
        close(x.sum(dim=-1), torch.ones(x.shape[:-1], dtype=x.dtype))
    _, seen = run_with_taps(model, ["*.out"], ids)
    assert [seen[f"encoder.{i}.out"].shape[1] for i in range(5)] == [7, 7, 4, 2, 7]


@pytest.mark.parametrize("length", [64, 65])
@pytest.mark.parametrize("tail", [0, 1])
def test_the_cost_falls_as_predicted(length: int, tail: int):
    def flops(config: ModelConfig) -> int:
        model = Transformer(config).eval()
        model.backend = "eager"
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens(0, 2, length))
        found = counter.get_total_flops()
        assert count(config, length=length, batch=2).flops == pytest.approx(found, rel=1e-6)
        return found

    pooled, plain = (
        flops(encoder(pooling, depth=4 + tail)) for pooling in (Pooling(stages=(1, 1, 2), factor=4, tail=tail), None)
    )
    assert pooled < (0.5 + 0.25 * tail) * plain  # 1 + 1/4 + 2/16 layers and the tail, and attention falls faster
    assert count(encoder(Pooling(stages=(1, 3))), length=64).parameters == count(encoder(None, depth=4)).parameters


def test_it_compiles_without_breaks():
    """Right-padded and full rows by their shape alone; any other layout has one window slot per token."""
    model = Transformer(encoder(Pooling(stages=(1, 1), tail=1))).eval()
    run, ids = torch.compile(model, backend="eager", fullgraph=True), tokens(0, 2, 7)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [-1, 0, 0, 0, 0, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(run(ids), model(ids))
        found, expected = run(ids, segments=segments), model(ids, segments=segments)
        torch.testing.assert_close(found[segments >= 0], expected[segments >= 0])


# -- the config -------------------------------------------------------------------------------------------------------


def test_levels_and_round_trip():
    config = encoder(Pooling(stages=(2, 1), factor=3, how="max", tail=2))
    assert config.encoder is not None
    assert config.encoder.levels == (0, 0, 1, 0, 0)
    assert io.loads(ModelConfig, io.dumps(config)) == config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: encoder(Pooling(stages=(2,))), r"encoder\.pooling\.stages = \[2\]: pooling is between stages"),
        (lambda: encoder(Pooling(stages=(1, 1)), depth=3), r"encoder\.depth = 3: the stages and the tail .* 2 layers"),
    ],
)
def test_wrong_stages(make, message: str):
    with pytest.raises(ConfigError, match=message):
        make()


def test_only_encoders_pool():
    block, pooling = Block(mixer=Attention(heads=2)), Pooling(stages=(1, 1))
    with pytest.raises(ConfigError, match=r"decoder\.pooling: a window would show later tokens"):
        ModelConfig(width=8, target=Tokens(vocab=3), decoder=Stack(depth=2, blocks=block, pooling=pooling))
    give, take = Block(mixer=Recurrent()), Block(mixer=Recurrent(begin="encoder"))
    with pytest.raises(ConfigError, match=r"encoder\.pooling: states go from token to token"):
        ModelConfig(
            width=8,
            source=Tokens(vocab=3),
            target=Tokens(vocab=3),
            encoder=Stack(depth=2, blocks=give, pooling=pooling),
            decoder=Stack(depth=2, blocks=take),
        )
