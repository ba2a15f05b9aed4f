"""Speculative decoding: draft some tokens, and let the model verify all of them in one call.

Draft tokens are kept up to the first that the model rejects, which its own token replaces. So each call yields one to
`ahead` + 1 tokens, and the answer is as good as one decoded token by token.

- Greedy decoding, or drafts without a distribution: a draft token is kept if it is the token that `generate` chooses.
- Tokens sampled by a draft model: token x is kept with probability min(1, p(x) / q(x)), where p is the model's
  distribution and q the draft's; otherwise a token is sampled from max(p - q, 0), rescaled (Leviathan et al. 2023, Chen
  et al. 2023). Whatever q is, tokens have the probabilities p.

Rows accept different numbers of tokens. The others are dropped: their slots in the cache are empty again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyformer.attention.layout import real
from anyformer.config import LM, ModelConfig, Tokens
from anyformer.config.spec import ConfigError, Fault
from anyformer.decoding.constraints.constraint import check_fit
from anyformer.decoding.constraints.rollback import ConstraintMask
from anyformer.decoding.generate import NonFiniteLogits, seeds_of
from anyformer.decoding.logit_processors import History, Processor, build, process
from anyformer.decoding.request import Request, RequestOptions, check_request
from anyformer.decoding.sampling import Choice, bits, greedy, sample, widest
from anyformer.decoding.session import Session
from anyformer.decoding.strategy import Draft, Lookup, OwnHead, Speculation
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.heads import VocabularyHead
from anyformer.nn.model import Transformer

DRAFT_STEP, TEST_STEP = 1 << 30, 2 << 30  # added to the step: independent noise for drafts and their tests
CALLS_BETWEEN_COMPACTIONS = 4  # of the cache, whose gaps of dropped tokens are closed then


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
    _check_type(draft)
    own = {name: options.pop(name) for name in RequestOptions.__annotations__ if name in options}
    return run_speculation(model, Request(ids, **own), Speculation(draft=draft, ahead=ahead, **options))


def run_speculation(model: Transformer, request: Request, strategy: Speculation) -> Speculated:
    """Return prompts and answers [b, t + new]; raise `NonFiniteLogits` if rows failed."""
    check_request(model, request, strategy)
    draft, ahead = strategy.draft, strategy.ahead
    if isinstance(draft, Draft):
        _check_draft(model, draft.model, request)
    if isinstance(draft, OwnHead) and not (isinstance(model.config.head, LM) and model.config.head.multi_token):
        what = "the model has no layers for further tokens: train it with model.head.multi_token, or use lookup"
        raise ConfigError([Fault("self_draft", what)])
    with evaluating(model), evaluating(draft.model if isinstance(draft, Draft) else model):
        session = _session(model, request, ahead)
        verifier = Verifier(session, request, strategy)
        drafter: Drafter
        if isinstance(draft, Draft):
            # a Reuse remembers the texts of one model
            own = _session(draft.model, replace(request, reuse=None), ahead)
            drafter = ModelDrafter(own, verifier.processors, verifier.seeds)
        elif isinstance(draft, OwnHead):
            drafter = HeadDrafter(session)
        else:
            drafter = LookupDrafter(draft.ngram, *_source(model, request))
        if request.longest:
            verifier.verify(session.history, session.logits[:, None], _no_tokens(session.ids))
        calls = 1
        while bool(verifier.running.any()):
            running, newest, before = verifier.running, verifier.newest(), verifier.count
            limit = torch.where(running, verifier.budgets - before - 1, 0).clamp(max=ahead)
            proposal = drafter.propose(_extended(session.history, newest, running), limit)
            session.ensure_slots(1 + proposal.ids.shape[1])
            new = torch.cat((newest[:, None], proposal.ids), dim=1)
            logits = session.read(new, torch.cat((running[:, None], proposal.present), dim=1))
            calls += 1
            verifier.verify(session.history, logits, proposal)
            accepted = (verifier.count - before - 1).clamp(min=0)  # the last token picked is not read yet
            session.forget(proposal.present.sum(dim=1) - accepted)
            drafter.accept(accepted)
        out = torch.cat((session.prompt_ids, verifier.ids[:, : int(verifier.count.max())]), dim=1)
        session.close()
        drafter.close()
    if bool(verifier.failed.any()):
        raise NonFiniteLogits(verifier.failed.nonzero()[:, 0].tolist(), out)
    return Speculated(out, calls, verifier.drafted, verifier.accepted)


def _session(model: Transformer, request: Request, ahead: int) -> Session:
    return Session(model, request, extra=CALLS_BETWEEN_COMPACTIONS * (ahead + 1), slack=ahead + 1)


# -- drafts ---------------------------------------------------------------------------------------------------------


class Proposal(NamedTuple):
    """Draft tokens of each row."""

    ids: Tensor  # int [b, k]
    present: Tensor  # bool [b, k]: True for the first ones of each row
    p: Tensor | None = None  # the probabilities [b, k, v] that they were sampled with; None: not sampled


class Drafter(Protocol):
    """Source of draft tokens: a smaller model, or lookup in the texts."""

    def propose(self, history: History, limit: Tensor) -> Proposal:
        """Draft up to `limit` [b] next tokens."""

    def accept(self, accepted: Tensor) -> None:
        """Note that the first `accepted` [b] draft tokens were kept; the next history ends with one token more."""

    def close(self) -> None:
        """End drafting."""


class ModelDrafter:
    """Drafts by a model that chooses tokens as the large one does."""

    def __init__(self, session: Session, processors: Sequence[Processor], seeds: Tensor | None):
        self.session, self.processors, self.seeds = session, processors, seeds
        self.proposal, self.read = _no_tokens(session.ids), session.ids.new_zeros(len(session.ids))  # read of them
        # the last draft token, where it was accepted but not read
        self.unread, self.is_unread = session.ids[:, :1], torch.zeros_like(session.ids[:, :1], dtype=torch.bool)
        self.full = torch.zeros_like(self.read, dtype=torch.bool)  # rows at the draft's last position

    def propose(self, history: History, limit: Tensor) -> Proposal:
        limit = self._within_positions(limit)
        longest = int(limit.max())
        self.session.ensure_slots(longest + 1)
        new, present = history.ids[:, -1:], (limit > 0)[:, None]
        if bool(self.is_unread.any()):
            new, present = torch.cat((self.unread, new), dim=1), torch.cat((self.is_unread & present, present), dim=1)
        self.read = torch.zeros_like(limit)
        running, ids, drafted, p = limit > 0, [], [], []
        for n in range(longest):
            logits = process(self.processors, history, self.session.read(new, present)[:, -1])
            choice = _choose(logits, self.seeds, history.answered() + DRAFT_STEP)
            running = running & (limit > n) & choice.ok
            ids.append(choice.ids)
            drafted.append(running)
            if self.seeds is not None:
                p.append(logits.to(widest(logits.device)).softmax(dim=-1))
            history = _extended(history, choice.ids, running)
            new, present = choice.ids[:, None], (running & (limit > n + 1))[:, None]
            self.read = self.read + present[:, 0]
        self.proposal = _no_tokens(history.ids)
        if longest:
            probabilities = torch.stack(p, dim=1) if p else None
            self.proposal = Proposal(torch.stack(ids, dim=1), torch.stack(drafted, dim=1), probabilities)
        return self.proposal

    def _within_positions(self, limit: Tensor) -> Tensor:
        """Return how many tokens may be drafted where the draft has fewer positions than the model."""
        if self.session.limit is None:
            return limit
        left = self.session.limit - self.session.cache.following - self.is_unread[:, 0].long()
        self.full = self.full | (left < 1)
        return torch.minimum(limit, left).masked_fill(self.full, 0)

    def accept(self, accepted: Tensor) -> None:
        self.session.forget((self.read - accepted).clamp(min=0))
        self.is_unread = (accepted > self.read)[:, None]  # it does not read its own last token
        if self.proposal.ids.shape[1]:
            self.unread = self.proposal.ids.gather(1, (accepted - 1).clamp(min=0)[:, None])

    def close(self) -> None:
        self.session.close()


class LookupDrafter:
    """Drafts copied from the history, and from a source of the same vocabulary [b, s]."""

    def __init__(self, ngram: int, ids: Tensor, present: Tensor):
        self.ngram, self.ids, self.present = ngram, ids, present

    def propose(self, history: History, limit: Tensor) -> Proposal:
        ids = torch.cat((self.ids, history.ids), dim=1)
        present = torch.cat((self.present, history.present), dim=1)
        ids, present = History(ids, present, present).right_aligned()
        last = ids.shape[1] - 1
        longest = int(limit.max())
        if not last or not longest:
            return _no_tokens(ids)
        # length: how many tokens up to each position equal the newest ones
        equal, length = present[:, :last], torch.zeros_like(ids[:, :last])
        for n in range(min(self.ngram, last)):
            earlier, known = (pad(x[:, : last - n], (n, 0)) for x in (ids, present))
            equal = equal & known & (earlier == ids[:, last - n, None])
            length = length + equal
        best = torch.where(length > 0, length * last + torch.arange(last, device=ids.device), -1).max(dim=1)
        # a copy that reaches the newest token continues from the match again
        step = torch.arange(longest, device=ids.device) % (last - best.indices)[:, None]
        drafted = (best.values >= 0)[:, None] & (torch.arange(longest, device=ids.device) < limit[:, None])
        width = int(drafted.sum(dim=1).amax())
        return Proposal(ids.gather(1, best.indices[:, None] + 1 + step)[:, :width], drafted[:, :width])

    def accept(self, accepted: Tensor) -> None:
        """Do nothing: the next history holds the accepted tokens."""

    def close(self) -> None:
        """Do nothing: there is no session."""


class HeadDrafter:
    """Drafts by the model's own layers for further tokens, from the hidden state of the last token that was kept."""

    def __init__(self, session: Session):
        self.session = session
        self.kept: Tensor | None = None  # [b], its index among the tokens read last; None: only prompts were read

    def propose(self, history: History, limit: Tensor) -> Proposal:
        if self.kept is None:  # the hidden states are those of padded prompts
            return _no_tokens(history.ids)
        model, hidden = self.session.model, self.session.hidden
        head = model.head
        assert isinstance(head, VocabularyHead)
        last = hidden.gather(1, self.kept[:, None, None].expand(-1, 1, hidden.shape[2]))
        ids = head.further_logits(last, model.table(model.target)).argmax(dim=-1)
        width = min(ids.shape[1], int(limit.max()))
        return Proposal(ids[:, :width], torch.arange(width, device=ids.device) < limit[:, None])

    def accept(self, accepted: Tensor) -> None:
        self.kept = accepted

    def close(self) -> None:
        """Do nothing: the session is that of the model."""


def _source(model: Transformer, request: Request) -> tuple[Tensor, Tensor]:
    """Return the ids of a source that drafts may be copied from, and which are present; no ids if there is none."""
    source, target = model.config.source, model.config.target
    ids, segments = request.ids, request.segments
    if not isinstance(source, Tokens) or not isinstance(target, Tokens) or source.vocab != target.vocab:
        ids, segments = ids.new_zeros(len(ids), 0, dtype=torch.long), None
    return ids, torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments).expand_as(ids)


def _no_tokens(ids: Tensor) -> Proposal:
    return Proposal(ids[:, :0], torch.zeros_like(ids[:, :0], dtype=torch.bool))


def _extended(history: History, ids: Tensor, present: Tensor) -> History:
    """Return the history with one token more in each row [b], where it is `present`."""
    new = torch.ones_like(present)
    return History(*(torch.cat((x, y[:, None]), dim=1) for x, y in zip(history, (ids, present, new), strict=True)))


# -- verification ---------------------------------------------------------------------------------------------------


class Verifier:
    """The answers so far, extended by verified tokens."""

    def __init__(self, session: Session, request: Request, strategy: Speculation):
        vocab, device, stop = session.logits.shape[-1], session.ids.device, request.stop_ids
        allowed = None
        if request.constraint is not None:
            check_fit(request.constraint, vocab, stop)
            allowed = ConstraintMask(request.constraint, request.budgets, device)
        own = build(strategy, vocab=vocab, stop=stop, allowed=allowed, device=device)
        self.processors: tuple[Processor, ...] = (*request.processors, *own)
        self.seeds = None if strategy.temperature == 0 else seeds_of(request.seed, len(session.ids), device)
        self.fill = session.fill_id(stop)
        self.budgets, self.stop = (torch.tensor(x, dtype=torch.long, device=device) for x in (request.budgets, stop))
        self.ids = torch.full((len(request.budgets), request.longest), self.fill, device=device)
        self.count, self.drafted, self.accepted = (torch.zeros_like(self.budgets) for _ in range(3))
        self.running, self.failed = self.budgets > 0, torch.zeros_like(self.budgets, dtype=torch.bool)

    def newest(self) -> Tensor:
        """Return the last token of each answer, [b]."""
        return self.ids.gather(1, (self.count - 1).clamp(min=0)[:, None])[:, 0]

    def verify(self, history: History, logits: Tensor, proposal: Proposal) -> None:
        """Append the accepted draft tokens and one token more.

        The history ends with the k draft tokens. Logits [b, k + 1, v] are those before each of them and after the last.
        """
        active, width = self.running, proposal.ids.shape[1]
        for n in range(width + 1):
            known = torch.arange(history.ids.shape[1], device=logits.device) < history.ids.shape[1] - width + n
            own = process(self.processors, history._replace(present=history.present & known), logits[:, n])
            if n < width:
                token, present = proposal.ids[:, n], proposal.present[:, n]
                choice, accepted = self._test(own, token, present, None if proposal.p is None else proposal.p[:, n])
            else:
                choice, accepted = _choose(own, self.seeds, self.count), torch.zeros_like(active)
            picked = torch.where(choice.ok, choice.ids, self.fill)
            at = self.count.clamp(max=self.ids.shape[1] - 1)[:, None]
            self.ids.scatter_(1, at, torch.where(active, picked, self.ids.gather(1, at)[:, 0])[:, None])
            self.count = self.count + active
            self.accepted = self.accepted + (active & accepted)
            self.failed = self.failed | (active & ~choice.ok)
            over = ~choice.ok | torch.isin(picked, self.stop) | (self.count >= self.budgets)
            self.running = self.running & ~(active & over)
            active = active & accepted & self.running
        self.drafted = self.drafted + proposal.present.sum(dim=1)

    def _test(self, logits: Tensor, token: Tensor, present: Tensor, q: Tensor | None) -> tuple[Choice, Tensor]:
        """Return the next token of each row, and whether it is the draft token."""
        if q is None or self.seeds is None:
            choice = _choose(logits, self.seeds, self.count)
            return choice, present & (choice.ids == token)
        logits = logits.to(widest(logits.device))
        p = logits.softmax(dim=-1)
        u = (bits(self.seeds, self.count + TEST_STEP, 1)[:, 0].to(p.dtype) + 0.5) * 2.0**-52
        p_token, q_token = (x.gather(1, token[:, None])[:, 0] for x in (p, q))
        accepted = present & (u * q_token < p_token)
        rest = (p - q).clamp(min=0)
        rejected = present & ~accepted & (rest.sum(dim=-1) > 0)  # the sum is 0 only by rounding
        choice = _choose(torch.where(rejected[:, None], rest.log(), logits), self.seeds, self.count)
        return Choice(torch.where(accepted, token, choice.ids), choice.ok), accepted


def _choose(logits: Tensor, seeds: Tensor | None, steps: Tensor) -> Choice:
    return greedy(logits) if seeds is None else sample(logits, seeds, steps)


# -- checks of drafts -----------------------------------------------------------------------------------------------


def _check_type(draft: object) -> None:
    if not isinstance(draft, Draft | Lookup | OwnHead):
        what = f"must be Draft(model), Lookup(ngram=n) or OwnHead(), got {type(draft).__name__}"
        raise ConfigError([Fault("draft", what)])


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
    if request.segments is not None:
        length = int(real(request.segments).sum(dim=1).amax())
    if length > limit:
        fix = "give shorter ones, or another draft"
        raise ConfigError([Fault("draft", f"has {limit} {what}, and what it reads first is of {length} tokens: {fix}")])


def _mismatch(ours: ModelConfig, its: ModelConfig) -> str | None:
    """Return why a model cannot draft for another, if so."""
    if not isinstance(its.head, LM) or its.decoder is None:
        return "cannot draft tokens: must be a model with a decoder and an `lm` head"
    shapes = ["decoder-only" if config.encoder is None else "encoder-decoder" for config in (its, ours)]
    if shapes[0] != shapes[1]:
        return f"is {shapes[0]}: must be {shapes[1]} like the model"
    for name in ("source", "target"):
        a, b = getattr(its, name), getattr(ours, name)
        if type(a) is not type(b):
            return f"has a {name} of kind '{a.kind}': must be '{b.kind}' like the model's"
        if isinstance(a, Tokens) and a.vocab != b.vocab:
            return f"has a {name} vocabulary of {a.vocab}: must be {b.vocab} like the model's"
    return None
