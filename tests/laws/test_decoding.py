"""Cached = uncached, token for token: all strategies, over combinations of shapes, positions, patterns and caches."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from anyformer.attention.layout import Layout
from anyformer.config import ModelConfig
from anyformer.generation import beam_search as beam, contrastive, generate as decode, speculative
from anyformer.generation.constraints.constraint import Trie
from anyformer.generation.request import Request
from anyformer.generation.session import Session
from anyformer.kernels.conventions import PADDING
from anyformer.nn.model import Transformer
from tests.strategies import VOCAB, build, models, seeds, tokens

STOP = (0, 1)


class Uncached(Session):
    """The same session without a cache: each step recomputes the whole text."""

    def __init__(self, model: Transformer, request: Request, *, copies: int = 1, **_):
        ids, segments = request.ids, request.segments
        super().__init__(model, Request(ids, request.max_new_tokens, segments=segments), copies=copies)
        self._source = None if model.encoder is None else (ids.repeat_interleave(copies, 0), segments)
        if segments is not None:
            self._source = self._source and (self._source[0], segments.repeat_interleave(copies, 0))
        self._recompute(self.prompt_length)

    def _recompute(self, new: int) -> Tensor:
        model, segments = self.model, torch.where(self.present, 0, PADDING)
        if self._source is None:
            hidden = model.decode(self.ids, segments=segments)
        else:
            source, at = self._source
            hidden = model.decode(self.ids, model.encode(source, segments=at), source=at, segments=segments)
        index = torch.arange(self.length)
        last = torch.where(self.present, index, -1).amax(dim=1)
        logits = model.apply_head(hidden, Layout(index[None]))
        self.hidden, self.logits = hidden[:, -new:], logits[torch.arange(len(last)), last]
        return logits[:, -new:]

    def read(self, new: Tensor, present: Tensor | None = None) -> Tensor:
        after = self.length + new.shape[1]
        self._ids[:, self.length : after] = new
        self._present[:, self.length : after] = True if present is None else present
        self.length = after
        return self._recompute(new.shape[1])

    def reorder(self, rows: Tensor) -> None:
        self._ids, self._present = self._ids[rows], self._present[rows]
        self.hidden, self.logits = self.hidden[rows], self.logits[rows]


def trie() -> Trie:
    answers = [[2, 3, 4], [2, 3], [5, 6, 7, 8], [9]]
    return Trie(answers, vocab=VOCAB, stop=STOP)


STRATEGIES: dict[str, tuple[ModuleType, Callable[..., Tensor]]] = {
    "greedy": (decode, lambda *a, **o: decode.generate(*a, **o)),
    "sampled": (
        decode,
        lambda *a, **o: decode.generate(*a, temperature=0.9, top_k=7, repetition_penalty=1.3, seed=3, **o),
    ),
    "constrained": (decode, lambda *a, **o: decode.generate(*a, constraint=trie(), **o)),
    "beam": (beam, lambda *a, **o: beam.beam_search(*a, beams=3, n_best=2, length_penalty=0.7, **o).ids),
    "diverse": (beam, lambda *a, **o: beam.beam_search(*a, beams=4, groups=2, diversity_penalty=0.5, **o).ids),
    "phrases": (beam, lambda *a, **o: beam.beam_search(*a, beams=3, phrases=[[4, 5]], **o).ids),
    "contrastive": (contrastive, lambda *a, **o: contrastive.contrastive_search(*a, alpha=0.4, candidates=3, **o)),
}


@pytest.mark.parametrize("name", STRATEGIES)
@given(
    config=models(shapes=("decoder", "encoder-decoder")),
    seed=seeds,
    padding=st.integers(0, 3),
    cache=st.sampled_from(["auto", "static", "none"]),
)
@settings(max_examples=12)
def test_cached_is_uncached(name: str, config: ModelConfig, seed: int, padding: int, cache: str):
    module, strategy = STRATEGIES[name]
    model, ids, segments = build(config, seed), tokens(seed, 2, 4), torch.zeros(2, 4, dtype=torch.long)
    segments[1, :padding] = PADDING
    options = {"segments": segments, "max_new_tokens": 5, "stop": STOP}
    found = strategy(model, ids, cache=cache, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Session", Uncached)
        assert torch.equal(found, strategy(model, ids, **options))


@given(
    config=models(shapes=("decoder", "encoder-decoder")), seed=seeds, cache=st.sampled_from(["auto", "static", "none"])
)
@settings(max_examples=12)
def test_speculation_is_uncached_greedy(config: ModelConfig, seed: int, cache: str):
    """Dropped tokens leave no trace."""
    model, ids = build(config, seed), tokens(seed, 2, 4)
    found = speculative.speculate(
        model, ids, draft=speculative.Lookup(ngram=1), ahead=2, max_new_tokens=6, stop=STOP, cache=cache
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "Session", Uncached)
        assert torch.equal(found.ids, decode.generate(model, ids, max_new_tokens=6, stop=STOP))
