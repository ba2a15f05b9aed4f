"""Effect of a position scheme on attention scores, by distance."""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from anyformer.attention.position_module import Positions
from anyformer.config import Position
from anyformer.nn.inspection.sublayers import attentions, parse_name, stacks_of
from anyformer.nn.model import Transformer


@dataclass(frozen=True)
class Curve:
    """A value for each head and distance: a bias added to scores, or an envelope that scales them."""

    kind: Literal["bias", "envelope"]
    distances: Tensor  # int [n]: the query's position minus the key's
    values: Tensor  # [h, n]


@torch.no_grad()
def position_curves(model: Transformer, reach: int = 64) -> dict[str, Curve]:
    """Return the curve of each self-attention that has one (`decoder.0.mixer`), up to distance `reach`.

    Distances are negative, too, where a layer sees later tokens. bias: the term that T5 or ALiBi adds. envelope: with
    rotary positions, the score of equal query and key vectors of equal strength at all frequencies, relative to the
    score without positions: Σ_i cos(θ_i · distance) / frequencies.
    """
    curves = {}
    for name, attention in attentions(model).items():
        side, layer, sublayer = parse_name(name)
        if sublayer == "cross":
            continue  # positions do not act between two texts
        stack = stacks_of(model)[side]
        plan = stack.plans[cast(int, stack.plan_of_layer[layer])]
        positions, ahead = cast(Positions, stack.schemes[plan.scheme]), plan.pattern.looks_ahead
        device = next(model.parameters()).device
        distances = torch.arange(-reach if ahead else 0, reach + 1, device=device)
        start = torch.zeros(1, 1, dtype=torch.long, device=device)
        if positions.scheme.biases():
            bias = positions.bias(distances[None], start, causal=not ahead)  # [1, h, n, 1]
            assert bias is not None
            curves[name] = Curve("bias", distances, bias[0, :, :, 0])
        elif type(positions.scheme).rotate is not Position.rotate:
            q, k = (_rotated_ones(positions, at, plan.needs.rotary_width) for at in (distances[None], start))
            curve = (q * k).sum(dim=-1)[0] / plan.needs.rotary_width  # [1, n]
            curves[name] = Curve("envelope", distances, curve.expand(attention.heads, -1))
    return curves


def _rotated_ones(positions: Positions, at: Tensor, width: int) -> Tensor:
    rotation = positions.scheme.prepare(at, width)
    assert rotation is not None
    return positions.scheme.rotate(torch.ones(1, 1, at.shape[1], width, device=at.device), rotation)
