"""Gradient × input: the contribution of each input token to a scalar of the output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyformer.inspection.scalar_outputs import Measure
from anyformer.inspection.sublayers import refuse_state
from anyformer.nn.context import Tap
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer


@dataclass(frozen=True)
class Attribution:
    """A scalar of the output, and the contribution of each token, by the stack that reads it: {"encoder": [b, s], ...}.

    In a model that is linear in its embeddings the contributions add up to `value`; otherwise they are a first-order
    approximation.
    """

    value: Tensor
    tokens: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        """The sum over all tokens."""
        return torch.stack([parts.sum() for parts in self.tokens.values()]).sum()


def attribute(model: Transformer, measure: Measure, *inputs: Tensor | Inputs, **options: Any) -> Attribution:
    """Return gradient × embedding, summed over d, of each token; the embedding includes its position (tap `embed`)."""
    refuse_state(options, "a cache has no gradients")
    embeddings: dict[str, Tensor] = {}

    def record(name: str, x: Tensor) -> Tensor:
        embeddings[name.removesuffix(".embed")] = x = x.detach().requires_grad_()
        return x

    with torch.enable_grad():
        value = measure(model(*inputs, **options, taps=Tap(record, lambda name: name.endswith(".embed"))))
        gradients = torch.autograd.grad(value, list(embeddings.values()), allow_unused=True, materialize_grads=True)
    parts = {
        side: (x.detach() * gradient).sum(dim=-1)
        for (side, x), gradient in zip(embeddings.items(), gradients, strict=True)
    }
    return Attribution(value.detach(), parts)
