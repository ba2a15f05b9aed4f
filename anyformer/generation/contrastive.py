"""Contrastive search (Su et al. 2022): among the top tokens, the one that least repeats what precedes it.

    (1 - alpha) · p(token) - alpha · max over all earlier tokens of cos(its hidden state, theirs)

with hidden states of the last layer, after the final norm.
"""

import math
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from anyformer.generation.generate import NonFiniteLogits
from anyformer.generation.logit_processors import process
from anyformer.generation.request import Request, check_request
from anyformer.generation.session import Session
from anyformer.generation.strategy import Contrastive
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.eval_mode import run_steps
from anyformer.nn.model import Transformer


def contrastive_search(model: Transformer, ids: Tensor, **options: Any) -> Tensor:
    """Continue prompts [b, t] to [b, t + new], or answer sources [b, s] with [b, 1 + new].

    `options` are those of `Request` and of `Contrastive`, and its filters.

    Each step reads all candidates: a pass over [b * candidates]. With an `alpha` of 0 it is greedy. The last token is
    read, too: an answer of n tokens takes n positions.
    """
    return run_steps(model, contrastive_steps(model, Request.of(Contrastive, ids, options)))


def contrastive_steps(model: Transformer, request: Request) -> Generator[None, None, Tensor]:
    """Return prompts and answers [b, t + new], step by step; raise `NonFiniteLogits` if rows failed."""
    check_request(model, request)
    strategy = request.strategy
    assert isinstance(strategy, Contrastive)
    candidates, alpha = strategy.candidates, strategy.alpha
    session = Session(model, request, copies=candidates)
    device = session.ids.device
    processors = session.processors(request)
    stop, fill = torch.tensor(request.stop_ids, dtype=torch.long, device=device), session.fill_id(request.stop_ids)
    first = torch.arange(0, len(session.ids), candidates, device=device)  # the copies of a prompt are equal here
    budgets = torch.tensor(request.budgets, device=device)
    ended, failed = budgets == 0, torch.zeros(len(first), dtype=torch.bool, device=device)
    before = _directions(session.hidden[first])  # [b, n, d]
    for step in range(request.longest):
        logits = process(processors, session.history, session.logits)[first]
        failed |= ~ended & ~logits.amax(dim=-1).isfinite()
        ended = ended | failed
        top, tokens = logits.topk(candidates)  # [b, k]
        running = ~ended[:, None]
        session.read(tokens.masked_fill(~running, fill).flatten()[:, None], running.repeat_interleave(candidates, 0))
        after = _directions(session.hidden).view(len(first), candidates, -1)
        present = session.present[first, :-1]
        similarity = (after @ before.mT).masked_fill(~present[:, None], -math.inf).amax(dim=-1)
        p = logits.softmax(dim=-1).gather(1, tokens)
        score = ((1 - alpha) * p - alpha * similarity).masked_fill(top.isneginf(), -math.inf)
        best = first + score.argmax(dim=-1)
        rows = best.repeat_interleave(candidates)
        session.reorder(rows)
        session.hidden, session.logits = session.hidden[rows], session.logits[rows]
        before = torch.cat((before, _directions(session.hidden[first])), dim=1)
        ended = ended | torch.isin(session.ids[first, -1], stop) | (budgets <= step + 1)
        if bool(ended.all()):
            break
        yield
    out = torch.cat((session.prompt_ids, session.ids[first, session.prompt_length :]), dim=1)
    session.close()
    if bool(failed.any()):
        raise NonFiniteLogits(failed.nonzero()[:, 0].tolist(), out)
    return out


def _directions(hidden: Tensor) -> Tensor:
    return normalize(at_least_fp32(hidden), dim=-1)
