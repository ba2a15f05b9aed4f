"""Masks over the vocabulary by llguidance, which computes them in microseconds: the fast path of `TreeConstraint`.

llguidance parses the same tree, printed as a grammar in its dialect of Lark. Its parser stands for a state of the
automaton: of all texts that lead to a state, it has read the first. Where it gives up, because a pattern is too large
for its limits, the mask is that of the walk over the vocabulary.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Any, assert_never

import numpy as np
import torch
from torch import Tensor

from anyformer.generation.constraints.regex import Alt, Chars, Node, Ranges, Ref, Repeat, Seq

FUEL = 50_000  # of llguidance for one mask or the first state: some milliseconds
MAX_GRAMMAR = 200_000  # characters of a printed tree; llguidance takes seconds for a megabyte
MAX_PARSERS = 256
OPTIONS = '%llguidance {"no_forcing": true}'  # where only one text can follow, allow each way to cut it into tokens
NO_CHARACTER = r"[^\x{0}-\x{10FFFF}]"
SURROGATES = (0xD800, 0xDFFF)


@cache
def library() -> Any:
    """Return the module llguidance (extra `constrain`), None if it is not installed."""
    try:
        return import_module("llguidance")
    except ImportError:
        return None


def make_tokenizer(tokens: list[bytes], stop: tuple[int, ...]) -> Any:
    """Return a vocabulary as llguidance needs it; ids in `stop` end a text."""
    wrapped = library().TokenizerWrapper(_Tokens(tokens, stop))
    return library().LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=list(stop))


class _Tokens:
    """The attributes that llguidance reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], stop: tuple[int, ...]):
        self.tokens, self.eos_token_id = tokens, stop[0]
        self.special_token_ids = [i for i, token in enumerate(tokens) if not token]

    def __call__(self, text: str) -> list[int]:
        """Return no tokens: masks do not depend on how a text is tokenized."""
        return []


class TokenMasks:
    """The tokens that a tree allows in the states of its automaton."""

    def __init__(self, parser: Any, size: int, start: int):
        self._first, self._vocab, self._start = parser, size, start
        self._parsers: OrderedDict[int, Any] = OrderedDict()  # of the latest states
        self._reached: dict[int, tuple[int, int]] = {}  # the state before each state, and the token between them

    @classmethod
    def of(cls, node: Node, tokenizer: Callable[[], Any], size: int, start: int) -> "TokenMasks | None":
        """Return the masks of a tree over `size` tokens; None without llguidance, and for a tree that is too large."""
        llguidance = library()
        try:
            text = grammar(node) if llguidance is not None else ""
        except RecursionError:
            return None
        if not text or len(text) > MAX_GRAMMAR:
            return None
        limits = llguidance.LLParserLimits(initial_lexer_fuel=FUEL, step_lexer_fuel=FUEL, verbose_errors=False)
        parser = llguidance.LLMatcher(tokenizer(), text, log_level=0, limits=limits)
        return cls(parser, size, start)

    def reach(self, state: int, token: int, following: int) -> None:
        """Note that a token leads from one state to another."""
        if following != self._start:
            self._reached.setdefault(following, (state, token))

    def mask(self, state: int) -> Tensor | None:
        """Return the tokens that may come next, bool [v]; None if the parser gave up."""
        parser = self._parser(state)
        bits = np.frombuffer(parser.compute_bitmask(), dtype=np.uint8)
        if parser.is_error():
            return None
        mask = np.unpackbits(bits, count=self._vocab, bitorder="little")
        return torch.from_numpy(mask.astype(np.bool_))

    def _parser(self, state: int) -> Any:
        """Return the parser after the first text that led to a state."""
        tokens, at = list[int](), state
        while at not in self._parsers and at != self._start:
            at, token = self._reached[at]
            tokens.append(token)
        parser = self._parsers.get(at, self._first)
        if tokens:
            parser = parser.deep_copy()
            parser.consume_tokens(tokens[::-1])
        self._parsers[state] = parser
        self._parsers.move_to_end(state)
        if len(self._parsers) > MAX_PARSERS:
            self._parsers.popitem(last=False)
        return parser


# -- trees as grammars ------------------------------------------------------------------------------------------------


def grammar(node: Node) -> str:
    """Return a tree in llguidance's dialect of Lark: one regular expression, or rules where it has named parts."""
    printer = _Printer()
    rules = {"start": printer.rule(node)}
    while printer.left:
        ref = printer.left.pop()
        rules[printer.names[ref.name]] = printer.rule(ref.target)
    return "\n".join([OPTIONS, *(f"{name}: {rule}" for name, rule in rules.items())])


class _Printer:
    """Prints rules, and collects the named parts that need separate rules."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.left: list[Ref] = []
        self._named: dict[int, bool] = {}
        self._printed: dict[int, str] = {}

    def rule(self, node: Node) -> str:
        """Return a node as the right side of a rule. Largest parts without names are one terminal each, because the
        lexer takes the longest text of a terminal."""
        if not self._has_names(node) or (isinstance(node, Repeat) and node.most == 0):
            return self._terminal(self._regex(node))
        match node:
            case Ref(name):
                if name not in self.names:
                    self.names[name] = f"part{len(self.names)}"
                    self.left.append(node)
                return self.names[name]
            case Seq(parts):
                rules = list[str]()
                for named, group in groupby(parts, self._has_names):
                    some = tuple(group)
                    rules += map(self.rule, some) if named else [self._terminal("".join(map(self._regex, some)))]
                return " ".join(rules)
            case Alt(parts):
                return f"({' | '.join(map(self.rule, parts))})"
            case Repeat(part, least, most):
                return f"({self.rule(part)}){_counts(least, most)}"
            case Chars():
                raise AssertionError("characters have no named parts")
            case _:
                assert_never(node)

    def _terminal(self, text: str) -> str:
        return f"/{text}/" if text else '""'

    def _has_names(self, node: Node) -> bool:
        if id(node) not in self._named:
            match node:
                case Seq(parts) | Alt(parts):
                    found = any(map(self._has_names, parts))
                case Repeat(part):
                    found = self._has_names(part)
                case _:
                    found = isinstance(node, Ref)
            self._named[id(node)] = found
        return self._named[id(node)]

    def _regex(self, node: Node) -> str:
        """Return a node without named parts as a regular expression of Rust."""
        if id(node) not in self._printed:
            self._printed[id(node)] = self._print(node)
        return self._printed[id(node)]

    def _print(self, node: Node) -> str:
        match node:
            case Chars(ranges):
                return f"[{''.join(map(_range, _encodable(ranges)))}]" if ranges else NO_CHARACTER
            case Seq(parts):
                return "".join(map(self._regex, parts))
            case Alt(parts):
                return f"(?:{'|'.join(map(self._regex, parts))})"
            case Repeat(part, least, most):
                return f"(?:{self._regex(part)}){_counts(least, most)}" if most != 0 else ""
            case Ref():
                raise AssertionError("a regular expression has no named parts")
            case _:
                assert_never(node)


def _counts(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _range(span: tuple[int, int]) -> str:
    return "-".join(f"\\x{{{code:X}}}" for code in span)


def _encodable(ranges: Ranges) -> list[tuple[int, int]]:
    """Return ranges of code points without the surrogates."""
    low, high = SURROGATES
    parts = [part for a, b in ranges for part in ((a, min(b, low - 1)), (max(a, high + 1), b))]
    return [(a, b) for a, b in parts if a <= b]
