"""Verification of draft tokens: which are kept, and the token after them, for all rows and drafts at once."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyformer.generation.drafters import Proposal
from anyformer.generation.generate import AnswerRows
from anyformer.generation.logit_processors import process
from anyformer.generation.request import Request
from anyformer.generation.sampling import TokenChoice, bits, choose, widest
from anyformer.generation.session import Session
from anyformer.kernels.runtime import at_least_fp32

TEST_STEP = 2 << 30  # added to the step: noise of tests, independent of that of drafts and tokens


class Verifier(AnswerRows):
    """Answers that are extended by verified tokens."""

    def __init__(self, session: Session, request: Request, ahead: int):
        super().__init__(session, request, request.longest + ahead + 1)  # drafts past a budget, too
        self.drafted, self.accepted = (torch.zeros_like(self.budgets) for _ in range(2))
        self.running, self.failed = (torch.zeros_like(self.budgets, dtype=torch.bool) for _ in range(2))
        self.calls = torch.zeros_like(self.budgets[:1])  # of the model while a row was running

    def begin(self, request: Request) -> None:
        super().begin(request)
        self.ids.fill_(self.fill)
        for x in (self.drafted, self.accepted, self.failed, self.calls):
            x.zero_()
        self.running.copy_(self.budgets > 0)

    def newest(self) -> Tensor:
        """Return the last token of each answer, [b]."""
        return self.ids.gather(1, (self.count - 1).clamp(min=0)[:, None])[:, 0]

    def verify(self, session: Session, logits: Tensor, proposal: Proposal) -> Tensor:
        """Append the accepted draft tokens and one token more; return how many were accepted, [b].

        Logits [b, k + 1, v] are those before each of the k draft tokens and after the last.
        """
        index = torch.arange(logits.shape[1], device=logits.device)
        choice, accepted = self._test(self._processed(session, logits, proposal), proposal)  # [b, k + 1]
        tokens, at = torch.where(choice.ok, choice.ids, self.fill), self.count[:, None] + index
        over = ~choice.ok | torch.isin(tokens, self.stop) | (at + 1 >= self.budgets[:, None])
        # a token is appended if its row is running and each draft token before it was kept and ended nothing
        before = pad((accepted & ~over)[:, :-1], (1, 0), value=True)
        active = self.running[:, None] & before.cumprod(dim=1).bool()
        kept = active.sum(dim=1)
        self.ids.scatter_(1, at, torch.where(active, tokens, self.ids.gather(1, at)))
        self.count += kept
        self.accepted += (active & accepted).sum(dim=1)
        self.drafted += proposal.present.sum(dim=1)
        self.failed |= (active & ~choice.ok).any(dim=1)
        self.running &= ~(active & over).any(dim=1)
        return (kept - 1).clamp(min=0)  # the last token is not read yet

    def _processed(self, session: Session, logits: Tensor, proposal: Proposal) -> Tensor:
        """Return the logits as they are after each draft token, with the history up to there."""
        if not self.processors:
            return at_least_fp32(logits)
        history, index = session.history, torch.arange(session.ids.shape[1], device=logits.device)
        first = session.cache.row_length - proposal.present.sum(dim=1)  # the slot of the first draft token
        found = []
        for n in range(logits.shape[1]):
            known = history.present & (index < (first + n)[:, None])
            found.append(process(self.processors, history._replace(present=known), logits[:, n]))
        return torch.stack(found, dim=1)

    def _test(self, logits: Tensor, proposal: Proposal) -> tuple[TokenChoice, Tensor]:
        """Return the next token after each draft token [b, k + 1], and whether it is the next draft token."""
        token, present = pad(proposal.ids, (0, 1)), pad(proposal.present, (0, 1))
        steps = self.count[:, None] + torch.arange(logits.shape[1], device=logits.device)
        if proposal.p is None or self.seeds is None:
            choice = self._choose(logits, steps)
            return choice, present & (choice.ids == token)
        logits = logits.to(widest(logits.device))
        p, q = logits.softmax(dim=-1), pad(proposal.p, (0, 0, 0, 1))
        seeds = self.seeds[:, None].expand_as(steps).flatten()
        u = (bits(seeds, steps.flatten() + TEST_STEP, 1)[:, 0].to(p.dtype) + 0.5).view(steps.shape) * 2.0**-52
        p_token, q_token = (x.gather(2, token[..., None])[..., 0] for x in (p, q))
        accepted = present & (u * q_token < p_token)
        rest = (p - q).clamp(min=0)
        rejected = present & ~accepted & (rest.sum(dim=-1) > 0)  # the sum is 0 only by rounding
        choice = self._choose(torch.where(rejected[..., None], rest.log(), logits), steps)
        return TokenChoice(torch.where(accepted, token, choice.ids), choice.ok), accepted

    def _choose(self, logits: Tensor, steps: Tensor) -> TokenChoice:
        """Return the token of each of [b, n, v] logits."""
        seeds = None if self.seeds is None else self.seeds[:, None].expand_as(steps).flatten()
        found = choose(logits.flatten(0, 1), seeds, steps.flatten())
        return TokenChoice(found.ids.view(steps.shape), found.ok.view(steps.shape))
