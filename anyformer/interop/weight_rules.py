"""The weights of a public model under our names, and back: rules that can be read in both directions.

A rule names a tensor of ours, or a module with its weight and bias, and the tensors or modules of theirs that make it
up; a `Way` says how. Which tensors there are and how large their parts must be is read off our model, built on meta:

    Rule("decoder.blocks.0.mixer.inner.qkv", "layers.0.q", "layers.0.k", "layers.0.v")
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Way(Protocol):
    """How tensors of theirs make one of ours; `part` undoes `join`, to the byte."""

    def join(self, parts: Sequence[Tensor]) -> Tensor: ...

    def part(self, whole: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True)
class Rows:
    """One after the other, so many rows of each."""

    sizes: tuple[int, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole] if len(self.sizes) == 1 else list(whole.split(self.sizes))


@dataclass(frozen=True)
class Transposed:
    """Matrices are [in, out] there (GPT-2's Conv1D); vectors are as ours."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        return x.t()

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole.t()]


@dataclass(frozen=True)
class Interleaved:
    """The rows of queries, keys and values take turns by head (GPT-NeoX, BLOOM)."""

    heads: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        return x.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)]


@dataclass(frozen=True)
class Grouped:
    """The rows of a group's queries, then of their key and their value, group after group (Falcon)."""

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


@dataclass(frozen=True)
class Shaped:
    """The same numbers in another shape."""

    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        return x.reshape(self.ours)

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole.reshape(self.theirs)]


@dataclass(frozen=True)
class Stacked:
    """One of ours for all experts, and some tensors of theirs for each: expert by expert, rows one after the other."""

    sizes: tuple[int, ...]  # rows of each of an expert's tensors

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        n, inner = len(self.sizes), Rows(self.sizes)
        return torch.stack([inner.join(parts[i : i + n]) for i in range(0, len(parts), n)])

    def part(self, whole: Tensor) -> list[Tensor]:
        return [x for expert in whole for x in Rows(self.sizes).part(expert)]


class Rule:
    """What of theirs is a tensor or module of ours; without a way, the parts are rows."""

    def __init__(self, ours: str, *theirs: str, way: Way | None = None):
        self.ours, self.theirs, self.way = ours, theirs, way


class Alias(NamedTuple):
    """A tensor of theirs that is another one under a second name; never written, and equal where it is there."""

    theirs: str
    of: str


class Constant(NamedTuple):
    """A tensor of theirs without a counterpart, zero or as made: written so, and refused where it is something else."""

    theirs: str
    shape: tuple[int, ...]
    make: Callable[..., Tensor] = torch.zeros

    @property
    def value(self) -> Tensor:
        return self.make(self.shape)


AnyRule = Rule | Alias | Constant


class Tie(NamedTuple):
    """A rule about one tensor of ours."""

    ours: str
    theirs: tuple[str, ...]
    way: Way
    shapes: tuple[tuple[int, ...], ...]  # of theirs


def ties(rules: Iterable[Rule], model: nn.Module, whole: bool = True) -> list[Tie]:
    """The rules tensor by tensor. What our model does not have is left out; what it has is claimed once, unless the
    model need not be a `whole` one of theirs."""
    state = model.state_dict()
    found = [tie for rule in rules for tie in _ties(rule, model, state)]
    if not whole:
        return found
    claimed = [tie.ours for tie in found]
    assert sorted(claimed) == sorted(state), f"rules and weights: {sorted(set(claimed) ^ set(state)) or claimed}"
    return found


def _ties(rule: Rule, model: nn.Module, state: dict[str, Tensor]) -> Iterator[Tie]:
    if rule.ours in state:
        names = [(rule.ours, rule.theirs)]
    else:
        ends = [end for end in (".weight", ".bias") if rule.ours + end in state]
        names = [(rule.ours + end, tuple(name + end for name in rule.theirs)) for end in ends]
    for ours, theirs in names:
        whole = state[ours].to("meta")
        way = rule.way or Rows(_sizes(model, rule.ours, whole, len(theirs)))
        yield Tie(ours, theirs, way, tuple(tuple(x.shape) for x in way.part(whole)))


def _sizes(model: nn.Module, ours: str, whole: Tensor, parts: int) -> tuple[int, ...]:
    if parts == 1:
        return (whole.shape[0],)
    sizes = model.get_submodule(ours).parts
    assert isinstance(sizes, tuple)
    return sizes
