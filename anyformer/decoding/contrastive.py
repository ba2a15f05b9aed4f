"""Contrastive search (Su et al. 2022): of the likeliest tokens, the one that repeats least what was said before.

    (1 - penalty) · p(token) - penalty · max over all tokens before of cos(its hidden state, theirs)

with hidden states of the last layer, after the final norm.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from anyformer.config.spec import ConfigError, Fault
from anyformer.decoding.decode import Spoilt
from anyformer.decoding.process import Processor, process
from anyformer.decoding.session import Session, evaluating
from anyformer.nn.cache import CacheKind
from anyformer.nn.model import Transformer
from anyformer.nn.norm import at_least_fp32


def contrastive_search(
    model: Transformer,
    ids: Tensor,
    *,
    candidates: int = 5,
    penalty: float = 0.6,
    max_new_tokens: int = 20,
    stop: Sequence[int] = (),
    processors: Sequence[Processor] = (),
    segments: Tensor | None = None,
    cache: CacheKind = "auto",
) -> Tensor:
    """Continues prompts [b, t] to [b, t + new], or answers sources [b, s] with [b, 1 + new]; all else as in `generate`.

    Each step tries all candidates out: a pass over [b * candidates]. With a penalty of 0 the likeliest is chosen.
    """
    faults = []
    if candidates < 1:
        faults.append(Fault("candidates", f"= {candidates}: must be at least 1"))
    if not 0 <= penalty <= 1:
        faults.append(Fault("penalty", f"= {penalty}: must be from 0 to 1"))
    if max_new_tokens < 0:
        faults.append(Fault("max_new_tokens", f"= {max_new_tokens}: must not be negative"))
    if faults:
        raise ConfigError(faults)
    with evaluating(model):
        session = Session(model, ids, max_new_tokens, segments=segments, cache=cache, copies=candidates)
        vocab, device = session.logits.shape[-1], session.ids.device
        if candidates > vocab:
            raise ConfigError([Fault("candidates", f"= {candidates}: the vocabulary has {vocab}")])
        ending, filler = torch.tensor(list(stop), dtype=torch.long, device=device), session.filler(stop)
        first = torch.arange(0, len(session.ids), candidates, device=device)  # all rows of a prompt are equal here
        ended, spoilt = (torch.zeros(len(first), dtype=torch.bool, device=device) for _ in range(2))
        before = _directions(session.hidden[first])  # [b, n, d]
        for _ in range(max_new_tokens):
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
            worth = ((1 - penalty) * p - penalty * alike).masked_fill(tried.isneginf(), -math.inf)
            best = first + worth.argmax(dim=-1)
            session.reorder(best.repeat_interleave(candidates))
            before = torch.cat((before, _directions(session.hidden[first])), dim=1)
            ended = ended | torch.isin(session.ids[first, -1], ending)
            if bool(ended.all()):
                break
        out = session.ids[first]
    if bool(spoilt.any()):
        raise Spoilt(spoilt.nonzero()[:, 0].tolist(), out)
    return out


def _directions(hidden: Tensor) -> Tensor:
    return normalize(at_least_fp32(hidden), dim=-1)
