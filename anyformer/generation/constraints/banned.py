"""Banned strings: an automaton of Aho & Corasick (1975) over bytes accepts texts that contain none of them."""

from collections.abc import Sequence

import numpy as np

from anyformer.config.spec import ConfigError, Fault
from anyformer.generation.constraints.automaton import BROKEN, END, ENDED, UNREACHABLE, Ints
from anyformer.generation.constraints.text_constraint import TextConstraint, Vocabulary


class WithoutStrings(TextConstraint):
    """The answer contains none of the strings, however they are tokenized."""

    def __init__(self, strings: Sequence[str], vocabulary: Vocabulary):
        for n, string in enumerate(strings):
            if not string:
                raise ConfigError([Fault(f"banned.{n}", "an empty string occurs everywhere: leave it out")])
        super().__init__(BannedStrings([string.encode() for string in strings], vocabulary.lead), vocabulary)


class BannedStrings:
    """A `ByteAutomaton` whose states are the beginnings of the strings.

    One more state precedes the `lead`, which is not part of the text.
    """

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
            if node:  # as from its longest proper suffix that is a node: shorter, so done before
                row[:] = self._rows[next(numbers[node[at:]] for at in range(1, len(node) + 1) if node[at:] in numbers)]
            for other in longer[node]:  # the end of a shorter string stays BROKEN
                if row[other[-1]] != BROKEN:
                    row[other[-1]] = BROKEN if other in whole else numbers[other]
            row[END] = ENDED
        self.start = self.size - 1
        self._rows[self.start] = self._rows[root]
        if lead:
            self._rows[self.start, ord(lead)] = root

    def step(self, states: Ints, symbols: Ints) -> Ints:
        return self._rows[states, symbols]

    def after(self, state: int, text: bytes) -> int:
        for symbol in text:
            state = int(self._rows[state, symbol])
        return state

    def farthest(self, state: int, size: int) -> int:
        """Return 0: a text may end anywhere."""
        return 0

    def distances_to_end(self, first: int) -> Ints:
        distances: Ints = np.zeros(self.size, dtype=np.int32)
        distances[BROKEN] = UNREACHABLE
        return distances[first:]
