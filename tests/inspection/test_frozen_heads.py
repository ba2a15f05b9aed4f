"""Frozen output heads: for each kind of head, the terms of an output add up to it."""

import pytest
import torch

from anyformer.config import (
    LM,
    Classifier,
    DenseLayer,
    Embedder,
    Head,
    LayerNorm,
    MaskedLM,
    ModelConfig,
    NoHead,
    RMSNorm,
    Rotary,
    SpanBounds,
    Stack,
    TokenLabels,
    Transform,
)
from anyformer.nn.inspection.logit_terms import logit_terms
from tests.inspection.small_models import BLOCK, READ, TARGET
from tests.strategies import build, close

HEADS: list[Head] = [
    LM(bias=True, cap=2.0),
    LM(),
    MaskedLM(transform=Transform(norm=LayerNorm()), bias=True),
    *(Classifier(labels=3, pool=pool, transform=Transform()) for pool in ("first", "last", "mean", "max")),
    Classifier(labels=1, pool="mean"),
    TokenLabels(labels=3, transform=Transform(norm=RMSNorm())),
    TokenLabels(labels=3, crf=True),
    SpanBounds(),
    Embedder(pool="mean", normalize=True),
    Embedder(pool="max", layers=(DenseLayer(width=6), DenseLayer(width=5)), projection=4, normalize=False),
    Embedder(pool="first", projection=4, normalize=True, learned_scale=True),
    NoHead(),
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_terms_add_up_for_every_head(head: Head):
    stack = Stack(depth=2, blocks=(BLOCK,), position=Rotary(), final_norm=LayerNorm())
    sides = {"target": READ, "decoder": stack} if isinstance(head, LM) else {"source": READ, "encoder": stack}
    model, ids = build(ModelConfig(width=8, head=head, **sides)), TARGET[:1]
    with torch.no_grad():
        out = model(ids)
        hidden = model.encode(ids) if isinstance(head, TokenLabels) else None
    for at in (0, 2):
        terms = logit_terms(model, 0, ids, at=at)
        if hidden is not None:  # without the transitions of a CRF
            real = model.head.linear(model.head.transform(hidden))[0, at, 0]
        else:
            real = out[0, at, 0] if out.dim() == 3 else out[0, 0]
        close(torch.tensor(terms.total, dtype=torch.float64), real.detach())
