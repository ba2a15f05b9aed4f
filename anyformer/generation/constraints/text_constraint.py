"""Constraints on the text of an answer, however it is cut into tokens: `Regex`, `JsonSchema` and their base class.

A state is that of an automaton over bytes, so texts that may continue alike share it. Two things are computed for a
state when a row is in it: which tokens may come next, and, near the end of its budget, how far from an end each leads.
Both are a walk over the vocabulary, milliseconds for 50,000 tokens; where llguidance is installed, it answers the first
in microseconds. It does not replace the automaton: it has no distance from a state to the end of a text, and its states
are objects, where a batch of ours is a tensor that beams reorder.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from anyformer.config.spec import ConfigError, Fault
from anyformer.generation.constraints.automaton import BROKEN, END, ENDED, UNREACHABLE, Automaton, Ints
from anyformer.generation.constraints.constraint import Constraint, check_stop
from anyformer.generation.constraints.json_schema import compile_schema
from anyformer.generation.constraints.regex import Node, Seq, literal, parse
from anyformer.generation.constraints.token_masks import TokenMasks, make_tokenizer

LONG_TOKEN = 16  # bytes; the few tokens that are longer are looked at one by one
MAX_MASKS = 64  # of the latest states
MAX_EXPLORED = 5000  # states of a constraint whose texts a vocabulary cannot write byte by byte

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """A table of the last results of a function."""

    def __init__(self, function: Callable[[K], V], size: int):
        super().__init__()
        self._function, self._size = function, size

    def __missing__(self, key: K) -> V:
        self[key] = self._function(key)
        if len(self) > self._size:
            self.popitem(last=False)
        return self[key]


class Vocabulary:
    """The bytes of every token as a trie, shared by all constraints on texts.

    Ids without text, such as `<pad>`, have b"" and are never allowed; those of `stop` end an answer, whatever their
    bytes. A `lead` precedes the text of an answer in its tokens: the space that some tokenizers add.
    """

    def __init__(self, tokens: Sequence[bytes], *, stop: Sequence[int], lead: str = ""):
        self.size, self.stop, self.lead = len(tokens), tuple(stop), lead
        check_stop(stop, self.size)
        ends = set(stop)
        self.tokens = [b"" if i in ends else token for i, token in enumerate(tokens)]
        self.singles = {token[0] for token in self.tokens if len(token) == 1}
        lengths = np.array([int(i in ends) or len(token) for i, token in enumerate(self.tokens)])
        offsets = np.cumsum(lengths) - lengths
        spelt = b"".join(b"\0" if i in ends else token for i, token in enumerate(self.tokens))
        symbols = np.frombuffer(spelt, dtype=np.uint8).astype(np.int32)
        symbols[offsets[list(ends)]] = END
        self.longest = int(lengths.max(initial=0))
        self.long = torch.from_numpy(lengths > LONG_TOKEN)
        self._node = np.zeros(self.size, dtype=np.int64)  # of each token; 0 is the root
        self._levels: list[tuple[Ints, Ints]] = []  # of each depth, in order of nodes: the parent, and the symbol
        nodes = 1
        for depth in range(self.longest):
            longer = np.flatnonzero(lengths > depth)
            keys = self._node[longer] * (END + 1) + symbols[offsets[longer] + depth]
            unique, which = np.unique(keys, return_inverse=True)
            self._levels.append(((unique // (END + 1)).astype(np.int32), (unique % (END + 1)).astype(np.int32)))
            self._node[longer] = nodes + which
            nodes += len(unique)
        self._nodes, self._silent = nodes, lengths == 0

    @cached_property
    def masks_tokenizer(self) -> Any:
        """The vocabulary as llguidance needs it."""
        return make_tokenizer(self.tokens, self.stop)

    def walk(self, automaton: "ByteAutomaton", state: int) -> Ints:
        """Return the state after each token, [v], from one state."""
        reached = np.zeros(self._nodes, dtype=np.int32)  # BROKEN
        reached[0], first = state, 1
        for parents, symbols in self._levels:
            states = reached[parents]
            alive = np.flatnonzero(states)
            if not len(alive):
                break
            reached[first + alive] = automaton.step(states[alive], symbols[alive])
            first += len(parents)
        following = reached[self._node]
        following[self._silent] = BROKEN
        return following


class ByteAutomaton(Protocol):
    """An automaton over bytes, such as `Automaton`."""

    start: int

    @property
    def size(self) -> int: ...
    def step(self, states: Ints, symbols: Ints) -> Ints: ...
    def after(self, state: int, text: bytes) -> int: ...
    def distances_to_end(self, first: int) -> Ints: ...
    def farthest(self, state: int, size: int) -> int: ...


class TextConstraint(Constraint):
    """The whole text of the answer is accepted by an automaton over bytes."""

    def __init__(self, automaton: ByteAutomaton, vocabulary: Vocabulary):
        super().__init__(vocabulary.size, vocabulary.stop)
        self._vocabulary, self._automaton = vocabulary, automaton
        self._tokens_to_end: Ints | None = None  # of each state; None: at most as many as bytes
        self._masks, self._walks = Latest(self._mask, MAX_MASKS), Latest(self._walk, MAX_MASKS)

    def start(self) -> int:
        return self._automaton.start

    def allowed(self, states: Tensor) -> Tensor:
        return torch.stack([self._masks[state] for state in states.tolist()]).to(states.device)

    def allowed_within(self, states: Tensor, left: Tensor) -> Tensor:
        rows = zip(states.tolist(), left.tolist(), strict=True)
        return torch.stack([self._within(*row) for row in rows]).to(states.device)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        rows = zip(states.tolist(), tokens.tolist(), strict=True)
        return torch.tensor([self._after(*row) for row in rows], dtype=states.dtype).to(states.device)

    def accepting(self, states: Tensor) -> Tensor:
        return torch.tensor([self._may_end(state) for state in states.tolist()]).to(states.device)

    def _may_end(self, state: int) -> bool:
        return state == ENDED or int(self._automaton.step(_one(state), _one(END))[0]) == ENDED

    def _after(self, state: int, token: int) -> int:
        """Return the state after a token."""
        if state <= ENDED:
            return state
        if token in self.stop:
            return ENDED if self._may_end(state) else BROKEN
        text = self._vocabulary.tokens[token]
        return self._with_end(self._automaton.after(state, text)) if text else BROKEN

    def _with_end(self, state: int) -> int:
        """Return the state, BROKEN if tokens cannot complete it."""
        known = self._tokens_to_end
        return state if known is None or known[state] < UNREACHABLE else BROKEN

    def _mask(self, state: int) -> Tensor:
        """Return the tokens that may come next, bool [v]."""
        return torch.from_numpy(self._walks[state] != BROKEN)

    def _walk(self, state: int) -> Ints:
        """Return the state after each token, [v]."""
        if state > ENDED:
            following = self._vocabulary.walk(self._automaton, state)
            if self._tokens_to_end is not None:
                following[self._tokens_to_end[following] == UNREACHABLE] = BROKEN
            if following.any():
                return following
        following = np.zeros(self.vocab, dtype=np.int32)
        following[list(self.stop)] = ENDED
        return following

    def _within(self, state: int, left: int) -> Tensor:
        """Return the tokens after which the answer can be complete in time, bool [v]."""
        if state <= ENDED or self._farthest(state, self._vocabulary.longest) < left:
            return self._masks[state]
        if self._farthest(state, LONG_TOKEN) < left:
            mask = self._masks[state].clone()
            long = (mask & self._vocabulary.long).nonzero()[:, 0]
            after = [self._after(state, token) for token in long.tolist()]
            mask[long] = torch.from_numpy(self._distances()[after] < left)
            return mask
        following = self._walks[state]
        alive = np.flatnonzero(following)  # BROKEN is 0
        needed = self._distances()[following[alive]]
        mask = torch.zeros(self.vocab, dtype=torch.bool)
        mask[torch.from_numpy(alive[needed < max(left, needed.min() + 1)])] = True
        return mask

    def _farthest(self, state: int, size: int) -> int:
        """Return a bound on the tokens to the end after a token of at most `size` bytes."""
        if self._tokens_to_end is not None:
            return UNREACHABLE
        return self._automaton.farthest(state, size)

    def _distances(self) -> Ints:
        """Return the tokens to the end from each state."""
        return self._automaton.distances_to_end(0) if self._tokens_to_end is None else self._tokens_to_end

    def _count_tokens_to_end(self) -> Ints | None:
        """Return the tokens from each state to the end; None if there are too many states."""
        before: dict[int, list[int]] = {}
        seen, left = {self._automaton.start}, [self._automaton.start]
        while left:
            state = left.pop()
            following = self._vocabulary.walk(self._automaton, state)
            for to in np.flatnonzero(np.bincount(following)).tolist():
                if to != BROKEN:
                    before.setdefault(to, []).append(state)
                    if to != ENDED and to not in seen:
                        seen.add(to)
                        left.append(to)
            if len(seen) > MAX_EXPLORED:
                return None
        distances: Ints = np.full(self._automaton.size, UNREACHABLE, dtype=np.int32)
        distances[ENDED], last, steps = 0, {ENDED}, 0
        while last:
            last = {state for to in last for state in before.get(to, ()) if distances[state] == UNREACHABLE}
            distances[list(last)] = steps
            steps += 1
        return distances


def _one(value: int) -> Ints:
    return np.array([value], dtype=np.int32)


class TreeConstraint(TextConstraint):
    """The text of the answer is one of a tree of characters."""

    def __init__(self, node: Node, vocabulary: Vocabulary, name: str):
        node = Seq((literal(vocabulary.lead), node))
        automaton = Automaton(node)
        super().__init__(automaton, vocabulary)
        if automaton.start == BROKEN:
            raise _impossible(name, "no text matches it")
        if not automaton.symbols() <= vocabulary.singles:
            self._tokens_to_end = self._count_tokens_to_end()
            if self._tokens_to_end is None:  # then by single bytes, as far as the vocabulary has them
                self._automaton = automaton = Automaton(node, vocabulary.singles)
            if automaton.start == BROKEN or self._with_end(automaton.start) == BROKEN:
                raise _impossible(name, "the vocabulary can write no text of it")
        self._fast: TokenMasks | None = None
        if self._tokens_to_end is None:  # otherwise the vocabulary cannot write every continuation
            size, start = vocabulary.size, automaton.start
            self._fast = TokenMasks.of(node, lambda: vocabulary.masks_tokenizer, size, start)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        following = super().advance(states, tokens)
        if self._fast is not None:
            for row in zip(states.tolist(), tokens.tolist(), following.tolist(), strict=True):
                self._fast.reach(*row)
        return following

    def _mask(self, state: int) -> Tensor:
        mask = None if self._fast is None or state <= ENDED else self._fast.mask(state)
        if mask is None:
            self._fast = None if state > ENDED else self._fast  # it would give up again, after the same work
            return super()._mask(state)
        mask[list(self.stop)] = self._may_end(state)
        return mask


class Regex(TreeConstraint):
    """The answer matches a regular expression (see `regex`), from its first character to its last."""

    def __init__(self, pattern: str, vocabulary: Vocabulary):
        super().__init__(parse(pattern), vocabulary, f"the pattern {pattern!r}")


class JsonSchema(TreeConstraint):
    """The answer is JSON that a schema allows (see `json_schema`)."""

    def __init__(self, schema: Mapping[str, object], vocabulary: Vocabulary):
        super().__init__(compile_schema(schema), vocabulary, "the schema")


def _impossible(name: str, why: str) -> ConfigError:
    return ConfigError([Fault("", f"{name} is impossible: {why}")])
