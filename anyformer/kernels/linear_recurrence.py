"""Linear recurrences over matrix states: linear attention, the gated delta rule and Mamba-2's SSD, by their definition.

    S_t = a_t S_{t-1} + k_t v_tᵀ                                   (Katharopoulos et al. 2020; a_t: Mamba-2, GLA)
    S_t = a_t S_{t-1} + k_t r_t (v_t - (a_t S_{t-1})ᵀ k_t)ᵀ        (delta rule, rate r_t: gated DeltaNet, Kimi Linear)
    o_t = S_tᵀ q_t

S is [k, v] in each head. The decay a_t is 1, one number per head, or one per key channel. `recur` is this loop and the
reference; `chunked_recurrence.py` computes the same in matmuls over chunks of tokens. A token with k = 0, a decay of 1
and a rate of 0 leaves the state as it is: that is how padding is read.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.runtime import at_least_fp32


class Recurrence(NamedTuple):
    """Inputs of a linear recurrence, for the tokens of a call. Heads of q and k serve h/g heads of v each."""

    q: Tensor  # [b, g, t, k]
    k: Tensor  # [b, g, t, k]
    v: Tensor  # [b, h, t, v]
    log_decay: Tensor | None = None  # log a_t: [b, h, t], or [b, h, t, k] with a decay per channel; None: a_t = 1
    rate: Tensor | None = None  # of the delta rule [b, h, t]; None: k v is added as it is
    runs: Tensor | None = None  # int [b, t]: number of resets of the state up to each token; None: never reset

    def tokens(self, start: int, stop: int) -> "Recurrence":
        """Return the tokens from `start` on and before `stop`."""
        some = slice(start, stop)
        q, k, v = (x[:, :, some] for x in (self.q, self.k, self.v))
        log_decay, rate = (None if x is None else x[:, :, some] for x in (self.log_decay, self.rate))
        return Recurrence(q, k, v, log_decay, rate, None if self.runs is None else self.runs[:, some])

    def expanded(self) -> "Recurrence":
        """Return the recurrence with q and k repeated for every head of v."""
        repeats = self.v.shape[1] // self.q.shape[1]
        if repeats == 1:
            return self
        return self._replace(q=self.q.repeat_interleave(repeats, dim=1), k=self.k.repeat_interleave(repeats, dim=1))

    def zero_state(self) -> Tensor:
        """Return the state before the first token, [b, h, k, v]."""
        shape = (*self.v.shape[:2], self.k.shape[3], self.v.shape[3])
        return at_least_fp32(self.v.new_zeros(shape))


def recur(x: Recurrence, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, h, t, v] and the last state [b, h, k, v], token by token.

    `state` is that of run 0; None: zero.
    """
    state, out = x.zero_state() if state is None else state, []
    if x.runs is not None:  # how many resets there are at each token
        x = x._replace(runs=x.runs - F.pad(x.runs, (1, -1)))
    for t in range(x.v.shape[2]):
        y, state = step(x.tokens(t, t + 1), state)
        out.append(y)
    return torch.cat(out, dim=2), state


def step(token: Recurrence, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [b, h, 1, v] of one token and the state after it; a run above 0 resets the state."""
    _, _, v, log_decay, rate, runs = token
    q, k = (at_least_fp32(x) for x in token.expanded()[:2])  # [b, h, 1, k]
    if runs is not None:
        state = torch.where((runs == 0)[..., None, None], state, torch.zeros_like(state))
    if log_decay is not None:
        decay = log_decay.exp()
        state = state * (decay[..., None] if decay.dim() == 3 else decay.transpose(2, 3))
    new = at_least_fp32(v)
    with torch.autocast(v.device.type, enabled=False):
        if rate is not None:
            new = rate[..., None] * (new - k @ state)
        state = state + k.transpose(2, 3) @ new
        return (q @ state).to(v.dtype), state
