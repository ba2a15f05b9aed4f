"""Contrastive search by its formula."""

import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor
from torch.nn.functional import cosine_similarity

from anyformer.config import ModelConfig
from anyformer.generation.contrastive import contrastive_search
from anyformer.generation.generate import generate
from anyformer.generation.logit_processors import build as build_processors
from anyformer.generation.strategy import Sampling
from anyformer.nn.model import Transformer
from tests.decoding.beams import stops
from tests.decoding.small_models import decoder, either
from tests.strategies import HERE, VOCAB, build, seeds, tokens


@torch.no_grad()
def contrast(model: Transformer, row: Tensor, steps: int, k: int, penalty: float) -> list[int] | None:
    """One unpadded row by the formula, all of it read anew for each candidate; None where two are equally good."""
    target = torch.tensor([[1]]) if model.encoder else row[None]
    prompt = target.shape[1]

    def read(ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model.decode(ids, model.encode(row[None]) if model.encoder else None)
        return model.apply_head(hidden, HERE)[0, -1], hidden[0]

    for _ in range(steps):
        logits, before = read(target)
        worth = {}
        for token in logits.topk(k).indices.tolist():
            tried = torch.cat((target, torch.tensor([[token]])), dim=1)
            alike = cosine_similarity(read(tried)[1][-1:], before, dim=-1).max()
            worth[token] = float((1 - penalty) * logits.softmax(-1)[token] - penalty * alike)
        best, *rest = sorted(worth, key=worth.__getitem__, reverse=True)
        if rest and worth[best] - worth[rest[0]] < 1e-9:
            return None
        target = torch.cat((target, torch.tensor([[best]])), dim=1)
    return target[0, prompt:].tolist()


@given(either, seeds, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4), st.booleans())
def test_contrastive_search_is_its_formula(config: ModelConfig, seed: int, lengths: list[int], k: int, left: bool):
    model, longest = build(config, seed), max(lengths)
    rows = [tokens(seed + i, length) for i, length in enumerate(lengths)]
    ids, segments = tokens(seed + 99, len(rows), longest), torch.full((len(rows), longest), -1)
    for i, row in enumerate(rows):
        real = slice(longest - len(row), None) if left else slice(len(row))
        ids[i, real], segments[i, real] = row, 0
    out = contrastive_search(model, ids, segments=segments, candidates=k, alpha=0.6, max_new_tokens=2)
    for row, mine in zip(rows, out[:, -2:].tolist(), strict=True):
        expected = contrast(model, row, 2, k, 0.6)
        assume(expected is not None)
        assert mine == expected


@given(either, seeds, st.integers(1, 4), stops)
def test_contrastive_search_without_penalty_is_greedy(config: ModelConfig, seed: int, k: int, stop: list[int]):
    model, ids = build(config, seed), tokens(seed, 3, 3)
    how = {"max_new_tokens": 4, "stop": stop}
    out = contrastive_search(model, ids, candidates=k, alpha=0.0, **how)
    assert torch.equal(out, generate(model, ids, **how))


def test_contrastive_search_tries_no_banned_token():
    """Also where fewer are left than it tries."""
    banned = tuple((id,) for id in range(VOCAB) if id not in (4, 7, 9))
    processors = build_processors(Sampling(banned=banned), vocab=VOCAB)
    how = {"candidates": 5, "alpha": 0.9, "max_new_tokens": 9, "processors": processors}
    out = contrastive_search(decoder(), tokens(0, 3, 3), **how)
    assert set(out[:, 3:].flatten().tolist()) <= {4, 7, 9}
