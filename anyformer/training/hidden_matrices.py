"""The hidden matrices of a model: linear layers and experts of its blocks, which map one hidden vector to another.

The optimiser `muon` updates these, and width transfer scales them. Embeddings, heads, routers, recurrent cells,
convolutions, adapters and all vectors are not among them.
"""

from torch import nn

from anyformer.nn.experts import StackedLinear
from anyformer.nn.linear import Linear


def hidden_matrices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the rows of each projection within a hidden matrix, by the name of its weight.

    A fused layer (queries, keys and values; gate and up) has several projections. Of a model that is split among
    processes these would be the rows of one process: call it before the split.
    """
    return {
        f"{name}.weight": module.parts
        for name, module in model.named_modules()
        if ".blocks." in f".{name}" and isinstance(module, Linear | StackedLinear) and module.weight is not None
    }
