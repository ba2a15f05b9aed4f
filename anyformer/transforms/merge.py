"""Adapters into the weights beside which they stand."""

import torch

from anyformer.nn.lora import AdaptedFused, AdaptedLinear
from anyformer.nn.model import Transformer


@torch.no_grad()
def merge(model: Transformer) -> Transformer:
    """A copy without adapters that does the same, by W + alpha/rank · B A; the model itself where there are none."""
    if model.config.adapter is None:
        return model
    state = {name: x.clone() for name, x in model.state_dict().items() if ".lora." not in name}
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear | AdaptedFused):
            wide = torch.promote_types(module.weight.dtype, torch.float32)  # rounded once
            whole = module.weight.to(wide) + module.lora.matrix(wide)
            state[f"{name}.weight"] = whole.to(module.weight.dtype)
    with torch.device("meta"):
        plain = Transformer(model.config.model_copy(update={"adapter": None}))
    plain.load_state_dict(state, assign=True)
    plain.backend = model.backend
    return plain.train(model.training)
