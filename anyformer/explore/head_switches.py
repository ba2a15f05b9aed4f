"""Heads switched off in whatever is done with a model: reading, answering, writing token by token."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.config import ConfigError, Fault
from anyformer.inspection.sublayers import attentions
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.model import Transformer


def named(model: Transformer, off: Sequence[str]) -> dict[str, list[int]]:
    """`decoder.0.3` and `cross.1.0` as the heads of `decoder.0.mixer` and `decoder.1.cross`, or a clear error."""
    known, found = attentions(model), dict[str, list[int]]()
    for one in off:
        kind, _, rest = one.partition(".")
        layer, _, head = rest.partition(".")
        name = f"decoder.{layer}.cross" if kind == "cross" else f"{kind}.{layer}.mixer"
        if name not in known or not head.isdecimal() or int(head) >= known[name].heads:
            raise ConfigError([Fault("off", f"= '{one}': there is no such head")])
        found.setdefault(name, []).append(int(head))
    return found


@contextmanager
def switched_off(model: Transformer, heads: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """What stands inside runs as if the output projections had zeros in the columns of these heads.

    With shared weights a module runs in several layers: it is told which one by how often it was called.
    """
    layers: dict[MultiHeadAttention, list[Sequence[int]]] = {}
    for name, attention in attentions(model).items():
        layers.setdefault(attention, []).append(heads.get(name, ()))
    with ExitStack() as stack:
        for attention, off in layers.items():
            if any(off):
                hook = attention.out.register_forward_pre_hook(_silent(attention.heads, off))
                stack.callback(hook.remove)
        yield


def _silent(heads: int, off: Sequence[Sequence[int]]) -> Any:
    calls = count()

    def change(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:  # [b, t, h·k_v]
        silent = off[next(calls) % len(off)]
        x = inputs[0].unflatten(-1, (heads, -1))
        which = torch.zeros(heads, 1, dtype=torch.bool, device=x.device)
        which[list(silent)] = True
        return x.masked_fill(which, 0.0).flatten(-2)

    return change
