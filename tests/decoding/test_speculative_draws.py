"""Draws of speculative decoding have the probabilities of all short answers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anyformer.config import Special, Tokens
from anyformer.generation.logit_processors import History, build as build_processors, process
from anyformer.generation.speculative import speculate
from anyformer.generation.strategy import Draft, Sampling
from anyformer.nn.model import Transformer
from tests.decoding.drafts import drafting, ragged
from tests.decoding.small_models import decoder, pair

TINY, STEPS, ROWS = 5, 3, 8000
tiny = {"target": Tokens(vocab=TINY), "special": Special()}


def chances(model: Transformer, prompt: Tensor, stop: tuple[int, ...], **how: Any) -> dict[tuple[int, ...], float]:
    """The probability of every answer, without a cache."""
    processors = build_processors(Sampling(**how), vocab=TINY, stop=stop)
    found: dict[tuple[int, ...], float] = {}
    ongoing = {(): 1.0}
    for _ in range(STEPS):
        longer: dict[tuple[int, ...], float] = {}
        for answer, chance in ongoing.items():
            row = torch.cat((prompt, torch.tensor(answer, dtype=torch.long)))[None]
            new = torch.arange(row.shape[1]) >= len(prompt)
            history = History(row, torch.ones_like(row, dtype=torch.bool), new[None])
            p = process(processors, history, model(row)[:, -1]).softmax(dim=-1)[0].tolist()
            for token in range(TINY):
                (found if token in stop else longer)[(*answer, token)] = chance * p[token]
        ongoing = longer
    return {answer: chance for answer, chance in (found | ongoing).items() if chance > 0}


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """In standard deviations above what is to be expected; what is rare counts together."""
    total = sum(counts.values())
    often = [answer for answer, p in expected.items() if total * p > 5]
    cells = [(counts[answer], total * expected[answer]) for answer in often]
    cells.append((total - sum(seen for seen, _ in cells), max(total - sum(mean for _, mean in cells), 1.0)))
    chi = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    return (chi - len(often)) / (2 * len(often)) ** 0.5


@pytest.mark.parametrize(
    ("how", "stop", "ahead"),
    [
        ({"temperature": 1.0}, (), 1),
        ({"temperature": 1.0}, (), 2),
        ({"temperature": 0.8, "repetition_penalty": 1.4}, (2,), 2),
        ({"temperature": 1.5, "top_k": 3, "frequency_penalty": 0.5}, (), 2),
        ({"temperature": 1.2, "top_p": 0.8, "min_new_tokens": 2}, (0,), 2),
    ],
    ids=["one", "two", "penalty", "top-k", "top-p"],
)
@torch.no_grad()
def test_draws_have_the_probabilities_of_the_model(how: dict[str, Any], stop: tuple[int, ...], ahead: int):
    """Not those of the draft, which are others: by a chi-square test over all answers."""
    model, draft, prompt = decoder(**tiny), decoder(7, **tiny), torch.tensor([0, 2, 1])
    for part in (model, draft):
        part.head.table.mul_(0.3)  # so that many answers are likely
    found = speculate(
        model,
        prompt.expand(ROWS, 3),
        draft=Draft(draft),
        ahead=ahead,
        max_new_tokens=STEPS,
        stop=stop,
        seed=ahead,
        **how,
    )
    counts: Counter[tuple[int, ...]] = Counter()
    for row in found.ids[:, 3:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stop), STEPS)
        counts[tuple(row[:end])] += 1
    wanted = chances(model, prompt, stop, **how)
    assert counts.keys() <= wanted.keys()
    assert chi_square(counts, wanted) < 4
    assert chi_square(counts, chances(draft, prompt, stop, **how)) > 20
    rate = float(found.accepted.sum() / found.drafted.sum())
    assert 0.2 < rate < 0.95  # both ways are taken


@pytest.mark.parametrize("kind", ["nearly", "lookup"])
@pytest.mark.parametrize("make", [decoder, pair])
def test_a_row_draws_its_own_in_any_batch(make: Callable[..., Transformer], kind: str):
    model, draws = make(), torch.arange(3) * 1000
    draft = drafting(kind, model)
    ids, segments = ragged(0, [3, 6, 1], "left")
    how = {"draft": draft, "max_new_tokens": 10, "stop": (4,), "temperature": 1.5}
    together = speculate(model, ids, segments=segments, seed=draws, **how)
    prompt = 1 if model.encoder else ids.shape[1]
    for i in range(3):
        row = ids[i : i + 1, segments[i] == 0]
        alone = speculate(model, row, seed=draws[i : i + 1], **how)
        mine = alone.ids[0, 1 if model.encoder else row.shape[1] :]
        theirs = together.ids[i, prompt:]
        assert torch.equal(mine, theirs[: len(mine)])
        assert (theirs[len(mine) :] == 0).all()
        assert int(alone.drafted) == int(together.drafted[i])
        assert int(alone.accepted) == int(together.accepted[i])
