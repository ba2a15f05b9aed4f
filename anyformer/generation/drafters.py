"""Sources of draft tokens for speculative decoding: a smaller model, lookup in the texts, or the model's own layers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyformer.generation.logit_processors import History, Processor, process
from anyformer.generation.request import Request
from anyformer.generation.sampling import choose, widest
from anyformer.generation.session import Session
from anyformer.nn.heads import VocabularyHead
from anyformer.nn.model import Transformer

DRAFT_STEP = 1 << 30  # added to the step: noise of drafts, independent of that of tokens


class Proposal(NamedTuple):
    """Draft tokens of each row."""

    ids: Tensor  # int [b, k]
    present: Tensor  # bool [b, k]: True for the first ones of each row
    p: Tensor | None = None  # the probabilities [b, k, v] that they were sampled with; None: not sampled


class Drafter(Protocol):
    """Source of draft tokens: a smaller model, lookup in the texts, or the model's own layers."""

    def propose(self, history: History, limit: Tensor) -> Proposal:
        """Draft up to `limit` [b] next tokens."""

    def accept(self, session: Session, accepted: Tensor) -> None:
        """Note that the first `accepted` [b] draft tokens were kept; the next history ends with one token more."""
        return  # a drafter may read the history alone

    def close(self) -> None:
        """End drafting."""
        return


class ModelDrafter(Drafter):
    """Drafts by a model that chooses tokens as the large one does."""

    def __init__(self, session: Session, processors: Sequence[Processor], seeds: Tensor | None):
        self.session, self.processors, self.seeds = session, processors, seeds
        self.proposal, self.read = no_tokens(session.ids), session.ids.new_zeros(len(session.ids))  # read of them
        # the last draft token, where it was accepted but not read
        self.unread, self.is_unread = session.ids[:, :1], torch.zeros_like(session.ids[:, :1], dtype=torch.bool)
        self.full = torch.zeros_like(self.read, dtype=torch.bool)  # rows at the draft's last position

    def propose(self, history: History, limit: Tensor) -> Proposal:
        limit = self._within_positions(limit)
        longest = int(limit.max())
        new, present = history.ids[:, -1:], (limit > 0)[:, None]
        if bool(self.is_unread.any()):
            new, present = torch.cat((self.unread, new), dim=1), torch.cat((self.is_unread & present, present), dim=1)
        self.read = torch.zeros_like(limit)
        running, ids, drafted, p = limit > 0, [], [], []
        for n in range(longest):
            logits = process(self.processors, history, self.session.read(new, present)[:, -1])
            choice = choose(logits, self.seeds, history.answered() + DRAFT_STEP)
            running = running & (limit > n) & choice.ok
            ids.append(choice.ids)
            drafted.append(running)
            if self.seeds is not None:
                p.append(logits.to(widest(logits.device)).softmax(dim=-1))
            history = extended(history, choice.ids, running)
            new, present = choice.ids[:, None], (running & (limit > n + 1))[:, None]
            self.read = self.read + present[:, 0]
        self.proposal = no_tokens(history.ids)
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

    def accept(self, session: Session, accepted: Tensor) -> None:
        self.session.forget((self.read - accepted).clamp(min=0))
        self.is_unread = (accepted > self.read)[:, None]  # it does not read its own last token
        if self.proposal.ids.shape[1]:
            self.unread = self.proposal.ids.gather(1, (accepted - 1).clamp(min=0)[:, None])

    def close(self) -> None:
        self.session.close()


class LookupDrafter(Drafter):
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
            return no_tokens(ids)
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


class HeadDrafter(Drafter):
    """Drafts by the model's own layers for further tokens, from the hidden state of the last token that was kept.

    Every proposal has the same shape, and nothing is read by the host: a step with drafts is captured as one graph.
    """

    def __init__(self, session: Session, ahead: int):
        head = session.model.head
        assert isinstance(head, VocabularyHead)
        assert head.further is not None
        self.width = min(ahead, len(head.further))
        self.ids = torch.zeros(len(session.ids), self.width, dtype=torch.long, device=session.ids.device)

    def begin(self, session: Session) -> None:
        """Draft from the last tokens of the prompts."""
        present = session.present[:, : session.prompt_length][:, -session.hidden.shape[1] :]
        index = torch.arange(present.shape[1], device=present.device)
        self.draft(session, torch.where(present, index, 0).amax(dim=1))

    def draft(self, session: Session, kept: Tensor) -> None:
        """Draft from the token at index `kept` [b] among those read last."""
        model, hidden = session.model, session.hidden
        assert isinstance(model.head, VocabularyHead)
        last = hidden.gather(1, kept[:, None, None].expand(-1, 1, hidden.shape[2]))
        found = model.head.further_logits(last, model.table(model.target), self.width)
        self.ids.copy_(found.argmax(dim=-1))

    def propose(self, history: History, limit: Tensor) -> Proposal:
        return Proposal(self.ids, torch.arange(self.width, device=limit.device) < limit[:, None])

    def accept(self, session: Session, accepted: Tensor) -> None:
        self.draft(session, accepted)


def source_of(model: Transformer, request: Request) -> tuple[Tensor, Tensor]:
    """Return the ids of a source that drafts may be copied from, and which are present; no ids if there is none."""
    source, target = model.config.source, model.config.target
    ids, present = request.ids, request.present
    if not source or not target or source.rows != target.rows:
        ids, present = ids.new_zeros(len(ids), 0, dtype=torch.long), None
    return ids, torch.ones_like(ids, dtype=torch.bool) if present is None else present.expand_as(ids)


def no_tokens(ids: Tensor) -> Proposal:
    return Proposal(ids[:, :0], torch.zeros_like(ids[:, :0], dtype=torch.bool))


def extended(history: History, ids: Tensor, present: Tensor) -> History:
    """Return the history with one token more in each row [b], where it is `present`."""
    new = torch.ones_like(present)
    return History(*(torch.cat((x, y[:, None]), dim=1) for x, y in zip(history, (ids, present, new), strict=True)))
