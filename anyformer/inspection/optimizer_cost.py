"""Memory and FLOPs of an optimiser, from the config of a model alone. Imports no torch.

    adam, adamw   two values for each weight
    muon          one for each hidden matrix's weight, two for each other one (`training/muon.py`)
    adafactor     a row and a column for each matrix of a block and each token table, one value for each other weight:
                  an upper bound, because other matrices are factored, too
    sgd           one value for each weight, or none without momentum

With an adapter only its weights, which are no hidden matrices, are trained, and a new head.
"""

from collections.abc import Iterator
from typing import NamedTuple, assert_never

from anyformer.config import Experts, ModelConfig, Tokens
from anyformer.config.adapter import every_matrix
from anyformer.config.model import tower_config
from anyformer.inspection.count import count
from anyformer.recipe.optimizer import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

MUON_ITERATIONS = 5  # of Newton–Schulz


class HiddenMatrix(NamedTuple):
    """A weight of one or several equal matrices; fused projections count as one."""

    number: int
    rows: int
    columns: int

    @property
    def values(self) -> int:
        return self.number * self.rows * self.columns


def hidden_matrices(config: ModelConfig) -> Iterator[HiddenMatrix]:
    """Yield the weights of linear layers and experts in all blocks; those that layers share occur once."""
    d = config.width
    for matrix in every_matrix(config.stacks, d).values():
        yield HiddenMatrix(1, matrix.outputs, matrix.inputs)
    for stack in config.stacks.values():
        for group in stack.distinct():
            if isinstance(spec := group.block.feedforward, Experts):
                f = spec.expert.hidden(d)
                for _ in range(group.own):
                    yield HiddenMatrix(spec.count, f * (1 + spec.expert.gates), d)
                    yield HiddenMatrix(spec.count, d, f)
    if (tower := tower_config(config)) is not None:
        yield from hidden_matrices(tower)


def state_values(config: ModelConfig, optimizer: Optimizer) -> int:
    """Return the number of values that an optimiser stores for the trained weights of a model."""
    trained = count(config).trained
    match optimizer:
        case Adam() | AdamW():
            return 2 * trained
        case Muon():
            return 2 * trained - sum(matrix.values for matrix in _trained_matrices(config))
        case SGD(momentum=momentum):
            return trained if momentum else 0
        case Adafactor():
            factored = [*_trained_matrices(config), *(() if config.adapter else _token_tables(config))]
            return trained - sum(one.values - one.number * (one.rows + one.columns) for one in factored)
        case _:
            assert_never(optimizer)


def _trained_matrices(config: ModelConfig) -> list[HiddenMatrix]:
    return [] if config.adapter else list(hidden_matrices(config))


def _token_tables(config: ModelConfig) -> Iterator[HiddenMatrix]:
    """Yield the tables of token embeddings; tied ones occur once."""
    read = [one for one in (config.source, config.target) if isinstance(one, Tokens)]
    for one in read[:1] if config.tie in ("inputs", "all") else read:
        yield HiddenMatrix(1, one.rows, one.table_width(config.width))


def orthogonal_flops(config: ModelConfig) -> int:
    """Return the FLOPs by which Muon makes the updates of all hidden matrices orthogonal.

    Each iteration is three matmuls of m×n, m×m and m×n by m×m, with m the smaller side.
    """
    total = 0
    for one in _trained_matrices(config):
        small, large = sorted((one.rows, one.columns))
        total += one.number * MUON_ITERATIONS * (4 * small**2 * large + 2 * small**3)
    return total
