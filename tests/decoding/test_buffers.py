"""Steps as they are captured, here not captured: over tensors that stay where they are, found again by later calls."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from anyformer.config import Attention, Block, Learned, Window
from anyformer.generation import buffers
from anyformer.generation.beam_search import beam_search
from anyformer.generation.contrastive import contrastive_search
from anyformer.generation.generate import NonFiniteLogits, generate, stream
from anyformer.nn.model import Transformer
from tests.decoding.test_generate import STACK, decoder, pair
from tests.strategies import tokens

RING = STACK.model_copy(
    update={"blocks": (Block(mixer=Attention(heads=2, kv_heads=1, pattern=Window(before=2, after=0))),)}
)
MODELS: dict[str, Any] = {
    "decoder": decoder,
    "pair": pair,
    "ring": lambda: decoder(decoder=RING),
    "positions that end": lambda: decoder(decoder=STACK.model_copy(update={"position": Learned(length=13)})),
}
SAID: dict[str, dict[str, Any]] = {
    "greedy": {},
    "rows end": {"stop": (3, 4), "max_new_tokens": [9, 2, 7]},
    "drawn": {"temperature": 2.0, "seed": 1, "top_k": 5, "repetition_penalty": 1.5, "no_repeat_ngram": 2},
    "int8": {"cache": "int8", "min_new_tokens": 3, "stop": (3,), "banned": ((2,), (5, 6))},
}
SEARCHED: dict[str, dict[str, Any]] = {
    "beams": {"beams": 3},
    "ends": {"beams": 4, "stop": (3, 4), "n_best": 2, "early_stopping": "first", "max_new_tokens": [9, 2, 7]},
    "never": {"beams": 2, "stop": (5,), "early_stopping": "never", "length_penalty": 1.7},
    "groups": {"beams": 4, "groups": 2, "diversity_penalty": 0.5},
    "wider than the vocabulary": {"beams": 30},
}
IDS, SEGMENTS = tokens(0, 3, 4), torch.tensor([[0] * 4, [0, 0, 0, -1], [-1, 0, 0, 0]])


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a device with graphs."""
    with monkeypatch.context() as patch:
        patch.setattr(buffers, "captures", lambda device: True)
        yield


def plainly(function: Any, model: Transformer, *args: Any, **options: Any) -> Any:
    """What it gives without: captures are off, whatever the fixture says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "captures", lambda device: False)
        return function(model, *args, **options)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_said(name: str, how: str):
    model, options = MODELS[name](), {"max_new_tokens": 9, "segments": SEGMENTS, **SAID[how]}
    for seed in range(3):  # the first makes a place, the others find it
        ids = tokens(seed, 3, 4)
        assert torch.equal(generate(model, ids, **options), plainly(generate, model, ids, **options))
    assert len(buffers._idle[model]) == 1


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("how", SEARCHED)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_found(name: str, how: str):
    model, options = MODELS[name](), {"max_new_tokens": 9, "segments": SEGMENTS, **SEARCHED[how]}
    for seed in range(2):
        ids = tokens(seed, 3, 4)
        ours, plain = beam_search(model, ids, **options), plainly(beam_search, model, ids, **options)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert len(buffers._idle[model]) == 1


@pytest.mark.usefixtures("captured")
def test_looking_late_changes_no_search(monkeypatch: pytest.MonkeyPatch):
    model, options = pair(), {"beams": 3, "max_new_tokens": 12, "stop": (3, 4, 5), "n_best": 3}
    plain = beam_search(model, IDS, **options)
    monkeypatch.setattr("anyformer.generation.beam_search.steps_between_checks", lambda device, can_end: 100)
    late = beam_search(model, IDS, **options)
    assert all(torch.equal(a, b) for a, b in zip(late, plain, strict=True))


@pytest.mark.usefixtures("captured")
def test_as_many_tokens_in_all_are_another_place():
    model = decoder()
    for length in (4, 6, 5):
        ids, how = tokens(0, 3, length), {"max_new_tokens": 10 - length, "presence_penalty": 3.0}
        assert torch.equal(generate(model, ids, **how), plainly(generate, model, ids, **how))


@pytest.mark.usefixtures("captured")
def test_two_streams_have_a_place_each():
    model, others = decoder(), tokens(7, 3, 4)
    expected = [plainly(generate, model, ids, max_new_tokens=6)[:, 4:].T.tolist() for ids in (IDS, others)]
    generate(model, IDS, max_new_tokens=6)  # leaves one
    both = zip(*(stream(model, ids, max_new_tokens=6) for ids in (IDS, others)), strict=True)
    said = [(a[0].tolist(), b[0].tolist()) for a, b in both]
    assert [list(x) for x in zip(*said, strict=True)] == expected
    assert len(buffers._idle[model]) == 2


@pytest.mark.usefixtures("captured")
def test_other_weights():
    """In the same place they are read from there; elsewhere nothing captured is of use."""
    model = decoder()
    generate(model, IDS, max_new_tokens=6)
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(-1.5)
    assert torch.equal(
        generate(model, IDS, max_new_tokens=6), plainly(generate, deepcopy(model), IDS, max_new_tokens=6)
    )
    (before,) = buffers._idle[model]
    assert buffers.key_of(model, 1) == buffers.key_of(model, 1)
    here = buffers.key_of(model, 1)
    model.double().float()
    assert buffers.key_of(model, 1) != here
    generate(model, IDS, max_new_tokens=6)
    assert [place is before[1] for _, place in buffers._idle[model]] == [True, False]


@pytest.mark.usefixtures("captured")
def test_what_was_spoilt_is_not_found_again():
    model = decoder()
    bad, good = deepcopy(model.state_dict()), model.state_dict()
    bad["target.table.weight"][:] = torch.nan
    kept = {name: x.clone() for name, x in good.items()}
    model.load_state_dict(bad)
    with pytest.raises(NonFiniteLogits):
        generate(model, IDS, max_new_tokens=6)
    model.load_state_dict(kept)
    assert torch.equal(generate(model, IDS, max_new_tokens=6), plainly(generate, model, IDS, max_new_tokens=6))


@pytest.mark.usefixtures("captured")
def test_places_go_with_their_model():
    model = decoder()
    generate(model, IDS, max_new_tokens=2)
    before = len(buffers._idle)
    del model
    assert len(buffers._idle) == before - 1


@pytest.mark.usefixtures("captured")
def test_candidates_beside_each_other():
    model = pair()
    for seed in range(2):
        ids = tokens(seed, 3, 4)
        ours, plain = (f(contrastive_search, model, ids, max_new_tokens=6) for f in (call, plainly))
        assert torch.equal(ours, plain)


def call(function: Any, model: Transformer, *args: Any, **options: Any) -> Any:
    return function(model, *args, **options)
