"""Reader of the formulas that the path shows: it computes them with the numbers of their symbols, in float64."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Value = Any  # a number or an array
Term = Callable[["Symbols"], Value]

TOKENS = re.compile(
    r"\s+|(?P<number>\d+(?:\.\d+)?(?:e[−+]?\d+)?)|(?P<sum>Σ_\w)|(?P<row>E\[\d+\])"
    r"|(?P<name>(?:leaky_relu|gelu_tanh|quick_gelu|[A-Za-zα-ω]+′?(?:_\{[^}]+\}|_\w+)?))|(?P<part>_h)|(?P<sign>.)"
)


class Symbols:
    """Values and functions by name. One whose last index is running (s, h, e, i, t) has an axis for it."""

    def __init__(
        self, values: Mapping[str, Value], functions: Mapping[str, Callable[..., Value]], sizes: dict[str, int]
    ):
        self.values = {name: np.asarray(value, dtype=float) for name, value in values.items()}
        self.functions, self.sizes = dict(functions), sizes
        self.bound: dict[str, int] = {}

    def __getitem__(self, name: str) -> Value:
        value, last = self.values[name], name.split("_")[-1].split(",")[-1]
        return value[self.bound[last]] if last in self.bound else value

    def over(self, index: str, term: Term) -> list[Value]:
        """Return a term for each value of an index."""
        before, found = dict(self.bound), []
        for i in range(self.sizes[index]):
            self.bound = {**before, index: i}
            found.append(term(self))
        self.bound = before
        return found


def solve(formulas: list[str], symbols: Symbols) -> dict[str, Value]:
    """Return the values of the left sides, each of which the next formulas may use."""
    found: dict[str, Value] = {}
    equations = [re.split(" [=←] ", formula, maxsplit=1) for formula in formulas]
    for left, right in equations:
        if function := re.fullmatch(r"(f(?:_e)?)\(x\)", left):
            symbols.functions[function[1]] = _function(parse(right))
    for left, right in equations:
        if "(" in left:
            continue
        name, term = _plain(left), parse(right)
        index = name.split("_")[-1]
        found[name] = np.array(symbols.over(index, term)) if index in symbols.sizes else term(symbols)
        symbols.values[name] = np.asarray(found[name], dtype=float)
    return found


def _function(body: Term) -> Callable[[Symbols, Value], Value]:
    def call(symbols: Symbols, x: Value) -> Value:
        before = symbols.values.get("x")
        symbols.values["x"] = x
        found = body(symbols)
        symbols.values["x"] = before
        return found

    return call


def norm(formulas: list[str], symbols: Symbols) -> Value:
    """Return the right side of `N(x) = …`."""
    (formula,) = formulas
    return parse(formula.split(" = ", 1)[1])(symbols)


def _plain(name: str) -> str:
    return name.replace("{", "").replace("}", "")


def parse(text: str) -> Term:
    tokens = [(kind, found[kind]) for found in TOKENS.finditer(text) if (kind := found.lastgroup)]
    starts = [found.start() for found in TOKENS.finditer(text) if found.lastgroup]
    reader = _Reader(text, tokens, starts)
    term = reader.sum()
    assert reader.at == len(tokens), f"{text}: cannot read {tokens[reader.at :]}"
    return term


class _Reader:
    def __init__(self, text: str, tokens: list[tuple[str, str]], starts: list[int]):
        self.text, self.tokens, self.starts, self.at = text, tokens, starts, 0

    def next(self, *signs: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at][1] in signs:
            self.at += 1
            return self.tokens[self.at - 1][1]
        return None

    def want(self, sign: str) -> None:
        assert self.next(sign), f"{self.text}: no {sign}"

    def sum(self) -> Term:
        term = self.product()
        while sign := self.next("+", "−"):
            term = _binary(np.add if sign == "+" else np.subtract, term, self.product())
        return term

    def product(self) -> Term:
        term = self.neighbours()
        while sign := self.next("·", "⊙", "/"):
            term = _binary({"·": _dot, "⊙": np.multiply, "/": np.divide}[sign], term, self.neighbours())
        return term

    def neighbours(self) -> Term:
        if self.at < len(self.tokens) and self.tokens[self.at][0] == "sum":
            index = self.tokens[self.at][1][2:]
            self.at += 1
            term = self.neighbours()
            return lambda symbols: np.sum(symbols.over(index, term), axis=0)
        term = self.atom()
        while self.at < len(self.tokens) and self.tokens[self.at][1] not in "+−·⊙/)];,|":
            term = _binary(_times, term, self.atom())
        return term

    def atom(self) -> Term:
        term = self.primary()
        while True:
            inner = term
            if self.next("²"):
                term = lambda symbols, inner=inner: np.square(inner(symbols))  # noqa: E731
            elif self.next("_h"):
                term = lambda symbols, inner=inner: symbols.functions["_h"](inner(symbols))  # noqa: E731
            else:
                return term

    def primary(self) -> Term:
        if self.next("("):
            term = self.sum()
            self.want(")")
            return term
        if self.next("√"):
            inner = self.primary()
            return lambda symbols: np.sqrt(inner(symbols))
        if self.next("−"):
            inner = self.primary()
            return lambda symbols: -inner(symbols)
        if self.next("|"):
            inner = self.sum()
            self.want("|")
            return lambda symbols: np.linalg.norm(inner(symbols))
        if self.next("["):
            parts = [self.sum()]
            while self.next(";"):
                parts.append(self.sum())
            self.want("]")
            return lambda symbols: symbols.functions["join"](*(part(symbols) for part in parts))
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return lambda symbols: float(text.replace("−", "-"))
        name = _plain(text)
        called = (
            self.at < len(self.tokens)
            and self.tokens[self.at][1] == "("
            and (self.starts[self.at] == self.starts[self.at - 1] + len(text))
        )
        return self.call(name) if called else lambda symbols: symbols[name]

    def call(self, name: str) -> Term:
        self.want("(")
        arguments = [self.sum()]
        while self.next(","):
            arguments.append(self.sum())
        self.want(")")
        if name == "max_t":
            return lambda symbols: np.max(symbols.over("t", arguments[0]), axis=0)

        def term(symbols: Symbols) -> Value:
            given = [argument(symbols) for argument in arguments]
            function = symbols.functions.get(name) or FUNCTIONS[name]
            return function(symbols, *given) if name in ("f", "f_e") else function(*given)

        return term


def _binary(function: Callable[[Value, Value], Value], a: Term, b: Term) -> Term:
    return lambda symbols: function(a(symbols), b(symbols))


def _dot(a: Value, b: Value) -> Value:
    return a * b if 0 in (np.ndim(a), np.ndim(b)) else a @ b


def _times(a: Value, b: Value) -> Value:
    return a * b if 0 in (np.ndim(a), np.ndim(b)) else a @ b


def _sigmoid(x: Value) -> Value:
    return 1 / (1 + np.exp(-x))


def _gelu(x: Value) -> Value:
    from math import erf

    return x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "mean": np.mean,
    "var": np.var,
    "tanh": np.tanh,
    "exp": np.exp,
    "max": np.maximum,
    "min": np.minimum,
    "clip": lambda x, limit: np.clip(x, -limit, limit),
    "σ": _sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x, slope: np.where(x > 0, x, slope * x),
    "silu": lambda x: x * _sigmoid(x),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "gelu": _gelu,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
}
