"""Gradient × input: how much each token that was read has to do with what is said."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyformer.inspection.scalar_outputs import Measure
from anyformer.inspection.sublayers import refuse_state
from anyformer.nn.context import Tap
from anyformer.nn.model import Transformer


@dataclass(frozen=True)
class Attribution:
    """A measure of an output, and each token's part in it, by the stack that reads it: {"encoder": [b, s], ...}.

    In a model that is linear in its embeddings the parts add up to the measure; in others they are a first-order guess.
    """

    value: Tensor
    tokens: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        """The sum over all tokens."""
        return torch.stack([parts.sum() for parts in self.tokens.values()]).sum()


def attribute(model: Transformer, measure: Measure, *inputs: Tensor, **options: Any) -> Attribution:
    """The gradient of a measure by each embedding (`embed`, with its position), times that embedding, summed over d."""
    refuse_state(options, "a cache keeps no gradient")
    embeddings: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> Tensor:
        embeddings[name.removesuffix(".embed")] = x = x.detach().requires_grad_()
        return x

    with torch.enable_grad():
        value = measure(model(*inputs, **options, taps=Tap(keep, lambda name: name.endswith(".embed"))))
        found = torch.autograd.grad(value, list(embeddings.values()), allow_unused=True, materialize_grads=True)
    parts = {
        side: (x.detach() * gradient).sum(dim=-1) for (side, x), gradient in zip(embeddings.items(), found, strict=True)
    }
    return Attribution(value.detach(), parts)
