"""Run a model with some attention heads disabled, in any kind of call: forward pass, prediction, generation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.config import ConfigError, Fault
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.inspection.sublayers import attentions
from anyformer.nn.model import Transformer


def parse_heads(model: Transformer, off: Sequence[str]) -> dict[str, list[int]]:
    """Parse `decoder.0.3` and `cross.1.0` as heads of `decoder.0.mixer` and `decoder.1.cross`."""
    known, heads = attentions(model), dict[str, list[int]]()
    for head_name in off:
        kind, _, rest = head_name.partition(".")
        layer, _, head = rest.partition(".")
        name = f"decoder.{layer}.cross" if kind == "cross" else f"{kind}.{layer}.mixer"
        if name not in known or not head.isdecimal() or int(head) >= known[name].heads:
            raise ConfigError([Fault("off", f"= '{head_name}': there is no such head")])
        heads.setdefault(name, []).append(int(head))
    return heads


@contextmanager
def disable_heads(model: Transformer, heads: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Run the block as if the output projections had zeros in the columns of these heads.

    A module with shared weights runs in several layers; the number of its calls shows which layer it is in.
    """
    layers: dict[MultiHeadAttention, list[Sequence[int]]] = {}
    for name, attention in attentions(model).items():
        layers.setdefault(attention, []).append(heads.get(name, ()))
    with ExitStack() as stack:
        for attention, off in layers.items():
            if any(off):
                hook = attention.out.register_forward_pre_hook(_zeroing_hook(attention.heads, off))
                stack.callback(hook.remove)
        yield


def _zeroing_hook(heads: int, off: Sequence[Sequence[int]]) -> Any:
    calls = count()

    def change(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:  # [b, t, h·k_v]
        disabled = off[next(calls) % len(off)]
        x = inputs[0].unflatten(-1, (heads, -1))
        mask = torch.zeros(heads, 1, dtype=torch.bool, device=x.device)
        mask[list(disabled)] = True
        return x.masked_fill(mask, 0.0).flatten(-2)

    return change
