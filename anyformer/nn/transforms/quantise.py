"""Quantise a built model: integers of 8 or 4 bits for decoding, or as the frozen weights under an adapter (QLoRA).

    small = quantise(model, bits=4)
    generate(small, ids)

The linear layers of the blocks, and the table of a vocabulary head, are rounded. Embeddings, other heads, norms,
routers, convolutions and recurrent cells stay as they are.
"""

import copy
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn

from anyformer.kernels.matmul import int8_is_faster
from anyformer.nn.attention_variants.latent import LatentProjection
from anyformer.nn.experts import StackedLinear
from anyformer.nn.heads import VocabularyHead
from anyformer.nn.linear import Linear, WeightFormat
from anyformer.nn.model import Transformer
from anyformer.nn.transforms import arm_kernel, dot_product_format
from anyformer.nn.transforms.arm_kernel import ArmKernelFormat
from anyformer.nn.transforms.dot_product_format import DotProductFormat
from anyformer.nn.transforms.merge import merge
from anyformer.nn.transforms.rounding import GROUP_SIZE, MAX_INTEGER, Bits, Rounded, RoundedFormat, round_off

QuantisedKernel = Literal["auto", "plain", "kernel"]


def quantise(
    model: Transformer, bits: Bits = 8, *, group: int | None = None, way: QuantisedKernel = "auto"
) -> Transformer:
    """Return a copy with weights of 8 or 4 bits, which cannot be trained. Adapters are merged first.

    Weights are dequantised for each matmul, in the precision of the model. That takes less memory and more time,
    except for few rows on a GPU in half precision (one; with 8 bits up to 64), whose kernels read the integers. Kernels
    for CPUs are on large matrices about 3 times as fast as fp32 with 8 bits (Arm with dot products, x86 with AVX-512
    VNNI); with 4 bits about 4 times for one row and, for many, 1.3 times (Arm) or twice (x86). They also round each
    token to 8 bits, by about 1 % of its length. A C compiler builds these kernels once, but for Arm's kernel for 4
    bits, which is torch's and replaces that for 8 bits where there is no compiler.

    The head has 8 bits in any case: with 4 bits, rounding it would cost a third of what rounding all blocks costs. A
    head that shares its table with the input gets a rounded copy of it if that is faster, else it stays plain.

    Quantise on the device where the model runs: weights of these kernels cannot be moved to another device.

    Args:
        model: the model, which stays as it is.
        bits: 8, with a scale for each row of a matrix, or 4, with one for each group of a row.
        group: weights with one scale, 32, 64, 128, ...; None: 32.
        way: "plain", "kernel" for CPUs, or "auto": a kernel if there is one, else plain.

    Returns:
        The quantised copy.

    Raises:
        ValueError: bits or a group are others, there is no kernel, or weights are not finite or quantised already.

    Example:
        >>> model = af.Transformer(af.presets.gpt2(depth=2, width=64, heads=4, vocab=97)).eval()
        >>> af.quantise(model, 8)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 97])
    """
    if bits not in MAX_INTEGER:
        raise ValueError(f"bits = {bits}: must be 8 or 4")
    if bits == 8 and group is not None:
        raise ValueError("group: with 8 bits a row has one scale; leave it out")
    if group is not None and (group < 32 or group % 32):
        raise ValueError(f"group = {group}: must be a multiple of 32")
    if way == "kernel" and not all(_has_kernel(p, bits) for p in model.parameters()):
        raise ValueError(
            "way = 'kernel': needs a model in fp32 on an Arm CPU, or on one with AVX-512 VNNI and a C compiler"
        )
    model = merge(model)
    layers, size = dict(_layers(model)), (group or GROUP_SIZE) if bits == 4 else None
    if any(layer.weight is None for layer in layers.values()):
        raise ValueError("the model is quantised already: quantise the original")
    read_by_others = {id(module.up) for module in model.modules() if isinstance(module, LatentProjection)}
    formats: dict[str, WeightFormat] = {}
    for name, layer in layers.items():
        weight, rounded = layer.rows().detach(), round_off(layer.rows().detach(), bits, size)
        fast = isinstance(layer, Linear) and way != "plain" and id(layer) not in read_by_others
        formats[name] = _format(rounded, weight, layer.bias, fast)
    replaced = [layer.weight for layer in layers.values()]
    if (table := _table(model)) is not None:
        assert isinstance(model.head, VocabularyHead)
        own, fast = model.head.table, way != "plain"
        if own is not None or (fast and (_has_kernel(table, 8) or int8_is_faster(table))):
            formats["head"] = _format(round_off(table, 8), table, model.head.bias, fast)
            replaced.append(own)
    small = copy.deepcopy(model, {id(weight): None for weight in replaced if weight is not None})
    for name, format in formats.items():
        small.get_submodule(name).format = format
    return small.requires_grad_(False)


def _has_kernel(weight: Tensor, bits: Bits) -> bool:
    """Return whether a kernel of this CPU takes these weights."""
    return arm_kernel.is_supported(weight) or dot_product_format.is_supported(weight, bits)


def _format(rounded: Rounded, weight: Tensor, bias: Tensor | None, fast: bool) -> WeightFormat:
    """Return the format of rounded weights: for a kernel of this CPU if it may be used and is available."""
    if fast and dot_product_format.is_supported(weight, rounded.bits):
        return DotProductFormat(rounded, None if bias is None else bias.detach())
    if fast and arm_kernel.is_supported(weight):
        return ArmKernelFormat(rounded, None if bias is None else bias.detach())
    return RoundedFormat(rounded, weight.dtype)


def _layers(model: Transformer) -> Iterator[tuple[str, Linear | StackedLinear]]:
    """Yield the linear layers of the blocks, with their names. Routers are not among them: they are `nn.Linear`."""
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for name, module in stack.named_modules(prefix=side) if stack is not None else ():
            if isinstance(module, Linear | StackedLinear):
                yield name, module


def _table(model: Transformer) -> Tensor | None:
    """Return the table of a vocabulary head, its own or the input's."""
    if not isinstance(model.head, VocabularyHead):
        return None
    table = model.table(model.target or model.source) if model.head.table is None else model.head.table
    assert table is not None
    return table.detach()


def nbytes(model: nn.Module) -> int:
    """Return the memory of parameters and buffers; shared ones count once."""
    return sum(x.nbytes for x in {x.data_ptr(): x for x in (*model.parameters(), *model.buffers())}.values())


# -- frozen weights under an adapter ----------------------------------------------------------------------------------


def round_base(model: Transformer, bits: Bits) -> None:
    """Round the linear layers of the blocks in place, as the frozen weights under an adapter (QLoRA).

    Both passes of training dequantise them for each matmul. The state dict holds the dequantised weights under the
    usual names, so a run loads, merges and exports like any other. Rounding them again gives the same integers.
    """
    layers = dict(_layers(model))
    if nonfinite := [name for name, layer in layers.items() if not layer.rows().isfinite().all()]:
        raise ValueError(f"weights with NaN or Inf cannot be rounded: {', '.join(nonfinite[:3])}")
    for layer in layers.values():
        weight = layer.rows().detach()
        layer.weight = None
        layer.format = RoundedFormat(round_off(weight, bits, GROUP_SIZE), weight.dtype)
        layer.register_state_dict_post_hook(_save_dense)
        layer.register_load_state_dict_pre_hook(_load_dense)


def _save_dense(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(layer, Linear | StackedLinear)
    assert isinstance(layer.format, RoundedFormat)
    for name, _buffer in layer.format.named_buffers(prefix=f"{prefix}format"):
        del state[name]
    state[f"{prefix}weight"] = layer.format.dense()


def _load_dense(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(layer, Linear | StackedLinear)
    assert isinstance(layer.format, RoundedFormat)
    if (weight := state.pop(f"{prefix}weight", None)) is not None:
        rounded = RoundedFormat(round_off(weight, layer.format.bits, GROUP_SIZE), weight.dtype)
        state.update(rounded.state_dict(prefix=f"{prefix}format."))
