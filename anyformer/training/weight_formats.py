"""Weights of a training in other formats than fp32: blocks in fp8, frozen weights of few bits."""

from rich.console import Console
from torch import nn

from anyformer.config import ConfigError, Fault
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.fp8 import SIZE_MULTIPLE, learn_in_fp8
from anyformer.nn.transforms.quantise import round_base
from anyformer.nn.transforms.rounding import Bits


def convert_to_fp8(model: Transformer, console: Console) -> None:
    """Multiply the weights of the blocks in fp8. Print how many layers stay in bf16; refuse fp8 if all of them do."""
    stacks = nn.ModuleList(stack for stack in (model.encoder, model.decoder) if stack is not None)
    converted, left = learn_in_fp8(stacks)
    reason = f"{len(left)} with a size that is not a multiple of {SIZE_MULTIPLE}"
    if not converted:
        counts = f": there are {reason}" if left else ""
        what = f"= 'fp8': no linear layer of the blocks can be converted{counts}; set 'bf16'"
        raise ConfigError([Fault("train.precision", what)])
    if left:
        text = f"fp8: {len(converted)} linear layers of the blocks; in bf16 remain {reason}"
        console.print(text, markup=False, soft_wrap=True)


def round_frozen(model: Transformer, bits: Bits) -> None:
    """Round the frozen weights of the blocks; refuse weights that are not finite."""
    try:
        round_base(model, bits)
    except ValueError as error:
        raise ConfigError([Fault("train.base_bits", f"= {bits}: {error}")]) from None
