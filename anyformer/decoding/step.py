"""One decode step: shapes that never change, no question to the device, so that it is compiled or captured once.

On a GPU what costs time is not the arithmetic but the starting of hundreds of small kernels (`place.py`).
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from anyformer.attention.layout import Layout
from anyformer.cache.kv_cache import Cache
from anyformer.kernels.dependent_launch import repair_inductor
from anyformer.kernels.runtime import supports_dependent_launch
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer


def step(
    model: Transformer, cache: Cache, new: Tensor, there: Tensor | None, bound: int | None = None
) -> tuple[Tensor, Tensor]:
    """Reads [rows, n] more tokens, those that are `there`: their hidden states [rows, n, d], and the logits of what
    follows each of them [rows, n, v]."""
    hidden = model.decode(Inputs(new, cache.next(new.shape[1], there, bound)), cache=cache)
    return hidden, logits(model, cache, hidden)


def logits(model: Transformer, cache: Cache, hidden: Tensor) -> Tensor:
    return model.apply_head(hidden, Layout(cache.following[:, None].expand(hidden.shape[:2])))


@lru_cache(maxsize=64)
def compiled(function: Callable[..., Any], *of: Hashable) -> Callable[..., Any]:
    """One for each model and number of rows, so that what was compiled is found again: torch counts recompilations by
    code, makes sizes that differ dynamic, which is slow, and past a few falls to eager. Made when asked for, as
    importing compilers takes long."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{compiled.cache_info().misses}")
    named = FunctionType(code, function.__globals__, code.co_name, function.__defaults__)
    early = torch.cuda.is_available() and supports_dependent_launch(torch.device("cuda")) and repair_inductor()
    # names by "torch", so that kernels in Inductor's cache on disk, compiled without the repair, are not used
    options: dict[str, Any] = {"triton.enable_pdl": True, "triton.descriptive_names": "torch"}
    return torch.compile(named, options=options if early else None)
