"""The weights of a model that an optimiser changes, counted from its config alone. Imports no torch."""

from collections.abc import Iterator
from functools import partial

from anyformer.config import ModelConfig
from anyformer.config.adapter import every_matrix
from anyformer.config.model import tower_config
from anyformer.nn.inspection.count import count
from anyformer.recipe.optimizer import HiddenMatrix, WeightCounts


def trained_weights(config: ModelConfig) -> WeightCounts:
    """Return the trained weights of a model: with an adapter its own and a new head."""
    if config.adapter:
        return WeightCounts(count(config).trained)
    return WeightCounts(count(config).trained, partial(hidden_matrices, config), tuple(_token_tables(config)))


def hidden_matrices(config: ModelConfig) -> Iterator[HiddenMatrix]:
    """Yield the weights of linear layers and experts in all blocks; those that layers share occur once."""
    d = config.width
    for matrix in every_matrix(config.stacks, d).values():
        yield HiddenMatrix(1, matrix.outputs, matrix.inputs)
    for stack in config.stacks.values():
        for group in stack.distinct():
            for _ in range(group.own):
                for number, matrix in group.block.feedforward.stacked_matrices(d):
                    yield HiddenMatrix(number, matrix.outputs, matrix.inputs)
    if (tower := tower_config(config)) is not None:
        yield from hidden_matrices(tower)


def _token_tables(config: ModelConfig) -> Iterator[HiddenMatrix]:
    """Yield the tables of token embeddings; tied ones occur once."""
    read = [(one.rows, e) for one in config.inputs.values() if (e := one.table_width(config.width)) is not None]
    yield from (HiddenMatrix(1, *table) for table in (read[:1] if config.ties_inputs else read))
