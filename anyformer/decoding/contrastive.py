"""Contrastive search (Su et al. 2022): of the likeliest tokens, the one that repeats least what was said before.

    (1 - alpha) · p(token) - alpha · max over all tokens before of cos(its hidden state, theirs)

with hidden states of the last layer, after the final norm.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from anyformer.cache.kv_cache import CacheKind
from anyformer.config.spec import ConfigError, Fault, Size
from anyformer.decoding.check import check_call
from anyformer.decoding.constraints.constraint import Constraint, check_fit
from anyformer.decoding.constraints.rollback import Retracing
from anyformer.decoding.generate import Spoilt
from anyformer.decoding.logit_processors import Allowed, Processing, Processor, process
from anyformer.decoding.session import Session, evaluating
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.model import Transformer


class Contrastive(Processing):
    """The likeliest tokens, less what repeats."""

    candidates: Size = 5
    alpha: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.6


def contrastive_search(
    model: Transformer,
    ids: Tensor,
    *,
    candidates: int = 5,
    alpha: float = 0.6,
    max_new_tokens: int | Sequence[int] = 20,
    stop: Sequence[int] = (),
    constraint: Constraint | None = None,
    processors: Sequence[Processor] = (),
    segments: Tensor | None = None,
    marks: Tensor | None = None,
    cache: CacheKind = "auto",
) -> Tensor:
    """Continues prompts [b, t] to [b, t + new], or answers sources [b, s] with [b, 1 + new]; all else as in `generate`.

    Each step tries all candidates out: a pass over [b * candidates]. With an `alpha` of 0 the likeliest is chosen. The
    last token is read, too: an answer of n tokens takes n positions.
    """
    Contrastive(candidates=candidates, alpha=alpha)
    rooms, stop = check_call(
        model,
        ids,
        max_new_tokens,
        stop,
        constraint=constraint,
        processors=processors,
        segments=segments,
        marks=marks,
        cache=cache,
    )
    with evaluating(model):
        most = max(rooms, default=0)
        session = Session(model, ids, most, segments=segments, marks=marks, cache=cache, copies=candidates)
        vocab, device = session.logits.shape[-1], session.ids.device
        if candidates > vocab:
            raise ConfigError([Fault("candidates", f"= {candidates}: the vocabulary has {vocab}")])
        ending, filler = torch.tensor(list(stop), dtype=torch.long, device=device), session.filler(stop)
        first = torch.arange(0, len(session.ids), candidates, device=device)  # all rows of a prompt are equal here
        room = torch.tensor(rooms, device=device)
        ended, spoilt = room == 0, torch.zeros(len(first), dtype=torch.bool, device=device)
        if constraint is not None:
            check_fit(constraint, vocab, stop)
            mask = Retracing(constraint, [room for room in rooms for _ in range(candidates)], device)
            processors = (*processors, Allowed(mask))
        before = _directions(session.hidden[first])  # [b, n, d]
        for step in range(most):
            logits = process(processors, session.history, session.logits)[first]
            spoilt |= ~ended & ~logits.amax(dim=-1).isfinite()
            ended = ended | spoilt
            tried, tokens = logits.topk(candidates)  # [b, k]
            going = ~ended[:, None]
            session.read(tokens.masked_fill(~going, filler).flatten()[:, None], going.repeat_interleave(candidates, 0))
            after = _directions(session.hidden).view(len(first), candidates, -1)
            known = session.there[first, :-1]
            alike = (after @ before.mT).masked_fill(~known[:, None], -math.inf).amax(dim=-1)
            p = logits.softmax(dim=-1).gather(1, tokens)
            worth = ((1 - alpha) * p - alpha * alike).masked_fill(tried.isneginf(), -math.inf)
            best = first + worth.argmax(dim=-1)
            rows = best.repeat_interleave(candidates)
            session.reorder(rows)
            session.hidden, session.logits = session.hidden[rows], session.logits[rows]
            before = torch.cat((before, _directions(session.hidden[first])), dim=1)
            ended = ended | torch.isin(session.ids[first, -1], ending) | (room <= step + 1)
            if bool(ended.all()):
                break
        out = session.ids[first]
        session.close()
    if bool(spoilt.any()):
        raise Spoilt(spoilt.nonzero()[:, 0].tolist(), out)
    return out


def _directions(hidden: Tensor) -> Tensor:
    return normalize(at_least_fp32(hidden), dim=-1)
