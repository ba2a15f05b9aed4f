"""Contribution of each input token to a scalar of the output: gradient × input, and integrated gradients."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyformer.nn.context import Tap
from anyformer.nn.inputs import Inputs
from anyformer.nn.inspection.ablation import Measure
from anyformer.nn.inspection.sublayers import refuse_state
from anyformer.nn.model import Transformer


@dataclass(frozen=True)
class Attribution:
    """A scalar of the output, and the contribution of each token, by the stack that reads it: {"encoder": [b, s], ...}.

    Gradient × input adds up to `value` in a model that is linear in its embeddings; otherwise it is a first-order
    approximation. Integrated gradients add up to `value` - `baseline`, up to the error of the numerical integral.
    """

    value: Tensor
    tokens: dict[str, Tensor]
    baseline: Tensor | None = None  # integrated gradients: the scalar where all embeddings are zero

    @property
    def total(self) -> Tensor:
        """The sum over all tokens."""
        return torch.stack([parts.sum() for parts in self.tokens.values()]).sum()


def attribute(model: Transformer, measure: Measure, *inputs: Tensor | Inputs, **options: Any) -> Attribution:
    """Return gradient × embedding, summed over d, of each token; the embedding includes its position (tap `embed`)."""
    refuse_state(options, "a cache has no gradients")
    value, embeddings, gradients = _gradients(model, measure, 1.0, inputs, options)
    return Attribution(value, _products(embeddings, gradients))


def integrated_gradients(
    model: Transformer, measure: Measure, *inputs: Tensor | Inputs, steps: int = 32, **options: Any
) -> Attribution:
    """Return embedding × mean gradient on the straight line from zero embeddings, by the midpoint rule.

    Sundararajan et al. 2017. One forward and backward pass for each of `steps` points.
    """
    refuse_state(options, "a cache has no gradients")
    value, embeddings, _ = _gradients(model, measure, 1.0, inputs, options)
    baseline, _, total = _gradients(model, measure, 0.0, inputs, options)
    total = {side: torch.zeros_like(x) for side, x in total.items()}
    for step in range(steps):
        _, _, gradients = _gradients(model, measure, (step + 0.5) / steps, inputs, options)
        total = {side: total[side] + x / steps for side, x in gradients.items()}
    return Attribution(value, _products(embeddings, total), baseline)


def _gradients(
    model: Transformer, measure: Measure, scale: float, inputs: tuple[Tensor | Inputs, ...], options: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return the measure where embeddings are scaled, these embeddings, and the gradients, by stack."""
    embeddings: dict[str, Tensor] = {}

    def record(name: str, x: Tensor) -> Tensor:
        embeddings[name.removesuffix(".embed")] = x = (x.detach() * scale).requires_grad_()
        return x

    with torch.enable_grad():
        value = measure(model(*inputs, **options, taps=Tap(record, lambda name: name.endswith(".embed"))))
        gradients = torch.autograd.grad(value, list(embeddings.values()), allow_unused=True, materialize_grads=True)
    read = {side: x.detach() for side, x in embeddings.items()}
    return value.detach(), read, dict(zip(read, gradients, strict=True))


def _products(embeddings: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {side: (x * gradients[side]).sum(dim=-1) for side, x in embeddings.items()}
