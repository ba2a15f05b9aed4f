"""Position schemes by their formulae."""

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    Full,
    Learned,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoPosition,
    Normal,
    NTKScaling,
    Position,
    Rotary,
    Scheme,
    Sinusoidal,
    Stack,
    T5Bias,
    Tokens,
    Window,
    YarnScaling,
)
from anyformer.config.spec import members
from anyformer.inspection.taps import run_with_taps
from anyformer.nn.init import initialise
from anyformer.nn.mask import lay_out
from anyformer.nn.model import Transformer
from anyformer.nn.position import Positions
from anyformer.nn.ring import Step
from tests.strategies import POSITIONS, build, close, seeds, tokens


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decoder(position: Position, *mixers: Attention, depth: int = 2, share: bool = False) -> ModelConfig:
    blocks = tuple(Block(mixer=mixer) for mixer in mixers or (Attention(heads=2),))
    stack = Stack(depth=depth, blocks=blocks, position=position, share=share)
    return ModelConfig(width=8, target=Tokens(vocab=11), decoder=stack, head=LM())


# -- on the embeddings ----------------------------------------------------------------------------------------------


def waves(positions: Tensor, width: int, base: float = 10_000.0, **options: Any) -> Tensor:
    nothing = torch.zeros(*positions.shape, width, dtype=torch.float64)
    return Sinusoidal(base=base, **options).embed(nothing, positions, {})


@given(st.integers(1, 9), st.sampled_from([100.0, 10_000.0]), st.lists(st.integers(0, 300), min_size=1, max_size=4))
def test_sinusoidal(width: int, base: float, places: list[int]):
    """PE(p, 2i) = sin(p / base^(2i/d)), PE(p, 2i+1) = cos(the same), for even and odd widths."""
    expected = [
        [(math.cos if c % 2 else math.sin)(p / base ** ((c - c % 2) / width)) for c in range(width)] for p in places
    ]
    close(waves(torch.tensor([places]), width, base), torch.tensor([expected], dtype=torch.float64), 1e-4)


@given(st.integers(1, 9), st.booleans(), st.integers(0, 3), st.lists(st.integers(0, 300), min_size=1, max_size=4))
def test_sinusoidal_halves_are_the_same_waves_in_another_order(width: int, closed: bool, offset: int, places: list):
    positions, options = torch.tensor([places]), {"closed": closed, "offset": offset}
    turns, halves = (waves(positions, width, layout=layout, **options) for layout in ("interleaved", "halves"))
    order = [*range(0, width, 2), *range(1, width, 2)]
    if closed and width % 2:  # the last is no wave
        order = [*range(0, width - 1, 2), *range(1, width - 1, 2), width - 1]
    assert torch.equal(halves, turns[..., order])


@given(st.integers(2, 9), st.sampled_from([100.0, 10_000.0]), st.integers(0, 3), st.integers(0, 300))
def test_sinusoidal_closed(pairs: int, base: float, offset: int, place: int):
    """p / base^(i/(n-1)): the slowest wave's is the base itself; an odd width ends with zero."""
    for width in (2 * pairs, 2 * pairs + 1):
        found = waves(torch.tensor([[place]]), width, base, closed=True, offset=offset)[0, 0]
        angles = [(place + offset) / base ** (i / (pairs - 1)) for i in range(pairs)]
        expected = [wave(angle) for angle in angles for wave in (math.sin, math.cos)]
        close(found[: 2 * pairs], torch.tensor(expected, dtype=torch.float64), 1e-4)
        assert not found[2 * pairs :].any()


@given(st.integers(1, 5), st.integers(0, 200), st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_sinusoidal_shift_is_a_rotation(pairs: int, shift: int, places: list[int]):
    """PE(p + Δ) is a fixed rotation of PE(p): one matrix for all p, which keeps lengths."""
    width = 2 * pairs
    rotation = torch.zeros(width, width, dtype=torch.float64)
    for i in range(pairs):
        angle = shift / 10_000.0 ** (2 * i / width)
        cos, sin = math.cos(angle), math.sin(angle)
        rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
    close(rotation @ rotation.T, torch.eye(width, dtype=torch.float64))
    positions = torch.tensor([places])
    close(waves(positions + shift, width), waves(positions, width) @ rotation.T, 1e-4)


@given(st.integers(0, 3), seeds)
def test_learned(offset: int, seed: int):
    """One row of the table per position, `offset` rows in; the rows before it stand unused."""
    scheme = Learned(length=6, offset=offset)
    shape = scheme.tables(width=4, heads=0)["positions"]
    assert shape == (6 + offset, 4)
    table, x, positions = random(seed, *shape), random(seed + 1, 2, 3, 4), torch.tensor([[0, 5, 2], [1, 1, 4]])
    table.requires_grad_()
    out = scheme.embed(x, positions, {"positions": table})
    for b in range(2):
        for i in range(3):
            assert torch.equal(out[b, i], x[b, i] + table[offset + positions[b, i]])
    (gradient,) = torch.autograd.grad(out.sum(), table)
    assert not gradient[:offset].any()


LIMITED = decoder(Learned(length=6))
PAST = "position {} is past the end of 6 learned positions"


def test_an_overrun_names_the_position_and_the_limit():
    model = build(LIMITED)
    model(tokens(0, 1, 6))
    with pytest.raises(ValueError, match=PAST.format(6)):
        model(tokens(0, 1, 7))
    with pytest.raises(ValueError, match=PAST.format(9)):
        model(tokens(0, 1, 3), positions=torch.tensor([[0, 9, 1]]))
    with pytest.raises(ValueError, match=PAST.format(6)):
        model(tokens(0, 1, 8), segments=torch.tensor([[-1, 0, 0, 0, 0, 0, 0, 0]]))


@pytest.mark.parametrize("first", [None, [[0, 3]]], ids=["counted", "given"])
def test_an_overrun_through_a_cache(first: list[list[int]] | None):
    """Also where the cache has room, and where earlier positions were given rather than counted."""
    model = build(LIMITED)
    cache = model.new_cache(1, 6 if first else 20)
    model(tokens(0, 1, 2), positions=None if first is None else torch.tensor(first), cache=cache)
    left = 4 if first is None else 2
    for _ in range(left):
        model(tokens(0, 1, 1), cache=cache)
    with pytest.raises(ValueError, match=PAST.format(6)):
        model(tokens(0, 1, 1), cache=cache)


def test_a_position_before_the_first():
    """A negative position would silently read the table from its end."""
    with pytest.raises(ValueError, match="position -1 is before the first of 6 learned positions"):
        build(LIMITED)(tokens(0, 1, 2), positions=torch.tensor([[-1, 0]]))


def test_a_limit_is_about_positions_not_about_the_row():
    """Packed documents and padding may make a row longer than the table."""
    model, ids = build(LIMITED), tokens(0, 1, 12)
    out = model(ids, segments=torch.tensor([[0] * 6 + [1] * 6]))
    close(out[:, 6:], model(ids[:, 6:]))
    close(model(ids, segments=torch.tensor([[-1] * 6 + [0] * 6]))[:, 6:], out[:, 6:])


# -- on queries and keys --------------------------------------------------------------------------------------------

scalings = st.sampled_from(
    [
        {},
        {"fraction": 0.5},
        {"scaling": LinearScaling(factor=3.0)},
        {"scaling": NTKScaling(factor=3.0)},
        {"scaling": YarnScaling(factor=4.0, original_length=16)},
        {"scaling": Llama3Scaling(factor=4.0, original_length=16)},
    ]
)


def turn(scheme: Rotary, x: Tensor, positions: list[int]) -> Tensor:
    return scheme.rotate(x, scheme.prepare(torch.tensor([positions]), x.shape[-1]))


@given(seeds, st.sampled_from([4, 8, 12]), st.sampled_from([1.0, 0.5]), st.integers(0, 300))
def test_rotary(seed: int, width: int, fraction: float, place: int):
    """Pair (x_i, x_{i + r/2}) as a complex number times exp(i · p · theta^(-2i/r)); past r nothing turns."""
    scheme, x = Rotary(theta=100.0, fraction=fraction), random(seed, 1, 2, 1, width)
    turning = int(width * fraction)
    half = turning // 2
    out = turn(scheme, x, [place])
    assert torch.equal(out[..., turning:], x[..., turning:])
    for i in range(half):
        pair = torch.complex(x[..., i], x[..., i + half])
        turned = pair * torch.polar(torch.ones(1).double(), torch.tensor(place * 100.0 ** (-2 * i / turning)).double())
        close(out[..., i], turned.real, 1e-4)
        close(out[..., i + half], turned.imag, 1e-4)


@given(seeds, scalings, st.integers(0, 60), st.integers(0, 60), st.integers(0, 200))
def test_rotary_scores_depend_on_the_distance_alone(seed: int, options: dict, m: int, n: int, shift: int):
    scheme, q, k = Rotary(theta=100.0, **options), random(seed, 1, 1, 1, 8), random(seed + 1, 1, 1, 1, 8)

    def score(m: int, n: int) -> Tensor:
        return (turn(scheme, q, [m]) * turn(scheme, k, [n])).sum()

    close(score(m, n), score(m + shift, n + shift), 3e-4)
    if m != n:
        assert abs(float(score(m, n) - score(m, m))) > 1e-6  # and it does depend on it


@given(seeds, scalings, st.integers(0, 1000))
def test_rotary_keeps_lengths(seed: int, options: dict, place: int):
    """A rotation, except for YaRN's temper of the scores, which is 0.1 ln(factor) + 1 on queries and keys each."""
    scheme, x = Rotary(**options), random(seed, 1, 2, 3, 8)
    temper = 0.1 * math.log(4.0) + 1 if isinstance(scheme.scaling, YarnScaling) else 1.0
    close(turn(scheme, x, [place] * 3).norm(dim=-1), temper * x.norm(dim=-1), 1e-6)
    close(turn(scheme, x, [0] * 3), temper * x, 1e-6)


def test_rotary_angles_far_out():
    """fp32 angles are good to a hundredth of a turn at position 100,000; in bf16 input they do not degrade."""
    scheme, places = Rotary(), torch.tensor([[100_000, 100_001]])
    rotation = scheme.prepare(places, 64)
    assert rotation.cos.dtype is torch.float32
    exact = places.double()[..., None] * 10_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert (rotation.cos[:, 0, :, 32:] - exact.cos()).abs().max() < 0.02
    assert (rotation.sin[:, 0, :, 32:] - exact.sin()).abs().max() < 0.02
    x = random(0, 1, 2, 2, 64).to(torch.bfloat16)
    low, high = scheme.rotate(x, rotation), scheme.rotate(x.double(), rotation)
    assert low.dtype is torch.bfloat16
    torch.testing.assert_close(low.double(), high, rtol=2**-8, atol=1e-6)  # one rounding, at the end


def angles(scheme: Rotary, place: int, width: int) -> Tensor:
    """Of each pair at a position small enough for no wave to have turned half."""
    rotation = scheme.prepare(torch.tensor([[place]]), width)
    return torch.atan2(rotation.sin, rotation.cos)[..., width // 2 :].flatten().double()


def test_linear_scaling_divides_positions():
    close(angles(Rotary(scaling=LinearScaling(factor=3.0)), 3, 16), angles(Rotary(), 1, 16), 1e-6)


def test_ntk_scaling_keeps_the_fastest_wave_and_stretches_the_slowest_by_the_factor():
    ratio = angles(Rotary(), 1, 16) / angles(Rotary(scaling=NTKScaling(factor=3.0)), 1, 16)
    assert float(ratio[0]) == pytest.approx(1.0, rel=1e-5)
    assert float(ratio[-1]) == pytest.approx(3.0, rel=1e-5)
    assert (ratio.diff() > 0).all()


@pytest.mark.parametrize("kind", [YarnScaling, Llama3Scaling])
def test_ramps_keep_fast_waves_and_stretch_slow_ones(kind):
    """Waves that turn often in the original context stay, those that hardly turn are stretched, none is outside."""
    scaled = Rotary(scaling=kind(factor=4.0, original_length=1024))
    plain, ratio = angles(Rotary(), 1, 64), angles(Rotary(), 1, 64) / angles(scaled, 1, 64)
    turns = 1024 * plain / (2 * math.pi)
    close(ratio[turns > 40], torch.ones_like(ratio[turns > 40]), 1e-5)
    close(ratio[turns < 0.5], torch.full_like(ratio[turns < 0.5], 4.0), 1e-5)
    assert (ratio.diff() > -1e-5).all()
    assert ((ratio > 1.01) & (ratio < 3.99)).any()  # there is a ramp


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(factor=1.0),
        NTKScaling(factor=1.0),
        YarnScaling(factor=1.0, original_length=64),
        Llama3Scaling(factor=1.0, original_length=64),
    ],
    ids=lambda scaling: scaling.kind,
)
def test_a_factor_of_one_scales_nothing(scaling):
    close(
        turn(Rotary(scaling=scaling), random(0, 1, 1, 3, 8), [3, 50, 7]),
        turn(Rotary(), random(0, 1, 1, 3, 8), [3, 50, 7]),
        1e-4,
    )


# -- on the scores --------------------------------------------------------------------------------------------------


def published_slopes(heads: int) -> list[float]:
    """As in the authors' code: powers of two directly, else every second slope of twice the last power as well."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * i / heads) for i in range(1, heads + 1)]
    power = 2 ** math.floor(math.log2(heads))
    return published_slopes(power) + published_slopes(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 25, 32, 112])
def test_alibi_slopes(heads: int):
    slopes = Alibi.slopes(heads)
    assert slopes == pytest.approx(published_slopes(heads), rel=1e-12)
    assert len(set(slopes)) == heads
    assert all(0 < slope < 1 for slope in slopes)


@given(
    st.integers(1, 6), st.lists(st.integers(0, 40), min_size=1, max_size=4), st.lists(st.integers(0, 40), min_size=1)
)
def test_alibi(heads: int, q: list[int], k: list[int]):
    """-m_h · |q - k|, in both directions alike."""
    for causal in (False, True):
        bias = Alibi().bias(torch.tensor([q]), torch.tensor([k]), heads, causal, {})
        expected = [[[-slope * abs(i - j) for j in k] for i in q] for slope in published_slopes(heads)]
        close(bias.double(), torch.tensor([expected], dtype=torch.float64), 1e-6)


def t5_bucket(distance: int, buckets: int, longest: int, causal: bool) -> int:
    """By whole numbers: near distances one by one, then the steps of a geometric series up to the longest."""
    ahead = 0
    if not causal:
        buckets //= 2
        ahead = buckets if distance < 0 else 0
    far = max(distance, 0) if causal else abs(distance)
    exact = buckets // 2
    if far < exact:
        return far + ahead
    n = buckets - exact  # step j begins at exact · (longest / exact)^(j/n)
    step = max(j for j in range(n) if far**n * exact**j >= longest**j * exact**n)
    return exact + step + ahead


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 12), (16, 100)])
def test_t5_buckets(buckets: int, longest: int, causal: bool):
    """Past the near ones, past the longest, and in both directions."""
    distances = range(-3 * longest, 3 * longest)
    found = T5Bias(buckets=buckets, max_distance=longest).bucket(torch.tensor(list(distances)), causal).tolist()
    assert found == [t5_bucket(distance, buckets, longest, causal) for distance in distances]
    # every bucket is used, but for a distance of 0 ahead
    assert set(found) == set(range(buckets)) - (set() if causal else {buckets // 2})


@given(seeds, st.booleans())
def test_t5_bias_is_a_lookup(seed: int, causal: bool):
    scheme = T5Bias(buckets=8, max_distance=12)
    table = random(seed, *scheme.tables(width=0, heads=3)["buckets"])
    q, k = torch.tensor([[0, 5, 30]]), torch.tensor([[2, 0, 7, 29]])
    bias = scheme.bias(q, k, 3, causal, {"buckets": table})
    assert bias.shape == (1, 3, 3, 4)
    for h in range(3):
        for i, m in enumerate(q[0].tolist()):
            for j, n in enumerate(k[0].tolist()):
                assert bias[0, h, i, j] == table[t5_bucket(m - n, 8, 12, causal), h]


@pytest.mark.parametrize(
    ("pattern", "causal"),
    [(None, True), (Window(before=3, after=0), True), (Window(before=3, after=1), False), (Full(), False)],
)
def test_t5_buckets_follow_the_pattern(pattern, causal: bool):
    """Where a layer can look ahead the two directions have half of the buckets each."""
    scheme = T5Bias(buckets=8, max_distance=12)
    model = build(decoder(scheme, Attention(heads=2, pattern=pattern)))
    layout = lay_out(1, 20, torch.device("cpu"))
    (relation,) = model.decoder.relations(layout, {None: Step(layout)}, cached=False)
    table = model.decoder.schemes[0].tables.buckets
    expected = scheme.bias(layout.positions, layout.positions, 2, causal, {"buckets": table})
    seen = relation.bias > -torch.inf
    assert torch.equal(relation.bias[seen], expected[seen])


@pytest.mark.parametrize(
    ("shared", "share", "tables"), [(True, False, 1), (False, False, 3), (True, True, 1), (False, True, 1)]
)
def test_t5_tables(shared: bool, share: bool, tables: int):
    """One for the stack, or one per layer (layers that share their weights share the table too)."""
    model = build(decoder(T5Bias(buckets=8, max_distance=12, shared=shared), depth=3, share=share))
    names = [name for name, _ in model.named_parameters() if ".schemes." in name]
    assert len(names) == tables
    model(tokens(0, 2, 5)).square().sum().backward()
    assert all(dict(model.named_parameters())[name].grad.any() for name in names)


def test_heads_of_different_number_have_tables_of_their_own():
    model = build(decoder(T5Bias(), Attention(heads=2), Attention(heads=4), depth=4))
    assert sorted(p.shape[1] for n, p in model.named_parameters() if ".schemes." in n) == [2, 4]
    assert model(tokens(0, 1, 4)).isfinite().all()


# -- in a model -----------------------------------------------------------------------------------------------------


def test_no_position_does_nothing():
    scheme, x, places = NoPosition(), random(0, 1, 3, 4), torch.arange(3)[None]
    assert scheme.embed(x, places, {}) is x
    assert scheme.prepare(places, 4) is None
    assert scheme.bias(places, places, 2, True, {}) is None
    assert not scheme.tables(4, 2)
    model, ids = build(decoder(NoPosition(), depth=1)), tokens(0, 1, 6)
    # the last token reads the others as a set (in a second layer the causal mask would give their order away)
    close(model(ids)[:, -1], model(ids[:, [3, 1, 4, 0, 2, 5]])[:, -1])


@pytest.mark.parametrize("position", [p for p in POSITIONS if p.kind != "none"], ids=lambda position: position.kind)
def test_every_scheme_tells_the_order(position: Position):
    """In one layer, where the causal mask tells the last token nothing."""
    model, ids = build(decoder(position, depth=1)), torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert not torch.allclose(model(ids)[:, -1], model(ids[:, [3, 1, 4, 0, 2, 5]])[:, -1], atol=1e-4)


@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: position.kind)
def test_every_scheme_on_a_model_built_on_meta(position: Position):
    """No buffer is lost on the way: a model materialised from meta computes what a direct one does."""
    config, ids = decoder(position), tokens(0, 2, 9)
    with torch.device("meta"):
        later = Transformer(config)
    assert not list(later.buffers())
    assert later(ids.to("meta")).shape == (2, 9, 11)
    torch.manual_seed(3)
    later.materialise("cpu")
    torch.manual_seed(3)
    assert torch.equal(later(ids), Transformer(config)(ids))


def queries(model: Transformer, layer: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The queries of a layer as attention uses them, and as they come out of the projection."""
    _, seen = run_with_taps(model, [f"decoder.{layer}.mixer.in", f"decoder.{layer}.mixer.q"], ids)
    attention = model.decoder.blocks[layer]["mixer"].inner
    projected = attention.qkv(seen[f"decoder.{layer}.mixer.in"])[0].unflatten(-1, (2, -1)).transpose(1, 2)
    return seen[f"decoder.{layer}.mixer.q"], projected


def test_a_layer_may_have_its_own_scheme():
    """A mix of local layers with a small theta, global ones with the stack's large one, and one without positions."""
    local = Attention(heads=2, pattern=Window(before=2, after=0), position=Rotary(theta=10.0))
    without = Attention(heads=2, position=NoPosition())
    model = build(decoder(Rotary(theta=1e6), local, Attention(heads=2), without, depth=3))
    ids = tokens(0, 1, 7)
    for layer, scheme in enumerate((Rotary(theta=10.0), Rotary(theta=1e6), None)):
        used, projected = queries(model, layer, ids)
        close(used, turn(scheme, projected, list(range(7))) if scheme else projected)


def test_a_layer_may_add_a_scheme_to_the_embeddings_own():
    """What acts on embeddings acts once, before the first block; a layer may turn its queries besides."""
    own = Attention(heads=2, position=Rotary())
    model = build(decoder(Learned(length=9), own, Attention(heads=2)))
    assert [name for name, _ in model.named_parameters() if "table" in name and "decoder" in name] == [
        "decoder.embedder.tables.positions"
    ]
    used, projected = queries(model, 0, tokens(0, 1, 7))
    close(used, turn(Rotary(), projected, list(range(7))))
    used, projected = queries(model, 1, tokens(0, 1, 7))
    assert torch.equal(used, projected)


def test_only_the_layer_that_asks_has_a_table():
    own = Attention(heads=2, position=T5Bias(buckets=8, max_distance=12))
    model = build(decoder(Rotary(), own, Attention(heads=2)))
    assert sum(".schemes." in name for name, _ in model.named_parameters()) == 1
    layout = lay_out(1, 5, torch.device("cpu"))
    relations = model.decoder.relations(layout, {None: Step(layout)}, cached=False)
    first, second = (relations[i] for i in model.decoder.follows)
    assert first.bias is not None
    assert first.rotation is None
    assert second.bias is None
    assert second.rotation is not None


# -- the frame that every scheme stands in ----------------------------------------------------------------------------


def test_a_scheme_fills_its_own_tables():
    """What a scheme learns starts as it says, whatever its tables are called."""

    class Kernel(Scheme):
        kind: Literal["kernel"] = "kernel"

        def tables(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
            return {"bias": (heads,), "heads": (2, heads)}

        def fill(self, name: str, table: torch.Tensor, std: float) -> None:
            table.fill_(7 if name == "bias" else std)

    positions = Positions(Kernel(), 8, 3)
    initialise(positions, Normal(std=0.5), 8)
    assert positions.tables["bias"].tolist() == [7] * 3
    assert positions.tables["heads"].tolist() == [[0.5] * 3] * 2


def test_a_scheme_acts_at_one_place():
    with pytest.raises(AssertionError, match="must act on embeddings or inside attention, not on both"):

        class Both(Scheme):
            kind: Literal["both"] = "both"

            def embed(self, x, positions, tables):
                return x

            def bias(self, q, k, heads, causal, tables):
                return None


def test_the_laws_draw_every_scheme():
    assert {type(scheme) for scheme in POSITIONS} == set(members(Position))
