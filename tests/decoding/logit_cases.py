"""Random logits with ragged histories, for tests of logit processors."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as theirs

from anyformer.generation.logit_processors import History, Processor, build, process
from anyformer.generation.strategy import Sampling

VOCAB, END = 7, 6
INF = math.inf


def option(stop: Iterable[int] = (), **given: Any) -> Processor:
    """What an option does to logits; nothing where its value is that without effect."""
    made = build(Sampling(temperature=given.pop("temperature", 1.0), **given), vocab=VOCAB, stop=stop)
    return lambda history, logits: process(made, history, logits)


class Case(NamedTuple):
    """A batch, and the same rows as lists of what is really there."""

    history: History
    logits: Tensor
    rows: list[list[int]]
    prompts: list[int]  # how many of a row are prompt


@st.composite
def cases(draw: st.DrawFn, ties: bool = True, least: int = 0) -> Case:
    """Ragged rows with gaps anywhere; few ids, so that they repeat; some logits -inf, but not all of a row."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch, length = draw(st.integers(1, 3)), draw(st.integers(max(least, 1), 9))

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    few = draw(st.sampled_from([1, 2, 3, VOCAB]))
    ids = whole(0, few, batch, length)
    there = whole(0, 3, batch, length) > 0
    there[:, length - least :] = True
    new = torch.arange(length) >= whole(0, length + 1, batch, 1)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    if ties and draw(st.booleans()):
        logits = whole(-2, 3, batch, VOCAB).to(dtype)
    else:
        logits = torch.randn(batch, VOCAB, generator=generator, dtype=dtype) * draw(st.sampled_from([0.5, 3.0, 20.0]))
    if draw(st.booleans()):
        gone = whole(0, 3, batch, VOCAB) == 0
        gone[torch.arange(batch), whole(0, VOCAB, batch)] = False
        logits[gone] = -INF
    rows = [row[real].tolist() for row, real in zip(ids, there, strict=True)]
    prompts = (there & ~new).sum(dim=1).tolist()
    gaps = whole(0, few, batch, length) if draw(st.booleans()) else whole(-100, 100, batch, length)  # anything
    ids = torch.where(there, ids, gaps)
    return Case(History(ids, there, new), logits, rows, prompts)


def alone(case: Case, their: Callable[[int], theirs.LogitsProcessor]) -> Tensor:
    """What `transformers` makes of each row by itself; a row that would be emptied is left as it is."""
    out = []
    for i, (row, logits) in enumerate(zip(case.rows, case.logits.clone(), strict=True)):
        made = their(i)(torch.tensor([row], dtype=torch.long), logits[None])[0]
        out.append(logits if made.isneginf().all() else made)
    return torch.stack(out)


def same(ours: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(ours, other, rtol=0, atol=0)


ids = st.integers(0, VOCAB - 1)
words = st.lists(
    st.lists(st.integers(0, 2) | ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5, unique=True
)
fractions = st.floats(0.01, 0.99)
