"""Reading on: segments with a past give what the whole text gives; nothing learns through it or changes it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch._dynamo.utils import counters

from anyformer.attention.cache.segment_memory import Past
from anyformer.config import (
    LM,
    Attention,
    Block,
    ConfigError,
    FullyConnected,
    Graph,
    Latent,
    Learned,
    ModelConfig,
    NoMixer,
    Position,
    Recurrent,
    Rotary,
    Sinusoidal,
    Special,
    Stack,
    Tokens,
    Window,
)
from anyformer.generation.generate import generate
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.strategies import ANCHORED, BACKWARD, RELATIVE, VOCAB, build, close, models, seeds, tokens

ENDLESS = tuple(pattern for pattern in BACKWARD + ANCHORED if not isinstance(pattern, Graph))
TEXT = 12  # tokens
READERS = Attention(heads=2), Attention(heads=2, compress=Latent(rank=4, rotary_width=2))


@st.composite
def recurring(draw: st.DrawFn, memory: int = TEXT) -> ModelConfig:
    """Any decoder with segment memory."""
    config = draw(
        models(
            shapes=("decoder",),
            positions=RELATIVE,
            decoder_patterns=ENDLESS,
            mixers=("attention", "convolution", "none"),
        )
    )
    stack = config.decoder
    assert stack is not None
    if all(isinstance(block.mixer, NoMixer) for block in (*stack.prefix, *stack.blocks)):
        stack = stack.model_copy(update={"blocks": (Block(mixer=Attention(heads=2)),), "prefix": ()})
    return config.model_copy(update={"decoder": stack.model_copy(update={"memory": memory})})


def small(memory: int = TEXT, position: Position = Rotary(), **block: object) -> ModelConfig:  # noqa: B008
    made = Block(mixer=block.pop("mixer", Attention(heads=2)), **block)
    stack = Stack(depth=2, blocks=(made,), position=position, memory=memory)
    return ModelConfig(width=8, target=Tokens(vocab=VOCAB), decoder=stack, head=LM(), special=Special(pad=0))


borders = st.lists(st.integers(1, TEXT - 1), max_size=4).map(lambda cuts: [0, *sorted({*cuts}), TEXT])


def in_segments(model: Transformer, ids: torch.Tensor, cuts: list[int]) -> tuple[torch.Tensor, Past]:
    past, outs = model.new_past(len(ids)), []
    for a, b in pairwise(cuts):
        out, past = model(ids[:, a:b], past=past)
        outs.append(out)
    return torch.cat(outs, dim=1), past


@given(recurring(), seeds, borders)
def test_segments_equal_the_whole(config: ModelConfig, seed: int, cuts: list[int]):
    """With room for all that came before, however the text is cut; and a cache of that length says the same."""
    model, ids = build(config, seed), tokens(seed, 2, TEXT)
    found, past = in_segments(model, ids, cuts)
    close(found, model(ids))
    assert past.positions.tolist() == [list(range(TEXT))] * 2
    cache = model.new_cache(2, TEXT, kind="static")
    for a, b in pairwise(cuts):
        cached = model(ids[:, a:b], cache=cache)
        close(found[:, a:b], cached)


def test_it_holds_what_the_mixers_read():
    model, ids = build(small()), tokens(0, 2, TEXT)
    _, past = in_segments(model, ids, [0, 5, 6, TEXT])
    _, seen = run_with_taps(model, ["*.mixer.in"], ids)
    for i, layer in enumerate(past.layers):
        close(layer, seen[f"decoder.{i}.mixer.in"])


@pytest.mark.parametrize("position", RELATIVE, ids=str)
def test_every_relative_scheme(position: Position):
    model, ids = build(small(position=position)), tokens(0, 2, TEXT)
    close(in_segments(model, ids, [0, 3, 4, 9, TEXT])[0], model(ids))


@example(small(), 0, [4], 0)
@given(recurring(), seeds, st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 2**12))
def test_pads_take_no_room(config: ModelConfig, seed: int, gaps: list[int], places: int):
    """Rows that are padded differently, left, right or between, each as if it were alone."""
    model, rows = build(config, seed), tokens(seed, 2, TEXT)
    full = model(rows)
    past, begun = model.new_past(2), [0, 0]
    found: list[list[torch.Tensor]] = [[], []]
    generator = torch.Generator().manual_seed(places)
    for gap in gaps:
        width = 4
        lengths = [max(width - gap, 0), width]
        ids, segments = tokens(seed + 1, 2, width), torch.full((2, width), -1)
        at = [torch.randperm(width, generator=generator)[:n].sort().values for n in lengths]
        for r, places_of_row in enumerate(at):
            ids[r, places_of_row] = rows[r, begun[r] : begun[r] + len(places_of_row)]
            segments[r, places_of_row] = 0
        out, past = model(ids, segments=segments, past=past)
        assert out.isfinite().all()
        for r, places_of_row in enumerate(at):
            found[r].append(out[r, places_of_row])
            begun[r] += len(places_of_row)
    for r in range(2):
        close(torch.cat(found[r]), full[r, : begun[r]])
        assert past.positions[r, TEXT - begun[r] :].tolist() == list(range(begun[r]))
        assert past.segments[r].tolist() == [-1] * (TEXT - begun[r]) + [0] * begun[r]


@given(recurring(), seeds, st.integers(1, TEXT - 1))
def test_a_new_document_sees_nothing_of_the_old_one(config: ModelConfig, seed: int, first: int):
    model, a, b = build(config, seed), tokens(seed, 2, first), tokens(seed + 1, 2, TEXT - first)
    _, past = model(a, past=model.new_past(2))
    found, past = model(b, segments=torch.ones_like(b), past=past)
    close(found, model(b))
    assert past.positions[0, :first].tolist() == list(range(first))


@pytest.mark.parametrize("segment", [1, 2, 3, 5, 8])
def test_a_short_memory_is_a_window(segment: int):
    """In a model of one layer every segment sees exactly `memory` tokens before it."""
    memory, ids = 3, tokens(0, 2, 24)
    config = small(memory=memory)
    assert config.decoder is not None
    config = config.model_copy(update={"decoder": config.decoder.model_copy(update={"depth": 1})})
    model = build(config)
    past = model.new_past(2)
    for at in range(0, 24, segment):
        out, past = model(ids[:, at : at + segment], past=past)
        start = max(at - memory, 0)
        close(out, model(ids[:, start : at + segment])[:, at - start :], 1e-4)  # fp32 angles
        end = min(at + segment, 24)
        assert [p for p in past.positions[0].tolist() if p] == [p for p in range(end)[-memory:] if p]


def test_nothing_learns_through_the_past():
    model, ids = build(small()), tokens(0, 2, TEXT)
    _, past = model(ids[:, :5], past=model.new_past(2))
    assert not any(x.requires_grad for x in torch.utils._pytree.tree_leaves(past))
    asked = torch.utils._pytree.tree_map(lambda x: x.clone().requires_grad_(x.is_floating_point()), past)
    out, _ = model(ids[:, 5:], past=asked)
    out.sum().backward()
    assert all(x.grad is None for x in torch.utils._pytree.tree_leaves(asked))
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mixer", READERS, ids=["attention", "latent"])
def test_a_layer_learns_from_what_it_recalls(mixer: Attention):
    """By the weights of today, and as from tokens of the segment itself: as if the text had been read at once."""
    config = small(mixer=mixer)
    assert config.decoder is not None
    config = config.model_copy(update={"decoder": config.decoder.model_copy(update={"depth": 1})})
    model, ids = build(config), tokens(0, 2, TEXT)
    _, past = model(ids[:, :5], past=model.new_past(2))
    weights = list(model.decoder.blocks[0].mixer.inner.parameters())
    with torch.no_grad():  # a step of training
        torch._foreach_add_(weights, [torch.randn_like(p) for p in weights])
    found, whole = model(ids[:, 5:], past=past)[0], model(ids)[:, 5:]
    close(found, whole)
    for a, b in zip(*(torch.autograd.grad(out.square().mean(), weights) for out in (found, whole)), strict=True):
        close(a, b)


def test_the_past_that_came_in_stays_as_it_was():
    model, ids = build(small()), tokens(0, 2, TEXT)
    _, past = model(ids[:, :5], past=model.new_past(2))
    copies = torch.utils._pytree.tree_map(torch.clone, past)
    once, next_past = model(ids[:, 5:9], past=past)
    again, same_past = model(ids[:, 5:9], past=past)
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (past, copies)), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(once, again)
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (next_past, same_past)), strict=True):
        assert torch.equal(a, b)


@given(recurring(), seeds)
def test_checkpointing_gives_the_same_gradients(config: ModelConfig, seed: int):
    """In training, over two segments, and the same past comes out."""
    model, ids = build(config, seed).train(), tokens(seed, 2, TEXT)
    results = []
    for recompute in (False, True):
        model.zero_grad()
        first, past = model(ids[:, :7], past=model.new_past(2), recompute=recompute)
        second, past = model(ids[:, 7:], past=past, recompute=recompute)
        (first.square().mean() + second.square().mean()).backward()
        results.append((torch.cat((first, second), dim=1), past, [p.grad for p in model.parameters()]))
    (a, one, grads), (b, two, others) = results
    assert torch.equal(a, b)
    for x, y in zip(*map(torch.utils._pytree.tree_leaves, (one, two)), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(grads, others, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            close(y, x)


def test_taps_see_the_memory():
    model, ids = build(small()), tokens(0, 2, 9)
    _, past = model(ids[:, :5], past=model.new_past(2))
    (out, _), seen = run_with_taps(model, ["*.weights"], ids[:, 5:], past=past)
    plain, _ = model(ids[:, 5:], past=past)
    assert torch.equal(out, plain)
    weights = seen["decoder.0.mixer.weights"]
    assert weights.shape == (2, 2, 4, TEXT + 4)
    assert (weights[..., : TEXT - 5] == 0).all()  # empty slots
    close(weights.sum(dim=-1), torch.ones(2, 2, 4, dtype=weights.dtype))


def test_it_is_decoded_like_any_other():
    model, ids = build(small()), tokens(0, 2, 5)
    new = generate(model, ids, max_new_tokens=6)
    past, read, said = model.new_past(2), ids, ids
    for _ in range(6):
        logits, past = model(read, past=past)
        read = logits[:, -1:].argmax(dim=-1)
        said = torch.cat((said, read), dim=1)
    assert said.tolist() == new.tolist()


def test_half_precision_is_kept_as_such():
    model, ids = Transformer(small()).eval(), tokens(0, 2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        past = model.new_past(2)
        assert past.layers[0][0].dtype is torch.bfloat16
        _, past = model(ids[:, :5], past=past)
        found, past = model(ids[:, 5:], past=past)
        assert past.layers[0][0].dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), model(ids)[:, 5:], rtol=0.05, atol=0.05)


def test_it_compiles_once():
    model, ids = Transformer(small(memory=4)).eval(), tokens(0, 2, 15)
    counters.clear()
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True)
    past, other = model.new_past(2), model.new_past(2)
    with torch.no_grad():
        for x in ids.split(5, dim=1):
            found, past = run(x, past=past)
            expected, other = model(x, past=other)
            torch.testing.assert_close(found, expected)
    assert counters["stats"]["unique_graphs"] == 1


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": Sinusoidal()}, r"decoder\.memory = 12: sinusoidal positions are absolute"),
        ({"position": Learned(length=64)}, r"decoder\.memory = 12: learned positions are absolute"),
        ({"mixer": FullyConnected(length=64), "position": NoMixer}, r"there are 64 positions of the 'dense' mixer"),
        ({"mixer": Recurrent(), "position": NoMixer}, r"a recurrent layer has a state"),
        ({"mixer": NoMixer(), "position": NoMixer}, r"decoder\.memory = 12: no layer reads other tokens"),
    ],
)
def test_models_without_a_sense_of_it(fields: dict, message: str):
    if fields.get("position") is NoMixer:
        fields = {**fields, "position": Stack.model_fields["position"].default}
    with pytest.raises(ConfigError, match=message):
        small(**fields)


def test_encoders_have_none():
    block = Block(mixer=Attention(heads=2))
    with pytest.raises(ConfigError, match=r"encoder\.memory = 3: only a decoder without an encoder"):
        ModelConfig(width=8, source=Tokens(vocab=VOCAB), encoder=Stack(depth=1, blocks=block, memory=3))


def test_wrong_calls():
    model, ids = build(small()), tokens(0, 2, 4)
    plain = build(small(memory=0))
    with pytest.raises(ValueError, match=r"this model has no memory: set `decoder\.memory`"):
        plain.new_past(2)
    with pytest.raises(ValueError, match="this past has 2 layers and 12 tokens, of another model"):
        plain(ids, past=model.new_past(2))
    with pytest.raises(ValueError, match="the past has a batch of 3, the input one of 2"):
        model(ids, past=model.new_past(3))
    with pytest.raises(ValueError, match="a cache holds all earlier tokens: leave `past` out"):
        model(ids, past=model.new_past(2), cache=model.new_cache(2, 8))
    with pytest.raises(ValueError, match="marks with a past are not supported"):
        model(ids, past=model.new_past(2), marks=torch.zeros_like(ids))


def test_a_window_composes():
    """A layer with a window reads only the part of the memory inside it."""
    model, ids = build(small(mixer=Attention(heads=2, pattern=Window(before=2, after=0)))), tokens(0, 2, TEXT)
    close(in_segments(model, ids, [0, 5, 6, TEXT])[0], model(ids))
