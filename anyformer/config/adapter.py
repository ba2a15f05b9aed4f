"""Adapters: small trained weights added to the frozen ones of a pretrained model. Imports no torch."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from anyformer.config.block import Block, Side, Stack
from anyformer.config.cost import Matrix as Matrix
from anyformer.config.position import Position
from anyformer.config.spec import Fault, Positive, Probability, Size, Spec, close_to


class LoRA(Spec):
    """W + alpha/rank · B A in place of W, for linear layers within blocks (Hu et al. 2022).

    A [rank, in] is random at first and B [out, rank] is 0, so training starts from the model as it was. Routers,
    experts, recurrent cells and convolutions have no adapter.
    """

    kind: Literal["lora"] = "lora"
    rank: Size  # rank of B A
    alpha: Positive | None = None  # the update is scaled by alpha/rank; None: rank, a factor of 1
    dropout: Probability = 0.0  # on the input of A
    targets: tuple[str, ...] = ("*.blocks",)  # names of layers or of modules around them: "*.mixer", "encoder.blocks.0"

    @property
    def scale(self) -> float:
        """alpha/rank"""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def within(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern, or is part of a module that does; `*` matches anything."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def matrices(block: Block, width: int, position: Position) -> Iterator[Matrix]:
    """Yield the linear layers of a block that may have an adapter; `position` is the scheme of its stack."""
    parts = {"mixer": block.mixer.with_position(position).matrices(width)}
    if block.cross:
        parts["cross"] = block.cross.matrices(width, across=True)
    parts["feedforward"] = block.feedforward.matrices(width)
    for name, found in parts.items():
        yield from (matrix.under(f"{name}.inner") for matrix in found)


def every_matrix(stacks: Mapping[Side, Stack], width: int) -> dict[str, Matrix]:
    """Return the linear layers of all blocks by name; a block that layers share counts once."""
    found = {}
    for side, stack in stacks.items():
        for run, block in zip(stack.runs, stack.unrolled(), strict=True):
            for matrix in matrices(block, width, stack.position):
                name = f"{side}.blocks.{run}.{matrix.name}"
                found[name] = matrix._replace(name=name)
    return found


def adapted(adapter: LoRA, stacks: Mapping[Side, Stack], width: int) -> dict[str, Matrix]:
    """Return the linear layers that the adapter targets."""
    every = every_matrix(stacks, width).items()
    return {name: matrix for name, matrix in every if any(within(name, target) for target in adapter.targets)}


def misfits(adapter: LoRA, stacks: Mapping[Side, Stack], width: int) -> Iterator[Fault]:
    """Yield the faults of an adapter for a model."""
    every = every_matrix(stacks, width)
    if not adapter.targets:
        yield Fault("targets", "= []: must name at least one part; all linear layers of blocks are '*.blocks'")
    for i, target in enumerate(adapter.targets):
        if not any(within(name, target) for name in every):
            yield Fault(f"targets.{i}", f"= '{target}': the blocks have no such linear layer; {_hint(target, every)}")
    found = adapted(adapter, stacks, width).values()
    if small := [matrix for matrix in found if adapter.rank > min(matrix.inputs, matrix.outputs)]:
        name, inputs, outputs, *_ = min(small, key=lambda matrix: min(matrix.inputs, matrix.outputs))
        yield Fault("rank", f"= {adapter.rank}: must be at most {min(inputs, outputs)}: {name} is {outputs} x {inputs}")


def _hint(target: str, names: Iterable[str]) -> str:
    parts = list(dict.fromkeys(name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)))
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    close = close_to(target, [*parts, *(f"*.{name}" for name in last)])
    return f"did you mean '{close}'?" if close else f"layers are {', '.join(last)}" if last else "they have none"
