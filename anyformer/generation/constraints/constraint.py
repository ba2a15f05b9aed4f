"""Constraints on answers: automata over token ids, whose states are integers, so that a batch of them is a tensor.

    states = torch.full((b,), constraint.start())
    mask = constraint.allowed(states)               # [b, v]: logits elsewhere become -inf
    states = constraint.advance(states, tokens)     # [b]; rows may be reordered like any tensor, as beams are

A stop id is allowed exactly where the answer may end, and some id is always allowed: there are no dead ends. After a
stop id a row has ended, and after a token that was not allowed it is broken; both states are final and allow the stop
ids alone. An answer that is cut off at its budget may be incomplete (see `accepting`). `allowed_within` allows only
what can still be completed in the tokens that are left; for texts one token per missing byte is assumed.

`Trie` and `Phrases` (`phrases.py`) work on the device, without the host. Constraints on texts (`text_constraint.py`)
compute on the host: each call synchronises with the device once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anyformer.config.spec import ConfigError, Fault
from anyformer.generation.constraints.automaton import BROKEN, ENDED, UNREACHABLE


class Constraint(ABC):
    """An automaton over `vocab` token ids, in which the ids of `stop` end an answer."""

    def __init__(self, vocab: int, stop: Sequence[int]):
        check_stop(stop, vocab)
        self.vocab, self.stop = vocab, tuple(stop)

    @abstractmethod
    def start(self) -> int:
        """Return the state before the first token."""

    @abstractmethod
    def allowed(self, states: Tensor) -> Tensor:
        """Return the ids that may come next, bool [b, v], in states [b]."""

    @abstractmethod
    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the states [b] after tokens [b]."""

    def allowed_within(self, states: Tensor, left: Tensor) -> Tensor:
        """Return the allowed ids after which the answer can be complete within `left` [b] tokens, these included and a
        stop id not; where there are none, the ids that bring its end nearest."""
        return self.allowed(states)

    def accepting(self, states: Tensor) -> Tensor:
        """Return where the answer is complete, bool [b]: it has ended, or may end here."""
        return (states != BROKEN) & self.allowed(states)[:, self.stop[0]]

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens, with or without their stop id, are a complete answer."""
        states = torch.tensor([self.start()])
        for token in tokens:
            states = self.advance(states, torch.tensor([token]))
        return bool(self.accepting(states))


def check_stop(stop: Sequence[int], vocab: int) -> None:
    """Raise a `ConfigError` unless there is a stop id and all are within the vocabulary."""
    if not stop:
        raise ConfigError([Fault("stop", "must name at least one id, by which a constrained answer ends")])
    check_ids("stop", stop, vocab)


def check_ids(path: str, ids: Sequence[int], vocab: int, taken: Sequence[int] = ()) -> None:
    """Check that ids are in the vocabulary and that none of them ends an answer."""
    for i in ids:
        if not 0 <= i < vocab:
            raise ConfigError([Fault(path, f"holds id {i}; the vocabulary has ids 0 to {vocab - 1}")])
        if i in taken:
            raise ConfigError([Fault(path, f"holds the stop id {i}: an answer ends there")])


def check_fit(constraint: Constraint, vocab: int, stop: Sequence[int]) -> None:
    """Raise a `ConfigError` unless vocabularies are equal and the constraint's stop ids are among the request's."""
    if constraint.vocab != vocab:
        raise ConfigError([Fault("constraint", f"is over {constraint.vocab} ids, and the model has {vocab}")])
    if not set(constraint.stop) <= set(stop):
        what = f"must hold the ids by which the constraint ends an answer, {list(constraint.stop)}"
        raise ConfigError([Fault("stop", f"= {list(stop)}: {what}")])


def within_budget(allowed: Tensor, needed: Tensor, left: Tensor) -> Tensor:
    """Return which allowed continuations, bool [b, n], end within `left` [b] tokens, where each needs `needed` [b, n]
    more; where none does, those that need the fewest."""
    needed = needed.masked_fill(~allowed, UNREACHABLE)
    return needed < torch.maximum(left, needed.amin(dim=1) + 1)[:, None]


class Trie(Constraint):
    """The answer is one of the given sequences of ids."""

    def __init__(self, sequences: Sequence[Sequence[int]], *, vocab: int, stop: Sequence[int]):
        super().__init__(vocab, stop)
        if not sequences:
            raise ConfigError([Fault("sequences", "is empty: give at least one")])
        edges_of: list[dict[int, int]] = [{}, {}, {}]  # BROKEN, ENDED, and the start
        for n, sequence in enumerate(sequences):
            check_ids(f"sequences.{n}", sequence, vocab, taken=stop)
            at = ENDED + 1
            for token in sequence:
                if token not in edges_of[at]:
                    edges_of[at][token] = len(edges_of)
                    edges_of.append({})
                at = edges_of[at][token]
            edges_of[at].update(dict.fromkeys(stop, ENDED))
        for final in (BROKEN, ENDED):
            edges_of[final] = dict.fromkeys(stop, ENDED)
        edges = sorted((state * vocab + token, to) for state, out in enumerate(edges_of) for token, to in out.items())
        self._keys, self._targets = (torch.tensor(column) for column in zip(*edges, strict=True))
        self._bounds = torch.tensor([0, *np.cumsum([len(out) for out in edges_of]).tolist()])
        self._max_edges = max(map(len, edges_of))
        needed = [0] * len(edges_of)  # tokens from each state to a complete answer
        for state in reversed(range(ENDED + 1, len(edges_of))):  # edges lead to later states
            if ENDED not in edges_of[state].values():
                needed[state] = 1 + min(needed[to] for to in edges_of[state].values())
        self._needed = torch.tensor(needed)

    def start(self) -> int:
        return ENDED + 1

    def allowed(self, states: Tensor) -> Tensor:
        return self._mask(states, None)

    def allowed_within(self, states: Tensor, left: Tensor) -> Tensor:
        return self._mask(states, left)

    def _mask(self, states: Tensor, left: Tensor | None) -> Tensor:
        self._follow(states.device)
        keys, bounds = self._keys, self._bounds
        index = bounds[states][:, None] + torch.arange(self._max_edges, device=states.device)  # [b, edges]
        exists = index < bounds[states + 1][:, None]
        index = index.clamp(max=len(keys) - 1)
        if left is not None:
            exists = within_budget(exists, self._needed[self._targets[index]], left)
        tokens = (keys[index] % self.vocab).where(exists, self.vocab)  # the last column is dropped
        mask = torch.zeros(len(states), self.vocab + 1, dtype=torch.bool, device=states.device)
        return mask.scatter_(1, tokens, True)[:, : self.vocab]

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        self._follow(states.device)
        key = states * self.vocab + tokens
        index = torch.searchsorted(self._keys, key).clamp(max=len(self._keys) - 1)
        following = self._targets[index].where(self._keys[index] == key, BROKEN)
        return following.where(states > ENDED, states)

    def _follow(self, device: torch.device) -> None:
        if self._keys.device != device:
            tables = (self._keys, self._targets, self._bounds, self._needed)
            self._keys, self._targets, self._bounds, self._needed = (table.to(device) for table in tables)
