"""Options that are wrong, or would be ignored, are named before anything is read."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyformer import presets
from anyformer.config import ConfigError
from anyformer.generation.beam_search import beam_search
from anyformer.generation.contrastive import contrastive_search
from anyformer.generation.generate import generate, stream
from anyformer.generation.score import score, sliding, top_tokens
from anyformer.generation.speculative import speculate
from anyformer.generation.strategy import Draft, Lookup
from anyformer.nn.model import Transformer

VOCAB = 11
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
MODEL = Transformer(presets.gpt2(depth=1, width=16, heads=2, vocab=VOCAB, length=32)).eval()
PAIR = Transformer(presets.bart(depth=1, width=16, heads=2, vocab=VOCAB, length=32)).eval()
CALLS: dict[str, Callable[..., Any]] = {
    "generate": lambda **options: generate(MODEL, IDS, **options),
    "stream": lambda **options: list(stream(MODEL, IDS, **options)),
    "beams": lambda **options: beam_search(MODEL, IDS, **options),
    "contrastive": lambda **options: contrastive_search(MODEL, IDS, **options),
    "speculate": lambda **options: speculate(MODEL, IDS, **{"draft": Lookup(), **options}),
}
EVERYWHERE: dict[str, list[Any]] = {
    "max_new_tokens": [-1, 1.5, "3", True, None, math.nan, [1], [1, -1], [1, 2.5]],
    "stop": [(VOCAB,), (-1,), 5, ("a",), (1.5,), (True,), None],
    "cache": ["paged", None],
    "segments": [[[0, 0, 0]]],
    "constraint": ["a+"],
}
SOME: dict[str, dict[str, list[Any]]] = {
    "generate": {"chunk": [-1, 0, 1.5, "2", True], "compile": ["yes", 1], "reuse": [True]},
    "stream": {"chunk": [-1, 0], "patience": [0, -1, 1.5]},
    "beams": {"compile": ["yes"], "processors": [3, [3]], "phrases": [5, "ab"], "beams": [0, 1.5, True]},
    "contrastive": {"processors": [3], "candidates": [0, VOCAB + 1], "alpha": [-0.1, math.nan]},
    "speculate": {"chunk": [-1, 0], "ahead": [0, -1, 1.5, "4", True], "draft": [3, MODEL]},
}
WRONG = [
    (call, name, value) for call in CALLS for name, values in (EVERYWHERE | SOME[call]).items() for value in values
]


@pytest.mark.parametrize(("call", "name", "value"), WRONG, ids=lambda value: str(value)[:12])
def test_a_wrong_option_is_named(call: str, name: str, value: Any):
    with pytest.raises(ConfigError, match=rf"^{name}:? ") as caught:
        CALLS[call](**{name: value})
    assert len(str(caught.value).splitlines()) == 1


def test_all_at_once():
    with pytest.raises(ConfigError) as caught:
        generate(MODEL, IDS, max_new_tokens=-1, chunk=0, stop=(99,), seed=1)
    assert [fault.path for fault in caught.value.faults] == ["max_new_tokens", "stop", "seed", "chunk"]


@pytest.mark.parametrize("call", ["generate", "stream", "speculate"])
@pytest.mark.parametrize("seed", [3, torch.tensor([1, 2])], ids=["one", "each"])
def test_a_seed_needs_a_temperature(call: str, seed: Any):
    with pytest.raises(ConfigError, match=r"^seed:? .*needs a temperature above 0"):
        CALLS[call](seed=seed)
    CALLS[call](seed=seed, temperature=1.0, max_new_tokens=2)


@pytest.mark.parametrize("call", ["generate", "speculate"])
@pytest.mark.parametrize("seed", [1.5, "x", True, torch.tensor([1.0, 2.0]), torch.tensor([1])], ids=str)
def test_seeds_are_whole_numbers(call: str, seed: Any):
    with pytest.raises(ConfigError, match=r"^seed:? .*whole number"):
        CALLS[call](seed=seed, temperature=1.0)


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-38, 1e-44, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_temperature_near_0_is_nearly_greedy(temperature: float, dtype: torch.dtype):
    torch.manual_seed(0)
    model = Transformer(presets.gpt2(depth=1, width=16, heads=2, vocab=VOCAB, length=32)).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(50)
    greedy = generate(model, IDS, max_new_tokens=8)
    assert torch.equal(generate(model, IDS, max_new_tokens=8, temperature=temperature, seed=1, top_p=0.9), greedy)


# -- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [MODEL, PAIR], ids=["prompts", "sources"])
@pytest.mark.parametrize("call", [generate, beam_search, contrastive_search], ids=lambda call: call.__name__)
def test_empty_ids(model: Transformer, call: Callable[..., Any]):
    for shape in ((0, 3), (2, 0)):
        with pytest.raises(
            ValueError, match=r"^ids are empty, \[\d, \d\]: pass at least one row of at least one token"
        ):
            call(model, torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match=r"^ids:? must be a tensor \[batch, length\], got list"):
        call(model, [[1, 2]])


@pytest.mark.parametrize("row", [[1, 2, VOCAB], [VOCAB, 1], [1, -1], [1, 2.5], ["a"], [1, 2**40]], ids=str)
def test_scored_ids_are_of_the_vocabulary(row: list[Any]):
    for wrong in (
        lambda: score(MODEL, [[1, 2], row]),
        lambda: top_tokens(MODEL, [[1, 2], row]),
        lambda: score(PAIR, [[1, 2], row], [[1], [1]]),
    ):
        with pytest.raises(
            ConfigError, match=r"^row 1 = .*: (no such id; the vocabulary has 11|must be whole numbers)"
        ):
            wrong()
    with pytest.raises(ConfigError, match=r"^source 1 = "):
        score(PAIR, [[1], [1]], [[1], row])
    with pytest.raises(ConfigError, match=r"^row . = "):
        sliding(MODEL, [1, 2, *row], window=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: score(PAIR, [[1, 2]], [[]]), "^source 0 is empty"),
        (lambda: score(MODEL, "ab"), "^rows: must be a list of rows"),
        (lambda: score(MODEL, [1, 2]), "^rows: must be a list of rows"),
        (lambda: score(MODEL, [[1, 2]], seen=[1, 2]), "^seen: has 2 numbers, expected one for each of 1 rows"),
        (lambda: score(MODEL, [[1, 2]], seen=[-1]), r"^seen\.0 = -1: must not be negative"),
        (lambda: score(MODEL, [[1, 2]], seen=[0.5]), r"^seen\.0 = 0\.5: must be a whole number"),
        (lambda: top_tokens(MODEL, []), "^rows: are empty"),
        (lambda: top_tokens(MODEL, [[1]], k=1.5), r"^k = 1\.5: must be from 1 to the size"),
        (lambda: top_tokens(MODEL, [[1]], k=VOCAB + 1), "^k = 12: must be from 1 to the size"),
        (lambda: sliding(MODEL, [1, 2], window=1.5), r"^window = 1\.5: must be a whole number"),
        (lambda: sliding(MODEL, [1, 2], window=4, stride=0), "^stride = 0: must be at least 1"),
        (lambda: speculate(MODEL, IDS, draft=Draft(PAIR)), "^draft: is encoder-decoder"),
    ],
)
def test_what_is_scored(wrong: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        wrong()
