"""One decode step with constant shapes and no host synchronisation, so that it is compiled or captured once.

On a GPU decoding is launch-bound: hundreds of small kernels per token (`buffers.py`).
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from anyformer.attention.cache.paged import AnyCache
from anyformer.attention.layout import Layout
from anyformer.kernels.private import repair_inductor
from anyformer.kernels.runtime import supports_dependent_launch
from anyformer.nn.model import Transformer


def step(
    model: Transformer, cache: AnyCache, new: Tensor, present: Tensor | None, bound: int | None = None
) -> tuple[Tensor, Tensor]:
    """Read n more tokens [rows, n], where `present`; return hidden states [rows, n, d] and logits [rows, n, v].

    `bound` exceeds every position; 0 skips the position check.
    """
    layout = cache.next(new.shape[1], present, bound)
    hidden = model.extend(new, layout, cache)
    return hidden, model.apply_head(hidden, layout)


def logits(model: Transformer, hidden: Tensor) -> Tensor:
    """Return the logits [b, t, v] after hidden states [b, t, d]; the head does not read positions."""
    return model.apply_head(hidden, Layout(torch.zeros(hidden.shape[:2], dtype=torch.long)))


@lru_cache(maxsize=64)
def compiled(function: Callable[..., Any], *key: Hashable) -> Callable[..., Any]:
    """Return a function compiled for one key, such as the model and the number of rows.

    Each key has its own code: torch counts recompilations per code object, makes sizes that differ dynamic, which is
    slow, and falls back to eager after a few. Compiled on demand, since importing the compiler takes seconds.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{compiled.cache_info().misses}")
    named = FunctionType(code, function.__globals__, code.co_name, function.__defaults__)
    early = torch.cuda.is_available() and supports_dependent_launch(torch.device("cuda")) and repair_inductor()
    # another naming scheme, so that kernels in Inductor's cache on disk, compiled without the repair, are not used;
    # not "torch", whose names of custom operators hold a dot
    options: dict[str, Any] = {
        "triton.enable_pdl": True,
        "triton.descriptive_names": "inductor_node",
        "combo_kernels": True,  # small kernels of a layer by one launch
        "combo_kernels_autotune": 0,  # tuning runs kernels several times, also those that write the cache
    }
    return torch.compile(named, options=options if early else None)
