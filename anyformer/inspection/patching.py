"""Activations of the real model, replaced or changed by name."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from anyformer.inspection.taps import check_met
from anyformer.nn.context import Tap
from anyformer.nn.model import Transformer

Patch = Tensor | Callable[[Tensor], Tensor]


def run_with_patches(model: Transformer, patches: Mapping[str, Patch], *inputs: Tensor, **options: Any) -> Tensor:
    """The model's output where activations that match a name are the tensor there, or what the function makes of them.

    The names are those of `taps.py`. Kernels stay as they are: what a run's own activations are patched with leaves
    every bit, save for `weights`, which are then mixed by the definition: equal up to rounding.
    """
    met: set[str] = set()

    def change(name: str, x: Tensor) -> Tensor:
        for pattern, patch in patches.items():
            if fnmatchcase(name, pattern):
                new = patch if isinstance(patch, Tensor) else patch(x)
                if new.shape != x.shape:
                    raise ValueError(f"the patch of {name} has shape {list(new.shape)}, expected {list(x.shape)}")
                x = new.to(x)
                met.add(name)
        return x

    taps = Tap(change, lambda name: any(fnmatchcase(name, pattern) for pattern in patches))
    output = model(*inputs, **options, taps=taps)
    check_met(patches, met)
    return output
