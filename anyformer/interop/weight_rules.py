"""Rules that map the weights of a public model to ours, in both directions.

A rule names a tensor of ours, or a module with its weight and bias, and the tensors or modules of theirs that make it
up; a `Conversion` joins and splits them. Names and sizes are taken from our model, built on the meta device:

    Rule("decoder.blocks.0.mixer.inner.qkv", "layers.0.q", "layers.0.k", "layers.0.v")

Where a public tensor holds rows of several of ours, `also` names those whose rows follow the first's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Conversion(Protocol):
    """Joins public tensors into one of ours; `part` is the exact inverse of `join`."""

    def join(self, parts: Sequence[Tensor]) -> Tensor: ...

    def part(self, whole: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True)
class StackedRows:
    """Concatenation along the rows, with the number of rows of each part."""

    sizes: tuple[int, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole] if len(self.sizes) == 1 else list(whole.split(self.sizes))


@dataclass(frozen=True)
class Transposed:
    """Transposed matrices [in, out] (GPT-2's Conv1D); vectors are unchanged."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        return x.t()

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole.t()]


@dataclass(frozen=True)
class Interleaved:
    """Rows of queries, keys and values interleaved by head (GPT-NeoX, BLOOM)."""

    heads: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        return x.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)]


@dataclass(frozen=True)
class Grouped:
    """Rows by group: its queries, then its key and its value (Falcon)."""

    heads: int
    groups: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        q, k, v = x.unflatten(0, (self.groups, self._each + 2, -1)).split((self._each, 1, 1), dim=1)
        return torch.cat([part.flatten(0, 2) for part in (q, k, v)])

    def part(self, whole: Tensor) -> list[Tensor]:
        each = whole.unflatten(0, (self.heads + 2 * self.groups, -1)).split((self.heads, self.groups, self.groups))
        q, k, v = (part.unflatten(0, (self.groups, -1)) for part in each)
        return [torch.cat((q, k, v), dim=1).flatten(0, 2)]

    @property
    def _each(self) -> int:
        return self.heads // self.groups


@dataclass(frozen=True, eq=False)
class Reordered:
    """Concatenated rows in another order: row i of ours is row `order[i]` of theirs."""

    sizes: tuple[int, ...]  # rows of each of theirs
    order: Tensor  # int [rows]

    @classmethod
    def parts(cls, *orders: Tensor) -> "Reordered":
        """Return the conversion that reorders each of several tensors by itself."""
        sizes = tuple(len(order) for order in orders)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return cls(sizes, torch.cat([order + start for order, start in zip(orders, starts, strict=True)]))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))[self.order]

    def part(self, whole: Tensor) -> list[Tensor]:
        return list(whole[self.order.argsort().to(whole.device)].split(self.sizes))


def pairs_to_halves(heads: int, width: int, rotated: int, first: int = 0) -> Tensor:
    """Return the order of the rows of some heads in which rotary pairs (2i, 2i + 1) become (i, i + rotated/2).

    Only `rotated` rows of each head are rotated, from row `first` on.
    """
    rows = torch.arange(width)
    turned = rows[first : first + rotated].unflatten(0, (-1, 2)).mT.flatten()
    each = torch.cat((rows[:first], turned, rows[first + rotated :]))
    return (each + width * torch.arange(heads)[:, None]).flatten()


@dataclass(frozen=True)
class RotaryPairs:
    """Rows of heads that are rotated as a whole: their pairs (2i, 2i + 1) become (i, i + k/2)."""

    heads: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        return x.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole.unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2)]


@dataclass(frozen=True)
class Reshaped:
    """The same values in another shape."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        return x.reshape(self.ours)

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole.reshape(self.theirs)]


@dataclass(frozen=True)
class Stacked:
    """One tensor of ours for all experts, stacked from the public tensors of each expert."""

    sizes: tuple[int, ...]  # rows of each of an expert's tensors

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        n, inner = len(self.sizes), StackedRows(self.sizes)
        return torch.stack([inner.join(parts[i : i + n]) for i in range(0, len(parts), n)])

    def part(self, whole: Tensor) -> list[Tensor]:
        return [x for expert in whole for x in StackedRows(self.sizes).part(expert)]


class Rule:
    """The public tensors that make up a tensor or module of ours; without a conversion, they are concatenated rows.

    `also` names further tensors of ours, in the same public ones: the conversion gives their rows after the first's.
    """

    def __init__(self, ours: str, *theirs: str, conversion: Conversion | None = None, also: tuple[str, ...] = ()):
        self.ours, self.theirs, self.conversion, self.also = ours, theirs, conversion, also


class Alias(NamedTuple):
    """A public tensor that is a second name of another; never written, and checked for equality if present."""

    theirs: str
    of: str


class ConstantTensor(NamedTuple):
    """A public tensor of fixed value without a counterpart: written with that value, and refused with any other."""

    theirs: str
    shape: tuple[int, ...]
    make: Callable[..., Tensor] = torch.zeros

    @property
    def value(self) -> Tensor:
        return self.make(self.shape)


AnyRule = Rule | Alias | ConstantTensor
Names = Mapping[str, Sequence[str]]  # parts of a layer of ours, each with its public name or names


def layer_rules(
    ours: str, theirs: str, depth: int, names: Names, conversions: Mapping[str, Conversion] | None = None
) -> Iterator[Rule]:
    """Yield the rules of all layers, whose names are in a table; `conversions` are by the names of ours."""
    for i in range(depth):
        yield from block_rules(f"{ours}.{i}", f"{theirs}.{i}", names, conversions)


def block_rules(
    ours: str, theirs: str, names: Names, conversions: Mapping[str, Conversion] | None = None
) -> Iterator[Rule]:
    """Yield the rules of one layer."""
    for part, public in names.items():
        parts = (f"{theirs}.{name}" for name in ((public,) if isinstance(public, str) else public))
        yield Rule(f"{ours}.{part}", *parts, conversion=(conversions or {}).get(part))


def split_names(pattern: str, parts: str = "qkv") -> tuple[str, ...]:
    """Return the names of queries, keys and values, each by its letter."""
    return tuple(pattern.format(part) for part in parts)


class TensorRule(NamedTuple):
    """A rule about one tensor of ours, or several that share public ones."""

    ours: str
    theirs: tuple[str, ...]
    conversion: Conversion
    shapes: tuple[tuple[int, ...], ...]  # of theirs
    also: dict[str, int]  # further tensors of ours, with their number of rows

    def join(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return our tensors, by name."""
        whole = self.conversion.join(parts)
        if not self.also:
            return {self.ours: whole.contiguous()}
        sizes = (len(whole) - sum(self.also.values()), *self.also.values())
        names = (self.ours, *self.also)
        return {name: x.contiguous() for name, x in zip(names, whole.split(sizes), strict=True)}

    def part(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the public tensors."""
        first = state[self.ours]
        return self.conversion.part(torch.cat([first, *(state[name] for name in self.also)]) if self.also else first)


def tensor_rules(rules: Iterable[Rule], model: nn.Module, whole: bool = True) -> list[TensorRule]:
    """The rules tensor by tensor. What our model does not have is left out; what it has is claimed once, unless the
    model need not be a `whole` one of theirs."""
    state = model.state_dict()
    found = [tensor_rule for rule in rules for tensor_rule in _tensor_rules(rule, model, state)]
    if not whole:
        return found
    claimed = [name for rule in found for name in (rule.ours, *rule.also)]
    assert sorted(claimed) == sorted(state), f"rules and weights: {sorted(set(claimed) ^ set(state)) or claimed}"
    return found


def _tensor_rules(rule: Rule, model: nn.Module, state: dict[str, Tensor]) -> Iterator[TensorRule]:
    if rule.ours in state:
        names = [(rule.ours, rule.theirs)]
    else:
        ends = [end for end in (".weight", ".bias") if rule.ours + end in state]
        names = [(rule.ours + end, tuple(name + end for name in rule.theirs)) for end in ends]
    for ours, theirs in names:
        also = {name: len(state[name]) for name in rule.also}
        first = state[ours].to("meta")
        whole = torch.cat([first, *(state[name].to("meta") for name in also)]) if also else first
        conversion = rule.conversion or StackedRows(_sizes(model, rule.ours, whole, len(theirs)))
        yield TensorRule(ours, theirs, conversion, tuple(tuple(x.shape) for x in conversion.part(whole)), also)


def _sizes(model: nn.Module, ours: str, whole: Tensor, parts: int) -> tuple[int, ...]:
    if parts == 1:
        return (whole.shape[0],)
    sizes = model.get_submodule(ours).parts
    assert isinstance(sizes, tuple)
    return sizes
