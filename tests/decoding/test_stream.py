"""Tokens as they come are those of `generate`; rows may end by numbers of their own."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from anyformer.config import Learned, ModelConfig
from anyformer.generation.generate import generate, stream
from tests.decoding.test_generate import STACK, decoder
from tests.strategies import build, models, seeds, tokens

HOT = {"temperature": 2.0, "seed": 1, "stop": (3,)}


@given(models(shapes=("decoder", "encoder-decoder")), seeds, st.integers(0, 6), st.sampled_from([1, 2, 4, None]))
@settings(max_examples=10)
def test_a_stream_is_what_generate_gives(config: ModelConfig, seed: int, most: int, patience: int | None):
    model, ids = build(config, seed), tokens(seed, 3, 4)
    whole = generate(model, ids, max_new_tokens=most, **HOT)
    said = [new for new, _ in stream(model, ids, max_new_tokens=most, patience=patience, **HOT)]
    assert [new.tolist() for new in said] == whole[:, 1 if model.encoder else 4 :].T.tolist()


def test_between_two_tokens_the_model_is_as_it_was():
    model = decoder().train()
    for _ in stream(model, tokens(0, 1, 2), max_new_tokens=3):
        assert torch.is_grad_enabled()
        assert model.training


@given(seeds, st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_each_row_has_its_own_room(seed: int, rooms: list[int]):
    model, ids = decoder(), tokens(seed, len(rooms), 3)
    out = generate(model, ids, max_new_tokens=rooms)
    assert out.shape[1] == 3 + max(rooms)
    for i, room in enumerate(rooms):
        alone = generate(model, ids[i : i + 1], max_new_tokens=room)
        assert torch.equal(out[i : i + 1, : 3 + room], alone)
        assert not bool(out[i, 3 + room :].any())  # the filler


def test_a_row_that_is_full_reads_no_more():
    """Positions end for one row where another still has room."""
    model = decoder(decoder=STACK.model_copy(update={"position": Learned(length=6)}))
    ids, segments = tokens(0, 2, 6), torch.tensor([[0] * 6, [0] * 2 + [-1] * 4])
    out = generate(model, ids, segments=segments, max_new_tokens=[1, 5])
    for i, (length, room) in enumerate([(6, 1), (2, 5)]):
        alone = generate(model, ids[i : i + 1, :length], max_new_tokens=room)
        assert out[i, 6 : 6 + room].tolist() == alone[0, length:].tolist()


def test_a_room_for_another_number_of_rows():
    with pytest.raises(ValueError, match="max_new_tokens: has 3 numbers, expected one for each of 2 rows"):
        generate(decoder(), tokens(0, 2, 2), max_new_tokens=[1, 2, 3])
    with pytest.raises(ValueError, match="must not be negative"):
        generate(decoder(), tokens(0, 2, 2), max_new_tokens=[1, -2])
