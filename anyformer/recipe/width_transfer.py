"""Width transfer: one learning rate for models of all widths (muP, Yang et al. 2022). Imports no torch.

With r = base_width / width, and everything as it is in a model of the base width (r = 1):

                       initial deviation        rate of Adam    rate of Muon    factor
    hidden matrices    as at the base, · √r     · r             · √r
    routers            as at the base, · r      · r             · r
    logits                                                                      · r
    scores                                                                      · base key width ÷ key width
    embeddings, head, positions, vectors: as at the base width

Widths of feed-forwards grow with the width, as they do by default. Weight decay per step stays the same: a smaller rate
has a larger decay factor.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from anyformer.config import (
    Block,
    Fault,
    ModelConfig,
    Normal,
    Spec,
    Stack,
    Xavier,
    factor,
)
from anyformer.config.part import kind_of
from anyformer.config.spec import BY_KIND, Size
from anyformer.recipe.optimizer import Optimizer


class StandardScale(Spec):
    """Initialisation and learning rates do not depend on a base width."""

    kind: Literal["standard"] = "standard"


class MuP(Spec):
    """Maximal update parametrisation: settings that are tuned at `base_width` hold for other widths."""

    kind: Literal["mup"] = "mup"
    base_width: Size  # width at which the settings of the recipe hold as they are
    # width of a key at the base width; None: in proportion to the width, that is the same number of heads
    base_key_width: Size | None = None

    def ratio(self, width: int) -> float:
        """base_width / width"""
        return self.base_width / width


WidthScale = Annotated[StandardScale | MuP, *BY_KIND]


def scaled_model(model: ModelConfig, scale: WidthScale) -> ModelConfig:
    """Return a model with the factors of scores, logits and embeddings of a scale."""
    if not isinstance(scale, MuP):
        return model
    changes: dict[str, object] = {
        "head": model.head.for_width(scale.base_width, scale.ratio(model.width)) or model.head,
        **{name: read.for_width(scale.base_width) or read for name, read in model.inputs.items()},
    }
    for side, stack in model.stacks.items():
        changes[side] = _scaled_stack(stack, model.width, scale)
    return model.model_copy(update=changes)


def _scaled_stack(stack: Stack, width: int, scale: MuP) -> Stack:
    def scaled(block: Block) -> Block:
        changes: dict[str, object] = {}
        for name, a in block.attentions():
            k = a.widths(width)[0]
            base = scale.base_key_width or k * scale.ratio(width)
            changes[name] = a.scaled(factor(a.scale, scale.base_width, base) * base / k)
        return block.model_copy(update=changes)

    blocks, prefix = (tuple(map(scaled, some)) for some in (stack.blocks, stack.prefix))
    return stack.model_copy(update={"blocks": blocks, "prefix": prefix})


def scale_faults(model: ModelConfig, scale: WidthScale, optimizer: Optimizer, init_from: str | None) -> Iterator[Fault]:
    """Yield what the rules of a scale do not cover, with paths from the top of a recipe."""
    if not isinstance(scale, MuP):
        return
    at, why = "train.scale", "= 'mup'"
    if init_from is not None:
        yield Fault(at, f"{why}: scales new weights; leave it out with train.init_from")
    if type(optimizer).width_rate is None:
        *others, last = (f"'{kind_of(part)}'" for part in Optimizer.choices() if part.width_rate is not None)
        instead = f"{', '.join(others)} or {last}"
        yield Fault(at, f"{why}: has no learning rates for '{optimizer.kind}'; use {instead}")
    if not isinstance(model.init, Normal | Xavier):
        yield Fault("model.init", f"= '{model.init.kind}': train.scale = 'mup' needs 'normal' or 'xavier'")
    if model.head.for_width(1, 1) is None:
        yield Fault("model.head", f"= '{model.head.kind}': train.scale = 'mup' has rules for 'lm' only")
    for name, read in model.inputs.items():
        if read.for_width(1) is None:
            yield Fault(f"model.{name}", "train.scale = 'mup' has rules for tokens with a full table only")
    for side, stack in model.stacks.items():
        for field, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
            for i, block in enumerate(blocks):
                for part, what in _uncovered(block):
                    yield Fault(f"model.{side}.{field}.{i}.{part}", f"{what}: train.scale = 'mup' has no rule for it")


def _uncovered(block: Block) -> Iterator[tuple[str, str]]:
    if block.attention is None:
        yield "mixer", f"= '{block.mixer.kind}'"
    for name, a in block.attentions():
        if a.latent:
            yield f"{name}.compress", f"= '{a.latent.kind}'"
