"""Update of the weights: work and messages of the optimiser on each GPU. Imports no torch."""

from anyformer.config import ModelConfig
from anyformer.kernels.gpu_table import GPU
from anyformer.nn.inspection.optimizer_cost import trained_weights
from anyformer.recipe import Optimizer, Update
from anyformer.training.forecast.network import Group
from anyformer.training.forecast.split import Split, part_weights
from anyformer.training.forecast.work import FP32, PartWork

CLIPPED = 3  # values that clipping moves for each weight: it reads two and writes one


def update_work(config: ModelConfig, optimizer: Optimizer, split: Split) -> PartWork:
    """Return the work of a step of the optimiser on one GPU."""
    update, own = _update(config, optimizer, split)
    return PartWork(update.flops, moved=FP32 * (update.moved + CLIPPED * own), kernels=update.kernels)


def update_messages(config: ModelConfig, optimizer: Optimizer, split: Split, gpu: GPU) -> float:
    """Return the seconds in which updates of divided matrices are gathered, in fp32."""
    matrices, parts = _update(config, optimizer, split)[0].gathered, split.tensor * split.shards
    if not matrices or parts == 1:
        return 0.0
    return Group(gpu, parts).gather(FP32 * sum(matrix.values for matrix in matrices), len(matrices))


def _update(config: ModelConfig, optimizer: Optimizer, split: Split) -> tuple[Update, float]:
    """Return the update, and the number of weights that one GPU updates."""
    own = part_weights(config, split.tensor).trained / split.shards
    return optimizer.update(trained_weights(config), own, split.tensor * split.shards), own
