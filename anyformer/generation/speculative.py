"""Speculative decoding: draft some tokens, and let the model verify all of them in one call.

Draft tokens are kept up to the first that the model rejects, which its own token replaces. So each call yields one to
`ahead` + 1 tokens, and the answer is as good as one decoded token by token.

- Greedy decoding, or drafts without a distribution: a draft token is kept if it is the token that `generate` chooses.
- Tokens sampled by a draft model: token x is kept with probability min(1, p(x) / q(x)), where p is the model's
  distribution and q the draft's; otherwise a token is sampled from max(p - q, 0), rescaled (Leviathan et al. 2023, Chen
  et al. 2023). Whatever q is, tokens have the probabilities p.

Rows accept different numbers of tokens. The others are dropped: the next tokens overwrite their slots in the cache.
"""

from collections.abc import Generator, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyformer.config import ModelConfig
from anyformer.config.spec import ConfigError, Fault
from anyformer.generation.drafters import (
    Drafter,
    HeadDrafter,
    LookupDrafter,
    ModelDrafter,
    Proposal,
    extended,
    no_tokens,
    source_of,
)
from anyformer.generation.generate import NonFiniteLogits, steps_between_checks
from anyformer.generation.prefill import synchronises
from anyformer.generation.request import Request, check_request
from anyformer.generation.session import Session
from anyformer.generation.step import compiled
from anyformer.generation.strategy import Draft, Lookup, OwnHead, Speculation
from anyformer.generation.verifier import Verifier
from anyformer.nn.eval_mode import run_steps, without_dropout
from anyformer.nn.model import Transformer


class Speculated(NamedTuple):
    """Answers, and what they cost: without drafts there is one call for each token of the longest answer."""

    ids: Tensor  # as of `generate`
    calls: int  # of the model, that of the prompt included
    drafted: Tensor  # int [b], draft tokens
    accepted: Tensor  # int [b], those of them that were kept


def speculate(
    model: Transformer, ids: Tensor, *, draft: Draft | Lookup | OwnHead, ahead: int = 4, **options: Any
) -> Speculated:
    """Return what `generate` returns for the same `options`, with up to `ahead` draft tokens before each call.

    Greedy tokens are the same, as far as rounding goes. So are tokens sampled with a `Lookup`; with a `Draft` the same
    seed samples other tokens, with the same probabilities.
    """
    request = Request.of(Speculation, ids, {"draft": draft, "ahead": ahead, **options})
    return run_steps(model, speculation_steps(model, request))


def speculation_steps(model: Transformer, request: Request) -> Generator[None, None, Speculated]:
    """Return prompts and answers [b, t + new], step by step; raise `NonFiniteLogits` if rows failed."""
    check_request(model, request)
    strategy = request.strategy
    assert isinstance(strategy, Speculation)
    draft, ahead = strategy.draft, strategy.ahead
    if isinstance(draft, Draft):
        _check_draft(model, draft.model, request)
    with without_dropout(draft.model if isinstance(draft, Draft) else model):
        session = _session(model, request, ahead)
        key = _key(session, request, strategy)
        verifier = session.buffers.keep(key, lambda: Verifier(session, request, ahead))
        verifier.begin(request)
        drafter = _drafter(session, request, strategy, verifier, key)
        if request.longest:
            verifier.verify(session, session.logits[:, None], no_tokens(session.ids))
        # with a key drafts have one shape and need no host, so that all of a step can be compiled, not the read alone
        fused = key is not None and session.compile and not verifier.processors
        names = id(session.model), key, *session.ids.shape
        propose = compiled(_propose, *names) if fused else _propose
        settle = compiled(_settle, *names) if fused else _settle

        def move() -> None:
            new, present, proposal = propose(session, verifier, drafter, ahead)
            settle(session, verifier, drafter, session.read(new, present), proposal)

        most = 1 if key is None else steps_between_checks(session.ids.device, can_end=len(verifier.stop) > 0)
        while left := int(torch.where(verifier.running, verifier.budgets - verifier.count, 0).amax()):
            for _ in range(min(most, -(-left // (ahead + 1)))):  # no fewer steps can be enough, unless rows stop
                session.run_step(move, key)
                yield
        out = torch.cat((session.prompt_ids, verifier.ids[:, : int(verifier.count.max())]), dim=1)
        found = Speculated(out, 1 + int(verifier.calls), verifier.drafted.clone(), verifier.accepted.clone())
        failed = verifier.failed.nonzero()[:, 0].tolist()
        session.close()
        drafter.close()
    if failed:
        raise NonFiniteLogits(failed, out)
    return found


def _session(model: Transformer, request: Request, ahead: int) -> Session:
    # a draft model also reads a token that it drafted last
    return Session(model, request, extra=ahead + 2, slack=ahead + 1)


def _key(session: Session, request: Request, strategy: Speculation) -> Hashable | None:
    """Return the key of steps that can be captured: those with drafts by the model's own layers.

    Constraints, the caller's processors, a check of positions and some modules synchronise with the host.
    """
    captured = isinstance(strategy.draft, OwnHead) and request.constraint is None and not request.processors
    if not captured or not session.fits or synchronises(session.model):
        return None
    return "speculate", strategy, request.stop_ids, session.fill_id(request.stop_ids)


def _drafter(
    session: Session, request: Request, strategy: Speculation, verifier: Verifier, key: Hashable | None
) -> Drafter:
    draft, ahead = strategy.draft, strategy.ahead
    if isinstance(draft, Draft):
        # a Reuse remembers the texts of one model
        own = _session(draft.model, replace(request, reuse=None), ahead)
        return ModelDrafter(own, verifier.processors, verifier.seeds)
    if isinstance(draft, Lookup):
        return LookupDrafter(draft.ngram, *source_of(session.model, request))

    drafter = session.buffers.keep(key and ("drafts", key), lambda: HeadDrafter(session, ahead))
    drafter.begin(session)
    return drafter


def _propose(session: Session, verifier: Verifier, drafter: Drafter, ahead: int) -> tuple[Tensor, Tensor, Proposal]:
    """Return the next tokens to read [b, 1 + k], which of them are present, and the draft tokens among them."""
    running, newest = verifier.running, verifier.newest()
    verifier.calls += running.any()
    limit = torch.where(running, verifier.budgets - verifier.count - 1, 0).clamp(max=ahead)
    history = session.history if isinstance(drafter, HeadDrafter) else extended(session.history, newest, running)
    proposal = drafter.propose(history, limit)
    present = torch.cat((running[:, None], proposal.present), dim=1)
    return torch.cat((newest[:, None], proposal.ids), dim=1), present, proposal


def _settle(session: Session, verifier: Verifier, drafter: Drafter, logits: Tensor, proposal: Proposal) -> None:
    """Append verified tokens, drop rejected drafts from the cache, and draft again."""
    accepted = verifier.verify(session, logits, proposal)
    session.forget(proposal.present.sum(dim=1) - accepted)
    drafter.accept(session, accepted)


# -- checks of drafts -----------------------------------------------------------------------------------------------


def _check_draft(model: Transformer, draft: Transformer, request: Request) -> None:
    """Refuse a draft model of another kind, and one that cannot read the prompts or sources.

    A draft that reaches its last position later on only stops drafting.
    """
    if wrong := _mismatch(model.config, draft.config):
        raise ConfigError([Fault("draft", wrong)])
    stack, reader = draft.encoder or draft.decoder, draft.source or draft.target
    if stack is None or reader is None or not stack.ends:
        return
    (limit, what), length = stack.ends[0], reader.measure(request.ids)[1]
    if request.present is not None:
        length = int(request.present.sum(dim=1).amax())
    if length > limit:
        fix = "give shorter ones, or another draft"
        raise ConfigError([Fault("draft", f"has {limit} {what}, and what it reads first is of {length} tokens: {fix}")])


def _mismatch(ours: ModelConfig, its: ModelConfig) -> str | None:
    """Return why a model cannot draft for another, if so."""
    if not its.generates:
        return "cannot draft tokens: must be a model with a decoder and an `lm` head"
    shapes = ["decoder-only" if config.encoder is None else "encoder-decoder" for config in (its, ours)]
    if shapes[0] != shapes[1]:
        return f"is {shapes[0]}: must be {shapes[1]} like the model"
    for name in ("source", "target"):
        a, b = getattr(its, name), getattr(ours, name)
        if type(a) is not type(b):
            return f"has a {name} of kind '{a.kind}': must be '{b.kind}' like the model's"
        if a is not None and a.rows != b.rows:
            return f"has a {name} vocabulary of {a.rows}: must be {b.rows} like the model's"
    return None
