"""LoRA adapters of one body: models that share its weights and add their own low-rank layers."""

import torch

from anyformer.config import ConfigError, Fault
from anyformer.nn.model import Transformer


def share_body(name: str, body: Transformer, adapted: Transformer) -> Transformer:
    """Let a model with an adapter use the weights of a body, after a check that they are equal.

    Each LoRA run holds a copy of its body; served together, the body is in memory once.
    """

    def fault(what: str) -> ConfigError:
        return ConfigError([Fault(f"adapters.{name}", what)])

    if adapted.config.adapter is None:
        raise fault("has no LoRA adapter: serve it as a separate model")
    if adapted.config.model_copy(update={"adapter": None}) != body.config.model_copy(update={"adapter": None}):
        raise fault("adapts another architecture than that of the model")
    own, base = adapted.state_dict(), dict(body.state_dict(keep_vars=True))
    shared = {key: x for key, x in base.items() if ".lora." not in key}
    if different := [key for key, x in shared.items() if not torch.equal(x, own[key].to(x))]:
        raise fault(f"adapts other weights than those of the model: {different[0]} differs")
    adapted.load_state_dict(shared, strict=False, assign=True)
    return adapted.eval()
