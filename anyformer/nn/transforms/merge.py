"""Merge low-rank adapters into the weights that they adapt."""

import torch

from anyformer.nn.linear import Linear
from anyformer.nn.model import Transformer


@torch.no_grad()
def merge(model: Transformer) -> Transformer:
    """Return a copy without adapters whose weights are W + alpha/rank · B A; without an adapter, the model itself."""
    if model.config.adapter is None:
        return model
    state = {name: x.clone() for name, x in model.state_dict().items() if ".lora." not in name}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.lora is not None:
            weight = module.rows()
            wide = torch.promote_types(weight.dtype, torch.float32)  # rounded once
            state[f"{name}.weight"] = (weight.to(wide) + module.lora.matrix(wide)).to(weight.dtype)
    with torch.device("meta"):
        plain = Transformer(model.config.model_copy(update={"adapter": None}))
    plain.load_state_dict(state, assign=True)
    plain.backend = model.backend
    return plain.train(model.training)
