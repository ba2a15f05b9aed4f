"""Options of a request have the same meaning under every strategy."""

from dataclasses import replace

import pytest
import torch

from anyformer.config import ConfigError
from anyformer.generation.prefix_cache import Reuse
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam, Contrastive, Draft, Lookup, Sampling, Speculation, Strategy
from tests.decoding.small_models import decoder
from tests.strategies import tokens

STRATEGIES: dict[str, Strategy] = {
    "greedy": Sampling(),
    "beams": Beam(beams=3),
    "contrastive": Contrastive(candidates=3),
    "lookup": Speculation(draft=Lookup(ngram=2), ahead=3),
    "draft": Speculation(draft=Draft(decoder(7)), ahead=2),
}
SEGMENTS = torch.tensor([[0] * 6, [-1, -1, 0, 0, 0, 0]])


@pytest.mark.parametrize("name", STRATEGIES)
def test_chunks_change_no_answer(name: str) -> None:
    model, request = decoder(3), Request(tokens(0, 2, 6), max_new_tokens=7, stop=(2,), segments=SEGMENTS)
    assert torch.equal(STRATEGIES[name].run(model, request), STRATEGIES[name].run(model, replace(request, chunk=4)))


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"contrastive"}))
def test_a_reused_prefix_changes_no_answer(name: str) -> None:
    model, reuse = decoder(3), Reuse()
    for length in (4, 6):
        request = Request(tokens(0, 2, 6)[:, :length], max_new_tokens=5, stop=(2,))
        expected = STRATEGIES[name].run(model, request)
        assert torch.equal(STRATEGIES[name].run(model, replace(request, reuse=reuse)), expected)
    assert reuse.spared >= 2 * 3


WRONG = {
    "a reuse of contrastive search": ({"reuse": Reuse()}, "contrastive", "reuse: contrastive search needs the hidden"),
    "a seed of beams": ({"seed": 1}, "beams", "seed: beam search does not sample"),
    "a seed of greedy decoding": ({"seed": 1}, "greedy", "seed = 1: needs a temperature above 0"),
    "phrases without beams": ({"phrases": [[3]]}, "lookup", "phrases: needs beam search"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_option_without_effect_is_refused(case: str) -> None:
    options, name, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        STRATEGIES[name].run(decoder(3), Request(tokens(0, 2, 6), **options))
