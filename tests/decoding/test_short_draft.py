"""A draft model with fewer positions than the model drafts as far as it can read."""

import pytest
import torch

from anyformer import presets
from anyformer.config import ConfigError
from anyformer.generation.generate import generate
from anyformer.generation.speculative import speculate
from anyformer.generation.strategy import Draft
from anyformer.nn.model import Transformer

VOCAB = 11
IDS = torch.randint(3, VOCAB, (3, 6), generator=torch.Generator().manual_seed(0))
SEGMENTS = torch.tensor([[0] * 6, [-1] * 2 + [0] * 4, [-1] * 4 + [0] * 2])


def decoder(length: int, seed: int = 0, depth: int = 2) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(presets.gpt2(depth=depth, width=16, heads=2, vocab=VOCAB, length=length)).double().eval()


def pair(length: int, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(presets.bart(depth=1, width=16, heads=2, vocab=VOCAB, length=length)).double().eval()


@pytest.mark.parametrize("length", [6, 7, 8, 9, 12, 40])
@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("alike", [True, False])
def test_the_same_tokens(length: int, ahead: int, alike: bool):
    """Whether the draft is often right or hardly ever, and where rows come to its end at different steps."""
    model, draft = decoder(64), decoder(length, seed=0 if alike else 1)
    if alike:
        with torch.no_grad():
            for name, weight in draft.named_parameters():
                theirs = model.get_parameter(name)
                weight.copy_(theirs[: len(weight)])
    found = speculate(model, IDS, draft=Draft(draft), ahead=ahead, segments=SEGMENTS, max_new_tokens=30)
    assert torch.equal(found.ids, generate(model, IDS, segments=SEGMENTS, max_new_tokens=30))
    if length > 8:
        assert found.drafted.min() > 0
    drawn = speculate(
        model, IDS, draft=Draft(draft), ahead=ahead, segments=SEGMENTS, max_new_tokens=30, temperature=1.0, seed=1
    )
    assert drawn.ids.shape == (3, 36)


@pytest.mark.parametrize("length", [6, 9])
def test_answers_to_sources(length: int):
    model, draft = pair(64), pair(length, seed=1)
    found = speculate(model, IDS, draft=Draft(draft), segments=SEGMENTS, max_new_tokens=30)
    assert torch.equal(found.ids, generate(model, IDS, segments=SEGMENTS, max_new_tokens=30))


@pytest.mark.parametrize(("model", "draft"), [(decoder(64), decoder(5)), (pair(64), pair(5))], ids=["prompt", "source"])
def test_it_must_hold_what_is_read(model: Transformer, draft: Transformer):
    with pytest.raises(ConfigError, match=r"^draft: has 5 learned positions.* 6 tokens"):
        speculate(model, IDS, draft=Draft(draft), max_new_tokens=4)
    short = IDS[:, :5]
    assert speculate(model, short, draft=Draft(draft), max_new_tokens=4).ids.shape[0] == 3
