"""Update of the weights: work and messages of the optimiser on each GPU. Imports no torch.

adam, adamw   reads four values of a weight and writes three; clipping reads two and writes one: 40 bytes
sgd           reads three and writes two (without momentum two and one), and clipping
adafactor     about six passes over the gradient and the weight, not fused, and clipping
muon          hidden matrices: the momentum, its look-ahead and the new weight, and clipping, in kernels of their
              own; FLOPs of Newton–Schulz iterations in half precision. Every GPU gathers all updates and makes
              all of them orthogonal, whatever the split. Other weights as AdamW
"""

from typing import assert_never

from anyformer.config import ModelConfig
from anyformer.forecast.network import Group
from anyformer.forecast.split import Split, part_weights
from anyformer.forecast.work import FP32, Work
from anyformer.gpu_table import GPU
from anyformer.inspection.optimizer_cost import hidden_matrices, orthogonal_flops
from anyformer.recipe import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

CLIP_BYTES = 12
ADAM_BYTES = 28 + CLIP_BYTES
ADAFACTOR_BYTES = 6 * 2 * FP32 + CLIP_BYTES
MUON_BYTES = 38 + CLIP_BYTES
MUON_KERNELS = 40  # of each kind of matrix


def update_work(config: ModelConfig, optimizer: Optimizer, split: Split) -> Work:
    """Return the work of a step of the optimiser on one GPU."""
    weights = part_weights(config, split.tensor).trained / split.shards
    match optimizer:
        case Adam() | AdamW():
            return Work(moved=ADAM_BYTES * weights)
        case SGD(momentum=momentum):
            return Work(moved=(FP32 * (5 if momentum else 3) + CLIP_BYTES) * weights)
        case Adafactor():
            return Work(moved=ADAFACTOR_BYTES * weights)
        case Muon():
            kinds = [] if config.adapter else list(hidden_matrices(config))
            hidden = sum(matrix.values for matrix in kinds) / split.tensor / split.shards
            moved = MUON_BYTES * hidden + ADAM_BYTES * (weights - hidden)
            return Work(orthogonal_flops(config), moved=moved, kernels=MUON_KERNELS * len({*kinds}))
        case _:
            assert_never(optimizer)


def update_messages(config: ModelConfig, optimizer: Optimizer, split: Split, gpu: GPU) -> float:
    """Return the seconds in which Muon gathers the updates of divided matrices, in fp32."""
    parts = split.tensor * split.shards
    if not isinstance(optimizer, Muon) or config.adapter or parts == 1:
        return 0.0
    matrices = list(hidden_matrices(config))
    return Group(gpu, parts).gather(FP32 * sum(matrix.values for matrix in matrices), len(matrices))
