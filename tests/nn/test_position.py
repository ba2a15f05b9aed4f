"""Position schemes in a model, and learned and sinusoidal ones by their formulae."""

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.attention.cache.ring import Step
from anyformer.attention.layout import make_layout
from anyformer.attention.position_module import Positions
from anyformer.config import (
    Attention,
    Learned,
    NoPosition,
    Normal,
    Position,
    Rotary,
    Sinusoidal,
    T5Bias,
    Window,
)
from anyformer.config.spec import members
from anyformer.nn.init import initialise
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.nn.positions import decoder, random, turn
from tests.strategies import POSITIONS, build, close, seeds, tokens

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
    projected = attention.qkv.split(seen[f"decoder.{layer}.mixer.in"])[0].unflatten(-1, (2, -1)).transpose(1, 2)
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
    layout = make_layout(1, 5, torch.device("cpu"))
    relations = model.decoder.relations([layout], {None: Step(layout)}, cached=False)
    first, second = (relations[i] for i in model.decoder.plan_of_layer)
    assert first.lowered.bias is not None
    assert first.rotation is None
    assert second.lowered.bias is None
    assert second.rotation is not None


# -- the frame that every scheme stands in ----------------------------------------------------------------------------


def test_a_scheme_fills_its_own_tables():
    """What a scheme learns starts as it says, whatever its tables are called."""

    class Kernel(Position):
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

        class Both(Position):
            kind: Literal["both"] = "both"

            def embed(self, x, positions, tables):
                return x

            def bias(self, q, k, heads, causal, tables):
                return None


def test_the_laws_draw_every_scheme():
    assert {type(scheme) for scheme in POSITIONS} == set(members(Position))
