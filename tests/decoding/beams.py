"""All answers of a small model with their scores, for tests of beam search."""

from collections.abc import Sequence
from itertools import product

import torch
from hypothesis import strategies as st
from torch import Tensor

from anyformer.generation.beam_search import Hypotheses
from anyformer.nn.model import Transformer
from tests.strategies import VOCAB

penalties = st.sampled_from([-0.7, 0.0, 0.6, 1.0, 2.0])
stopping = st.sampled_from(["first", "heuristic", "never"])
stops = st.lists(st.integers(0, VOCAB - 1), max_size=4, unique=True)


@torch.no_grad()
def log_p(model: Transformer, row: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
    """Of each token of answers of one length to one unpadded row, without a cache: [answers, n]."""
    wanted = torch.tensor(answers)
    rows = row.expand(len(wanted), -1)
    prompt = torch.full((len(wanted), 1), 1) if model.encoder else rows
    target = torch.cat((prompt, wanted), dim=1)
    logits = model(rows, target) if model.encoder else model(target)
    every = logits.log_softmax(dim=-1)[:, prompt.shape[1] - 1 : -1]
    return every.gather(2, wanted[..., None])[..., 0]


def all_answers(model: Transformer, row: Tensor, steps: int, stop: Sequence[int], penalty: float) -> dict:
    """Every answer of at most so many tokens that ends with a stop id or is that long, with its score."""
    tried = list(product(range(VOCAB), repeat=steps))
    scores = {}
    for answer, parts in zip(tried, log_p(model, row, tried), strict=True):
        n = next((i + 1 for i, token in enumerate(answer) if token in stop), steps)
        scores[answer[:n]] = float(parts[:n].sum()) / n**penalty
    return scores


def answers(found: Hypotheses, row: int) -> list[tuple[int, ...]]:
    """Those to one prompt, without padding; what stands before them is of one length for all."""
    prompt = found.ids.shape[2] - int(found.lengths.max())
    return [
        tuple(ids[prompt : prompt + n].tolist())
        for ids, n in zip(found.ids[row], found.lengths[row].tolist(), strict=True)
        if n
    ]
