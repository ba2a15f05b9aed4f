"""Activation patching: replace or change activations of the running model by name."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from anyformer.nn.context import Tap
from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.taps import check_matched
from anyformer.nn.model import Transformer

Patch = Tensor | Callable[[Tensor], Tensor]


def run_with_patches(
    model: Transformer, patches: Mapping[str, Patch], *inputs: Tensor | Inputs, **options: Any
) -> Tensor:
    """Return the model's output with activations replaced by a tensor, or by the result of a function of them.

    The names are those of `taps.py`; they may contain `*`. The kernels stay the same, so patching a run with its own
    activations changes no bit. The exception is `weights`: patched weights are applied by the reference
    implementation, which agrees with the kernel up to rounding.
    """
    matched: set[str] = set()

    def change(name: str, x: Tensor) -> Tensor:
        for pattern, patch in patches.items():
            if fnmatchcase(name, pattern):
                new = patch if isinstance(patch, Tensor) else patch(x)
                if new.shape != x.shape:
                    raise ValueError(f"the patch of {name} has shape {list(new.shape)}, expected {list(x.shape)}")
                x = new.to(x)
                matched.add(name)
        return x

    taps = Tap(change, lambda name: any(fnmatchcase(name, pattern) for pattern in patches))
    output = model(*inputs, **options, taps=taps)
    check_matched(patches, matched)
    return output
