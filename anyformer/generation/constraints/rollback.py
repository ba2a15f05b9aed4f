"""A constraint as a mask over any history: it continues from the states of the previous one, even if tokens were
dropped since."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyformer.generation.constraints.constraint import Constraint
from anyformer.generation.logit_processors import History


class ConstraintMask:
    """The ids that a constraint allows each row [b] next, so that its answer is complete within its budget.

    The states along the last answer are kept: of another answer, only what differs is advanced through.
    """

    def __init__(self, constraint: Constraint, budgets: Sequence[int], device: torch.device):
        self._constraint = constraint
        self._budgets = torch.tensor(list(budgets), device=device)
        self._known = torch.zeros_like(self._budgets)  # tokens of the answers whose states are known
        self._answers = self._budgets.new_zeros(len(self._budgets), 0)
        self._states = torch.full_like(self._budgets, constraint.start())[:, None]  # before each of them, and after

    def __call__(self, history: History) -> Tensor:
        present, count = history.present & history.new, history.answered()
        order = (~present).byte().argsort(dim=1, stable=True)  # the answer first
        answers = history.ids.gather(1, order)
        index = torch.arange(answers.shape[1], device=count.device)
        more = max(0, len(index) - self._answers.shape[1])
        self._answers, self._states = pad(self._answers, (0, more)), pad(self._states, (0, more))

        same = (index < torch.minimum(count, self._known)[:, None]) & (answers == self._answers[:, : len(index)])
        begin = same.cumprod(dim=1).sum(dim=1)
        self._known = torch.where(begin == count, self._known, count)
        self._answers[:, : len(index)] = torch.where(index < count[:, None], answers, self._answers[:, : len(index)])
        for step in range(int((count - begin).amax())):
            at = (begin + step).minimum(count - 1).clamp(min=0)[:, None]  # finished rows stay at their last token
            state = self._states.gather(1, at)[:, 0]
            after = self._constraint.advance(state, answers.gather(1, at)[:, 0])
            old = self._states.gather(1, at + 1)[:, 0]
            self._states.scatter_(1, at + 1, after.where(begin + step < count, old)[:, None])
        return self._constraint.allowed_within(self._states.gather(1, count[:, None])[:, 0], self._budgets - count)
