"""Prefixes that are read once: what is decoded with them is what is decoded without."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from anyformer.attention.padding import pad_rows
from anyformer.config import (
    LM,
    Attention,
    Block,
    Convolution,
    Learned,
    ModelConfig,
    NoPosition,
    Position,
    Recurrent,
    Rotary,
    Stack,
    Tokens,
    Window,
)
from anyformer.generation.generate import generate
from anyformer.generation.prefix_cache import Reuse
from anyformer.nn.model import Transformer
from anyformer.presets import t5

VOCAB, NOWHERE = 13, NoPosition()
MIXERS = {
    "full": Attention(heads=2, position=Rotary()),
    "window": Attention(heads=2, position=Rotary(), pattern=Window(before=3, after=0)),
    "recurrent": Recurrent(),
    "convolution": Convolution(width=3),
}


def build(*mixers: str, position: Position = NOWHERE) -> Transformer:
    torch.manual_seed(0)
    stack = Stack(depth=len(mixers), blocks=tuple(Block(mixer=MIXERS[name]) for name in mixers), position=position)
    return Transformer(ModelConfig(width=16, target=Tokens(vocab=VOCAB), decoder=stack, head=LM())).double().eval()


def say(model: Transformer, prompts: list[list[int]], **options) -> Tensor:
    ids, segments = pad_rows(prompts, torch.device("cpu"))
    return generate(model, ids, segments=segments, max_new_tokens=6, **options)


texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)
calls = st.lists(st.lists(texts, min_size=1, max_size=3), min_size=2, max_size=4)


@pytest.mark.parametrize("kind", ["auto", "static", "int8"])
@pytest.mark.parametrize("mixers", [("full", "full"), ("full", "window"), ("recurrent", "convolution"), ("window",)])
@given(calls=calls)
@settings(max_examples=5, deadline=None)
def test_the_same_as_without(mixers: tuple[str, ...], kind: str, calls: list[list[list[int]]]):
    """Call after call, whatever their prompts have in common."""
    model, reuse = build(*mixers), Reuse(texts=3)
    for prompts in calls:
        assert torch.equal(say(model, prompts, cache=kind, reuse=reuse), say(model, prompts, cache=kind))


def test_a_conversation_is_read_once():
    model, reuse, text = build("full", "full"), Reuse(), [1, 2, 3, 4, 5]
    for turn in range(3):
        before = reuse.spared
        text = [*say(model, [text], reuse=reuse)[0].tolist(), 7, 8]
        assert reuse.spared - before == (
            0 if turn == 0 else len(text) - 6 - 2 - 3
        )  # all but the last token and two new


def test_one_beginning_for_many():
    """Of which a ring keeps only the end: it is read without an answer, so that the ring has that."""
    model, reuse, start = build("full", "window"), Reuse(), [5, 4, 3, 2, 1, 0, 1, 5, 5, 2, 1]
    generate(model, torch.tensor([start]), max_new_tokens=1, reuse=reuse)
    prompts = [[*start, 2], [*start, 3, 4, 4], [9]]
    assert torch.equal(say(model, prompts, reuse=reuse), say(model, prompts))
    assert reuse.spared == 2 * len(start)


def test_other_weights_are_another_model():
    model, reuse = build("full"), Reuse()
    say(model, [[1, 2, 3]], reuse=reuse)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert torch.equal(say(model, [[1, 2, 3]], reuse=reuse), say(model, [[1, 2, 3]]))
    assert reuse.spared == 0


def test_it_keeps_the_newest():
    model, reuse = build("full"), Reuse(texts=2)
    for first in range(5):
        say(model, [[first, 1, 2, 3]], reuse=reuse)
    full = reuse.nbytes()
    say(model, [[9, 1, 2, 3]], reuse=reuse)
    assert reuse.nbytes() == full
    say(model, [[0, 1, 2, 3]], reuse=reuse)  # forgotten
    assert reuse.spared == 0


def test_bad_input():
    with pytest.raises(ValueError, match="texts = 0"):
        Reuse(texts=0)
    pair = Transformer(t5(depth=1, width=8, heads=2, key_width=4, vocab=VOCAB))
    with pytest.raises(ValueError, match="leave `reuse` out"):
        generate(pair, torch.tensor([[1, 2]]), reuse=Reuse())
    model = build("full", position=Learned(length=8))
    reuse = Reuse()
    generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=2, reuse=reuse)
    with pytest.raises(ValueError, match="past the end of 8"):
        generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=7, reuse=reuse)
