"""Phrases that must appear in the answer: the automaton of lexically constrained beam search (Post & Vilar 2018).

Each phrase occurs in the answer as a contiguous sequence of tokens; two may overlap, or one contain the other. One that
has several `Spellings` occurs when any of them does. Any token may come at any time, but the answer ends only when all
phrases occur. A mask cannot bring them in; the search does, by dynamic beam allocation: it divides the beam among the
banks 0 to `total`, where `progress` is the bank of a hypothesis, and considers the tokens of `wanted` for each.

    states = 2 + set of phrases met (a bit each) * nodes + node of the automaton of Aho & Corasick (1975)

All of it is arithmetic and small tables on the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.config.spec import ConfigError, Fault
from anyformer.generation.constraints.automaton import BROKEN, ENDED
from anyformer.generation.constraints.constraint import Constraint, check_ids

MAX_PHRASES = 32


class Spellings(tuple[tuple[int, ...], ...]):
    """The sequences of ids of one phrase."""


Phrase = Sequence[int] | Spellings


def spellings_of(phrase: Phrase) -> Spellings:
    return phrase if isinstance(phrase, Spellings) else Spellings([tuple(phrase)])


def shortest(phrase: Phrase) -> int:
    """Return the number of tokens of its shortest spelling."""
    return min(map(len, spellings_of(phrase)))


class Phrases(Constraint):
    """The answer contains every one of the given sequences of ids."""

    def __init__(self, phrases: Sequence[Phrase], *, vocab: int, stop: Sequence[int]):
        super().__init__(vocab, stop)
        if not 1 <= len(phrases) <= MAX_PHRASES:
            raise ConfigError([Fault("phrases", f"has {len(phrases)}; there must be 1 to {MAX_PHRASES}")])
        self.phrases = list(map(spellings_of, phrases))
        for n, phrase in enumerate(self.phrases):
            if not phrase or not all(phrase):
                raise ConfigError([Fault(f"phrases.{n}", "is empty")])
            for spelling in phrase:
                check_ids(f"phrases.{n}", spelling, vocab, taken=stop)
        self.total = sum(map(shortest, self.phrases))
        written = [spelling for phrase in self.phrases for spelling in phrase]
        prefixes = sorted({spelling[:end] for spelling in written for end in range(len(spelling) + 1)}, key=len)
        numbers = {prefix: n for n, prefix in enumerate(prefixes)}
        self._nodes = len(prefixes)
        follow = torch.zeros(self._nodes, vocab, dtype=torch.int32)
        for prefix, n in numbers.items():
            if prefix:
                follow[n] = follow[_longest_suffix(prefix, numbers)]  # shorter, so done before
            for token in {longer[-1] for longer in prefixes if longer and longer[:-1] == prefix}:
                follow[n, token] = numbers[*prefix, token]
        ends = [
            sum(1 << i for i, phrase in enumerate(self.phrases) if any(_ends(prefix, spelling) for spelling in phrase))
            for prefix in prefixes
        ]
        ahead = [
            [
                shortest(phrase) - min(len(spelling) - _overlap(prefix, spelling) for spelling in phrase)
                for phrase in self.phrases
            ]
            for prefix in prefixes
        ]
        following = [[spelling[_overlap(prefix, spelling)] for spelling in written] for prefix in prefixes]
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
        """Return how many phrases occur, [b]; all of them where the answer has ended."""
        return self._contained(states).sum(dim=1)

    def progress(self, states: Tensor) -> Tensor:
        """Return the bank, [b], 0 to `total`: tokens of the phrases that occur, and of the longest partial one."""
        return (self._contained(states) * self._at(states.device).lengths).sum(dim=1) + self.started(states).amax(dim=1)

    def started(self, states: Tensor) -> Tensor:
        """Return how many tokens of each missing phrase the answer ends with, [b, phrases]; 0 for those that occur.

        With several spellings: by how many tokens the shortest completion is shorter.
        """
        ahead = self._at(states.device).ahead
        return ahead[self._parted(states)[0]].masked_fill(self._contained(states), 0)

    def wanted(self, states: Tensor) -> Tensor:
        """Return the token that advances each spelling of a missing phrase, [b, spellings]; -1 if the phrase occurs."""
        tables = self._at(states.device)
        return tables.following[self._parted(states)[0]].masked_fill(self._contained(states)[:, tables.owners], -1)

    def _contained(self, states: Tensor) -> Tensor:
        """Return which phrases occur, bool [b, phrases]."""
        bits = torch.arange(len(self.phrases), device=states.device)
        found = (self._parted(states)[1][:, None] >> bits & 1).bool()
        return torch.where((states > ENDED)[:, None], found, (states == ENDED)[:, None])

    def _parted(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the node, and the set of phrases met."""
        state = (states - ENDED - 1).clamp(min=0)
        return state % self._nodes, state // self._nodes

    def _at(self, device: torch.device) -> "_Tables":
        if self._tables.stops.device != device:
            self._tables = _Tables(*(table.to(device) for table in self._tables))
        return self._tables


class _Tables(NamedTuple):
    follow: Tensor  # [node, v]: the node after each token
    ends: Tensor  # [node]: the phrases that end there, a bit each
    ahead: Tensor  # [node, phrase]: progress in each phrase
    following: Tensor  # [node, spelling]: the next token of each
    owners: Tensor  # [spelling]: its phrase
    lengths: Tensor  # [phrase]
    stops: Tensor  # bool [v]


def _ends(prefix: tuple[int, ...], phrase: tuple[int, ...]) -> bool:
    return prefix[-len(phrase) :] == phrase


def _overlap(prefix: tuple[int, ...], phrase: tuple[int, ...]) -> int:
    """Return how many tokens of a phrase, less than all, a prefix ends with."""
    most = min(len(prefix), len(phrase) - 1)
    return next(n for n in range(most, -1, -1) if prefix[len(prefix) - n :] == phrase[:n])


def _longest_suffix(prefix: tuple[int, ...], numbers: dict[tuple[int, ...], int]) -> int:
    """Return the node of the longest proper suffix of a prefix that is a prefix, too."""
    return next(numbers[prefix[n:]] for n in range(1, len(prefix) + 1) if prefix[n:] in numbers)
