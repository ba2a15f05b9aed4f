"""The models of the serving tests answer differently if a token near the beginning of the prompt changes."""

import pytest
import torch

import anyformer as af
from tests.serve.http.served import NAMES
from tests.serve.mixed_requests import MODELS, build
from tests.serve.responsive import decoder, make_run, pair
from tests.serve.test_late import small_model

LENGTH, CHANGED, NEW = 12, 1, 6  # tokens of a prompt, the one that changes, and tokens of an answer


def outputs(model: af.Transformer) -> torch.Tensor:
    """Return the answers to prompts that differ in one token; of a model that does not write, the vectors of a text."""
    table = model.source if model.encoder is not None else model.target
    vocab = table.table.weight.shape[0]
    changed = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:16]
    prompts = torch.randint(vocab, (LENGTH,), generator=torch.Generator().manual_seed(1)).repeat(len(changed), 1)
    prompts[:, CHANGED] = changed
    if model.decoder is None:
        with torch.no_grad():
            return model(prompts).round(decimals=2)
    return af.generate(model, prompts, max_new_tokens=NEW)[:, -NEW:]


@pytest.mark.parametrize("name", MODELS)
def test_models_of_all_kinds_of_requests(name: str) -> None:
    assert_differ(build(name))


@pytest.mark.parametrize("name", NAMES)
def test_runs(name: str) -> None:
    assert_differ(make_run(name).model)


@pytest.mark.parametrize("make", [decoder, pair])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_small_models(make, seed: int) -> None:
    assert_differ(make(seed))


def test_the_model_of_thousands_of_requests() -> None:
    assert_differ(small_model())


def assert_differ(model: af.Transformer) -> None:
    found = outputs(model)
    assert len({tuple(row.flatten().tolist()) for row in found}) >= len(found) / 4
