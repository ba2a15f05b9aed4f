"""Phrases that must appear in the answer: the automaton of lexically constrained beam search (Post & Vilar 2018).

Each phrase stands somewhere in the answer as it is, token after token; two may overlap, or lie one within the other.
One that can be written in several `Ways` is there when any of them is.
Any token may come at any time, save that the answer ends only when all phrases are there. What a mask cannot do, a
search must: bring them in. A beam search by dynamic allocation shares its beam out over the banks 0 to `total`, where
`progress` says the bank of a hypothesis, and gives each the tokens of `wanted` as candidates beside its likeliest.

    states = 2 + set of phrases met (a bit each) * nodes + node of the automaton of Aho & Corasick (1975)

All is arithmetic and small tables: no host work.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.config.spec import ConfigError, Fault
from anyformer.decoding.constraints.automaton import BROKEN, ENDED
from anyformer.decoding.constraints.constraint import Constraint, check_ids

MOST = 32


class Ways(tuple[tuple[int, ...], ...]):
    """The sequences of ids that one phrase can be written as."""


Phrase = Sequence[int] | Ways


def ways(phrase: Phrase) -> Ways:
    return phrase if isinstance(phrase, Ways) else Ways([tuple(phrase)])


def shortest(phrase: Phrase) -> int:
    """How many tokens it takes."""
    return min(map(len, ways(phrase)))


class Phrases(Constraint):
    """The answer holds every one of the given sequences of ids."""

    def __init__(self, phrases: Sequence[Phrase], *, vocab: int, stop: Sequence[int]):
        super().__init__(vocab, stop)
        if not 1 <= len(phrases) <= MOST:
            raise ConfigError([Fault("phrases", f"has {len(phrases)}; there must be 1 to {MOST}")])
        self.phrases = list(map(ways, phrases))
        for n, phrase in enumerate(self.phrases):
            if not phrase or not all(phrase):
                raise ConfigError([Fault(f"phrases.{n}", "is empty")])
            for way in phrase:
                check_ids(f"phrases.{n}", way, vocab, taken=stop)
        self.total = sum(map(shortest, self.phrases))
        written = [way for phrase in self.phrases for way in phrase]
        prefixes = sorted({way[:end] for way in written for end in range(len(way) + 1)}, key=len)
        numbers = {prefix: n for n, prefix in enumerate(prefixes)}
        self._nodes = len(prefixes)
        follow = torch.zeros(self._nodes, vocab, dtype=torch.int32)
        for prefix, n in numbers.items():
            if prefix:
                follow[n] = follow[_longest_suffix(prefix, numbers)]  # shorter, so done before
            for token in {longer[-1] for longer in prefixes if longer and longer[:-1] == prefix}:
                follow[n, token] = numbers[*prefix, token]
        ends = [
            sum(1 << i for i, phrase in enumerate(self.phrases) if any(_ends(prefix, way) for way in phrase))
            for prefix in prefixes
        ]
        ahead = [
            [shortest(phrase) - min(len(way) - _overlap(prefix, way) for way in phrase) for phrase in self.phrases]
            for prefix in prefixes
        ]
        following = [[way[_overlap(prefix, way)] for way in written] for prefix in prefixes]
        self._tables = _Tables(
            follow=follow,
            ends=torch.tensor(ends),
            ahead=torch.tensor(ahead),
            following=torch.tensor(following),
            owners=torch.tensor([i for i, phrase in enumerate(self.phrases) for _ in phrase]),
            lengths=torch.tensor(list(map(shortest, self.phrases))),
            stops=torch.isin(torch.arange(vocab), torch.tensor(list(stop))),
        )

    def start(self) -> int:
        return ENDED + 1

    def allowed(self, states: Tensor) -> Tensor:
        may_end = (states <= ENDED) | (self.met(states) == len(self.phrases))
        return torch.where(self._at(states.device).stops, may_end[:, None], (states > ENDED)[:, None])

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        tables = self._at(states.device)
        node, sets = self._parted(states)
        node = tables.follow[node, tokens].long()
        following = ENDED + 1 + (sets | tables.ends[node]) * self._nodes + node
        ended = torch.where(self.met(states) == len(self.phrases), ENDED, BROKEN)
        return torch.where(tables.stops[tokens], ended, following).where(states > ENDED, states)

    def met(self, states: Tensor) -> Tensor:
        """How many phrases are there, [b]; all of them where the answer has ended."""
        return self._has(states).sum(dim=1)

    def progress(self, states: Tensor) -> Tensor:
        """The bank, [b], 0 to `total`: tokens of the phrases that are there, and of the best that has begun."""
        return (self._has(states) * self._at(states.device).lengths).sum(dim=1) + self.begun(states).amax(dim=1)

    def begun(self, states: Tensor) -> Tensor:
        """How many tokens of each phrase that is not there the answer ends in, [b, phrases]; 0 for those that are.
        Where a phrase can be written in several ways: how many fewer it still takes."""
        ahead = self._at(states.device).ahead
        return ahead[self._parted(states)[0]].masked_fill(self._has(states), 0)

    def wanted(self, states: Tensor) -> Tensor:
        """For each way of a phrase that is not there, the token that brings it on, [b, ways]; -1 for those that are."""
        tables = self._at(states.device)
        return tables.following[self._parted(states)[0]].masked_fill(self._has(states)[:, tables.owners], -1)

    def _has(self, states: Tensor) -> Tensor:
        """Which phrases are there, bool [b, phrases]."""
        bits = torch.arange(len(self.phrases), device=states.device)
        found = (self._parted(states)[1][:, None] >> bits & 1).bool()
        return torch.where((states > ENDED)[:, None], found, (states == ENDED)[:, None])

    def _parted(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The node, and the set of phrases met."""
        state = (states - ENDED - 1).clamp(min=0)
        return state % self._nodes, state // self._nodes

    def _at(self, device: torch.device) -> "_Tables":
        if self._tables.stops.device != device:
            self._tables = _Tables(*(table.to(device) for table in self._tables))
        return self._tables


class _Tables(NamedTuple):
    follow: Tensor  # [node, v]: the node after each token
    ends: Tensor  # [node]: the phrases that end there, a bit each
    ahead: Tensor  # [node, phrase]: how far each phrase has come
    following: Tensor  # [node, way]: the token that each way of a phrase goes on with
    owners: Tensor  # [way]: its phrase
    lengths: Tensor  # [phrase]
    stops: Tensor  # bool [v]


def _ends(prefix: tuple[int, ...], phrase: tuple[int, ...]) -> bool:
    return prefix[-len(phrase) :] == phrase


def _overlap(prefix: tuple[int, ...], phrase: tuple[int, ...]) -> int:
    """How much of a phrase, less than all of it, the end of a prefix is."""
    most = min(len(prefix), len(phrase) - 1)
    return next(n for n in range(most, -1, -1) if prefix[len(prefix) - n :] == phrase[:n])


def _longest_suffix(prefix: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> int:
    """The node of the longest proper end of a prefix that is a prefix too."""
    return next(numbers[prefix[n:]] for n in range(1, len(prefix) + 1) if prefix[n:] in numbers)
