"""Texts that hold none of some strings: the automaton of Aho & Corasick (1975) over bytes."""

from collections.abc import Sequence

import numpy as np

from anyformer.config.spec import ConfigError, Fault
from anyformer.decoding.constraints.automaton import BROKEN, END, ENDED, FAR, Ints
from anyformer.decoding.constraints.constraint import Language, Vocabulary


class Without(Language):
    """None of the strings stands in the answer, however tokens spell it."""

    def __init__(self, strings: Sequence[str], vocabulary: Vocabulary):
        for n, string in enumerate(strings):
            if not string:
                raise ConfigError([Fault(f"banned.{n}", "an empty string stands everywhere: leave it out")])
        super().__init__(Avoiding([string.encode() for string in strings], vocabulary.lead), vocabulary, "")


class Avoiding:
    """An `Automaton` whose states are the beginnings of the strings; one more stands before the `lead`, which is no
    part of the text."""

    def __init__(self, strings: Sequence[bytes], lead: str):
        nodes = sorted({string[:end] for string in strings for end in range(len(string) + 1)}, key=len)
        numbers = {node: n for n, node in enumerate(nodes, ENDED + 1)}
        self.size = len(nodes) + ENDED + 2
        self._rows: Ints = np.zeros((self.size, END + 1), dtype=np.int32)
        longer: dict[bytes, list[bytes]] = {node: [] for node in nodes}
        for node in nodes[1:]:
            longer[node[:-1]].append(node)
        root, whole = numbers[b""], set(strings)
        self._rows[root] = root
        for node in nodes:
            row = self._rows[numbers[node]]
            if node:  # as after the longest end of it that is a node, too: shorter, so done before
                row[:] = self._rows[next(numbers[node[at:]] for at in range(1, len(node) + 1) if node[at:] in numbers)]
            for other in longer[node]:  # what one of the strings ends with already stays BROKEN
                if row[other[-1]] != BROKEN:
                    row[other[-1]] = BROKEN if other in whole else numbers[other]
            row[END] = ENDED
        self.start = self.size - 1
        self._rows[self.start] = self._rows[root]
        if lead:
            self._rows[self.start, ord(lead)] = root

    def symbols(self) -> set[int]:
        """None is needed: a text may end anywhere."""
        return set()

    def step(self, states: Ints, symbols: Ints) -> Ints:
        return self._rows[states, symbols]

    def soonest(self, first: int) -> Ints:
        far: Ints = np.zeros(self.size, dtype=np.int32)
        far[BROKEN] = FAR
        return far[first:]
