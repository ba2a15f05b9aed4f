"""The first tokens of an empty cache read each other, without its empty slots: as if they had read the whole buffer."""

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.attention.cache.kv_cache import Cache
from anyformer.attention.layout import Layout
from anyformer.attention.lowered import Dense, Documents
from anyformer.config import Attention, Block, Causal, ModelConfig, Plain, Rotary, Stack, Tokens, Window
from anyformer.generation.buffers import DecodeBuffers
from anyformer.generation.prefill import Prompts, prefill
from anyformer.kernels.runtime import Runtime
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer
from tests.laws.test_cache import decoders, start
from tests.strategies import VOCAB, build, close, models, seeds, tokens

kinds = st.sampled_from(["auto", "static", "int8"])


def both_ways(model: Transformer, seed: int, slots: int, kind: str, slack: int, read) -> None:
    """Read into an empty cache, and into one that reads all its slots; then compare what is stored, and a next step."""
    found = []
    for fresh in (True, False):
        cache, seen, _ = start(model, seed, 2, slots, kind, slack)
        cache.fresh = fresh
        first, is_real = read(model, cache, seen)
        assert not cache.fresh
        found.append((first[is_real], model.decode(tokens(seed + 3, 2, 1), cache=cache), cache))
    (first, step, cache), (expected, expected_step, other) = found
    close(first, expected)
    close(step, expected_step)
    for name in ("segments", "segment", "following", "length"):
        assert torch.equal(getattr(cache, name), getattr(other, name)), name
    is_real = cache.segments >= 0  # the position of padding has no meaning
    assert torch.equal(cache.positions[is_real], other.positions[is_real])


@given(decoders, seeds, st.integers(1, 12), st.integers(1, 3), kinds, st.integers(0, 3))
def test_unpadded_rows(config: ModelConfig, seed: int, length: int, spare: int, kind: str, slack: int) -> None:
    """All patterns, positions and mixers, of decoders with and without an encoder."""
    ids = tokens(seed, 2, length)

    def read(model: Transformer, cache: Cache, seen: dict) -> tuple[torch.Tensor, torch.Tensor]:
        return model.decode(ids, **seen, cache=cache), torch.ones_like(ids, dtype=torch.bool)

    both_ways(build(config, seed), seed, length + spare, kind, slack, read)


@given(decoders, seeds, st.integers(2, 9), kinds, st.sampled_from(["left", "right", "layout"]), st.data())
def test_padded_rows(config: ModelConfig, seed: int, length: int, kind: str, side: str, data: st.DataObject) -> None:
    """Padding on either side; `layout`: on the right, in a layout that knows it."""
    ids, pads = tokens(seed, 2, length), data.draw(st.integers(1, length - 1))
    segments = torch.zeros_like(ids)
    segments[1, :pads] = -1
    segments = segments if side == "left" else segments.flip(1)

    def read(model: Transformer, cache: Cache, seen: dict) -> tuple[torch.Tensor, torch.Tensor]:
        if side == "layout" and cache.fresh:
            inputs = Inputs(ids, Layout.right_padded(segments)._replace(continues_cache=True))
            return model.decode(inputs, **seen, cache=cache), segments >= 0
        return model.decode(ids, **seen, segments=segments, cache=cache), segments >= 0

    both_ways(build(config, seed), seed, length + 2, kind, 1, read)


@given(models(shapes=("decoder",)), seeds, st.integers(2, 7), st.booleans(), st.data())
def test_prompts_of_generate(config: ModelConfig, seed: int, length: int, marked: bool, data: st.DataObject) -> None:
    """Hidden states and logits of prompts, padded on either side and aligned, are those of the dense reading."""
    model, ids = build(config, seed), tokens(seed, 3, length)
    segments = torch.zeros_like(ids)
    segments[1, : data.draw(st.integers(0, length - 1))] = -1
    segments[2, data.draw(st.integers(1, length)) :] = -1
    marks = torch.ones_like(ids) if marked else None
    given_prompts = Prompts(ids, segments, marks)
    aligned = given_prompts.aligned()
    assert aligned.right_padded != marked
    found = []
    for prompts in (aligned, given_prompts):
        cache = model.new_cache(3, length + 1, kind="static" if marked else "auto")
        cache.fresh = prompts.right_padded
        with torch.no_grad():
            hidden, logits = prefill(model, DecodeBuffers(cache, cache), 1, prompts)
        found.append((hidden[prompts.segments >= 0], logits))  # the real tokens of a row stay in order
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


def small(pattern: Causal | Window) -> Transformer:
    block = Block(mixer=Attention(heads=2, pattern=pattern), feedforward=Plain(width=16))
    decoder = Stack(depth=1, blocks=(block,), position=Rotary())
    return Transformer(ModelConfig(width=16, target=Tokens(vocab=VOCAB), decoder=decoder)).eval()


def lowered(model: Transformer, layout: Layout, cache: Cache, runtime: Runtime):
    (relation,) = model.decoder.relations([layout], cache.take(layout), True, runtime)
    return relation.lowered


def test_no_mask_is_made() -> None:
    """A causal prompt, padded on the right or not, takes the kernel without a mask; the next tokens read all slots."""
    model, cpu = small(Causal()), Runtime("cpu", torch.float32, training=False)
    cache = model.new_cache(2, 20)
    assert lowered(model, cache.next(9), cache, cpu) == Dense(causal=True)
    later = lowered(model, cache.next(2), cache, cpu)
    assert later.bias.shape == (2, 1, 2, 20)
    cache.reset()
    padded = Layout.right_padded(torch.tensor([[0, 0, 0], [0, -1, -1]]))._replace(continues_cache=True)
    assert lowered(model, padded, cache, cpu) == Dense(causal=True)


def test_windows_on_a_gpu_know_their_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt under a window takes the kernel of documents, which stores no mask."""
    monkeypatch.setattr("anyformer.attention.varlen.OPTIONS", {"window_size", "scale"}, raising=False)
    model = small(Window(before=4, after=0))
    cache = model.new_cache(2, 600, kind="static")
    found = lowered(model, cache.next(512), cache, Runtime("cuda", torch.bfloat16, training=False))
    assert isinstance(found, Documents)
    assert found.window == (4, 0)
    assert found.starts.tolist() == [0, 512, 1024, 1024, 1024]


def test_reset_and_fill_begin_again() -> None:
    model = small(Causal())
    cache, copy = model.new_cache(1, 8), model.new_cache(2, 8)
    assert cache.fresh
    cache.truncate(0)
    assert cache.fresh
    model.decode(tokens(0, 1, 3), cache=cache)
    copy.fill(cache, 2)
    assert not cache.fresh
    assert not copy.fresh
    cache.reset()
    assert cache.fresh
    cache.skip(2)
    assert not cache.fresh
