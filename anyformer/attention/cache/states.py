"""State of a linear-recurrence layer in a cache: of constant size, whatever the length of the text.

A layer stores the newest state of each row, and the newest inputs of its short convolution. With `slack`, it also
stores the states after each of the `slack` tokens before: so up to `slack` tokens can be removed. All are registers,
the newest entry last: new entries are shifted in, removed ones are shifted out.
"""

import torch
from torch import Tensor

from anyformer.attention.cache.layer_cache import CrossStore
from anyformer.config.cost import StateSizes
from anyformer.kernels.conventions import PADDING


class StateCache(CrossStore):
    """State of one layer in every row of a cache."""

    def __init__(self, batch: int, sizes: StateSizes, device: torch.device, dtype: torch.dtype, slack: int):
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)  # sums over the whole text
        shape = (sizes.heads, sizes.key_width, sizes.value_width)
        self.states = torch.zeros(batch, 1 + slack, *shape, device=device, dtype=wide)
        self.inputs = torch.zeros(batch, sizes.tail + slack, sizes.channels, device=device, dtype=dtype)
        entries = max(1, sizes.tail) + slack
        self.segments = torch.full((batch, entries), PADDING, dtype=torch.long, device=device)  # of the newest tokens
        self.runs = torch.zeros(batch, entries, dtype=torch.long, device=device)  # how often the state was reset
        self.removable = torch.full((batch,), slack, dtype=torch.long, device=device)
        self.slack, self.tail = slack, sizes.tail

    def append_facts(self, segments: Tensor, runs: Tensor, count: Tensor) -> None:
        """Store segments and runs [b, t] of new tokens, the last `count` [b] of which are real."""
        for stored, new in ((self.segments, segments), (self.runs, runs)):
            stored.copy_(shift_in(stored, new, count))
        self.removable.copy_((self.removable + count).clamp(max=self.slack))

    def append_inputs(self, inputs: Tensor, count: Tensor) -> None:
        """Store inputs of the convolution [b, t, c], the last `count` [b] of which are real."""
        self.inputs.copy_(shift_in(self.inputs, inputs.to(self.inputs.dtype), count))

    def append_states(self, states: Tensor, count: Tensor) -> None:
        """Store the states [b, n, h, k, v] after the newest n tokens, the last `count` [b] of which are real."""
        if self.slack:
            states = shift_in(self.states, states, count)
        self.states.copy_(states)  # padding has left a state as it was

    def check(self, n: Tensor) -> None:
        """Raise if not all of the newest `n` [b] tokens can be removed."""
        if bool((n > self.removable).any()):
            raise ValueError(
                f"the cache of a recurrent state can remove at most {self.slack} tokens: "
                "use more slack (new_cache(..., slack=n))"
            )

    def forget(self, n: Tensor) -> None:
        """Remove the newest `n` [b] tokens of each row."""
        for x in (self.states, self.inputs, self.segments, self.runs):
            index = (torch.arange(x.shape[1], device=n.device) - n[:, None]).clamp(min=0)
            x.copy_(_gather(x, index))
        self.removable -= n

    def own(self) -> tuple[Tensor, ...]:
        return self.states, self.inputs, self.segments, self.runs, self.removable

    def reset(self) -> None:
        """Empty what `own` returns; zeros are not the empty value of all of it."""
        self.segments.fill_(PADDING)
        self.removable.fill_(self.slack)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.states, self.inputs, *(self.cross or ())


def shift_in(stored: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """Return the newest entries of `stored` [b, n, ...] and the last `count` [b] of `new` [b, t, ...]; n in all."""
    n, t = stored.shape[1], new.shape[1]
    slot, count = torch.arange(n, device=new.device), count[:, None]
    index = torch.where(slot >= n - count, slot + t, slot + count)
    return _gather(torch.cat((stored, new), dim=1), index)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return x [b, n, ...] at `index` [b, m]."""
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))
