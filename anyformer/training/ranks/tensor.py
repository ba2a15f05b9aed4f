"""Tensor parallelism: a built model is split among the processes of a group, module by module.

`split_model` makes each weight of a split module a DTensor, of which this process has a part, and gives the module a
class that computes with it. The rows of a fused layer (queries, keys and values; gate and up) are first put into an
order in which the part of a process is contiguous: `row_orders` maps between this order and that of checkpoints.

The other weights are whole in every process. The gradients of some of them are sums over the group, because each
process uses them for its own heads only (`whole_weights`).
"""

import warnings
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from anyformer.attention.position_module import Positions
from anyformer.config.adapter import within
from anyformer.kernels.conventions import Note
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.attention_variants.cross import CrossAttention
from anyformer.nn.attention_variants.disentangled import DisentangledAttention
from anyformer.nn.attention_variants.global_tokens import GlobalTokenAttention
from anyformer.nn.attention_variants.latent import LatentAttention, LatentProjection
from anyformer.nn.block import Sublayer
from anyformer.nn.experts import ExpertMixture
from anyformer.nn.feedforward import GatedFFN, PlainFFN
from anyformer.nn.heads import VocabularyHead
from anyformer.nn.inputs import TokenInput
from anyformer.nn.linear import Linear
from anyformer.nn.model import Transformer
from anyformer.nn.stack import BlockStack
from anyformer.training.ranks.collectives import local
from anyformer.training.ranks.split_modules import (
    ColumnLinear,
    ColumnLowRank,
    GatherHeads,
    LatentDown,
    RowLinear,
    RowLowRank,
    SplitAttention,
    SplitCrossAttention,
    SplitDisentangledAttention,
    SplitDropout,
    SplitGlobalTokenAttention,
    SplitLatentAttention,
    SplitMixture,
    SplitPositions,
    SplitStackedLinear,
    SplitTokenInput,
    SplitVocabularyHead,
    become,
)

SPLIT_ATTENTION: dict[type[nn.Module], type[SplitAttention]] = {
    MultiHeadAttention: SplitAttention,
    CrossAttention: SplitCrossAttention,
    LatentAttention: SplitLatentAttention,
    DisentangledAttention: SplitDisentangledAttention,
    GlobalTokenAttention: SplitGlobalTokenAttention,
}

# -- how each kind of module is split ---------------------------------------------------------------------------------


def shard(module: nn.Module, name: str, mesh: DeviceMesh, dim: int, order: Tensor | None = None) -> None:
    """Make a parameter a DTensor that is split along `dim`, after its rows are put in this order; None stays None."""
    parameter = cast(nn.Parameter | None, getattr(module, name))
    if parameter is None:
        return
    values = parameter.detach() if order is None else parameter.detach()[order.to(parameter.device)]
    # every process has all values, so none is sent
    split = distribute_tensor(values, mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


def row_order(parts: tuple[int, ...], size: int) -> Tensor | None:
    """Return the order of rows in which process i of `size` has the i-th piece of each part; None: as they are."""
    if len(parts) == 1:
        return None
    pieces = [rows.chunk(size) for rows in torch.arange(sum(parts)).split(parts)]
    return torch.cat([piece[i] for i in range(size) for piece in pieces])


def split_columns(module: nn.Module, mesh: DeviceMesh, enters: bool = True) -> None:
    """Split the outputs of a linear layer, each of its parts alike."""
    assert isinstance(module, Linear)
    order = row_order(module.parts, mesh.size())
    shard(module, "weight", mesh, 0, order)
    shard(module, "bias", mesh, 0, order)
    if module.lora is not None:
        shard(module.lora, "b", mesh, 0, order)
        become(module.lora, ColumnLowRank)
    module.parts = tuple(part // mesh.size() for part in module.parts)
    become(module, ColumnLinear, mesh=mesh, enters=enters, order=order)


def split_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the inputs of a linear layer."""
    assert isinstance(module, Linear)
    shard(module, "weight", mesh, 1)
    if module.lora is not None:
        shard(module.lora, "a", mesh, 1)
        become(module.lora, RowLowRank, mesh=mesh)
    become(module, RowLinear, mesh=mesh)


def split_heads(module: MultiHeadAttention, mesh: DeviceMesh) -> None:
    """Split the heads of attention, with its linear layers."""
    layers = ["qkv"]
    if isinstance(module, CrossAttention):
        layers = ["q", "kv"]
    elif isinstance(module, LatentAttention):
        layers = []
        _split_latent(module.latent, mesh)
    layers += ["gate"] if module.gate is not None else []
    if isinstance(module, DisentangledAttention):
        layers += [] if module.own is None else ["own"]
    elif isinstance(module, GlobalTokenAttention):
        layers.append("global_qkv")
    for name in layers:
        split_columns(module.get_submodule(name), mesh)
    if isinstance(module.out, Linear):
        split_rows(module.out, mesh)
    else:
        module.add_module("out", GatherHeads(mesh))
    shard(module, "sinks", mesh, 0)
    module.heads, module.groups = module.heads // mesh.size(), module.groups // mesh.size()
    become(module, SPLIT_ATTENTION[type(module)], mesh=mesh)


def _split_latent(module: LatentProjection, mesh: DeviceMesh) -> None:
    """Split what latent attention computes for each head; the compressed vector is the same for all."""
    compressed = isinstance(module.query_up, Linear)
    split_columns(module.up, mesh, enters=False)
    if compressed:
        split_columns(module.query_up, mesh, enters=False)
    become(module.down, LatentDown, mesh=mesh, queries=None if compressed else module.down.parts[0])
    module.heads = module.heads // mesh.size()


def split_hidden(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the hidden layer of a feed-forward."""
    assert isinstance(module, PlainFFN | GatedFFN)
    split_columns(module.up if isinstance(module, PlainFFN) else module.gate_up, mesh)
    split_rows(module.down, mesh)
    become(module.dropout, SplitDropout, mesh=mesh)


def split_experts(module: ExpertMixture, mesh: DeviceMesh) -> None:
    """Split a mixture by expert, and the hidden layer of its shared network."""
    for layer in (module.up, module.down):
        shard(layer, "weight", mesh, 0)
        shard(layer, "bias", mesh, 0)
        layer.count //= mesh.size()
        become(layer, SplitStackedLinear)
    become(module.dropout, SplitDropout, mesh=mesh)
    become(module, SplitMixture, mesh=mesh)
    if module.shared is not None:
        split_hidden(module.shared, mesh)


def split_vocabulary(module: TokenInput | VocabularyHead, mesh: DeviceMesh, vocab: int) -> None:
    """Split the vocabulary of an embedding or of a head over the vocabulary."""
    match module:
        case TokenInput():
            if module.table is not None:
                shard(module.table, "weight", mesh, 0)
            become(module, SplitTokenInput, mesh=mesh)
        case VocabularyHead():
            shard(module, "table", mesh, 0)
            shard(module, "bias", mesh, 0)
            become(module, SplitVocabularyHead, mesh=mesh, vocab=vocab)


# -- the model --------------------------------------------------------------------------------------------------------


class SplitTransformer(Transformer):
    """A model that is split among the processes of `tensor_mesh`."""

    tensor_mesh: DeviceMesh
    row_orders: Mapping[str, Tensor]  # of fused layers: row i of a split weight is row order[i] of the weight
    whole_weights: Mapping[str, bool]  # weights that are not split: whether a process computes a part of the gradient


def split_model(model: Transformer, mesh: DeviceMesh) -> None:
    """Split a model with all its weights among the processes of a one-dimensional mesh.

    Modules without a rule, such as recurrent mixers, those of parts from outside and an image tower, stay whole in
    every process, which a note says. So does all attention of a stack with one such layer: it shares their biases.
    """
    partial = list[str]()
    modules = [(name, module) for name, module in model.named_modules() if not name.startswith("image_tower.")]
    for name, module in modules:
        match module:
            case PlainFFN() | GatedFFN() if type(module) in (PlainFFN, GatedFFN) and not name.endswith(".shared"):
                split_hidden(module, mesh)
            case ExpertMixture() if type(module) is ExpertMixture:
                split_experts(module, mesh)
            case TokenInput() | VocabularyHead():
                split_vocabulary(module, mesh, model.config.vocab)
    for name, stack in modules:
        if not isinstance(stack, BlockStack):
            continue
        own = {at: part for at, part in modules if isinstance(part, MultiHeadAttention) and within(at, name)}
        if any(type(attention) not in SPLIT_ATTENTION for attention in own.values()):
            continue
        for at, attention in own.items():
            split_heads(attention, mesh)
            latent = isinstance(attention, LatentAttention)
            norms = ("latent.norm", "latent.query_norm") if latent else ("q_norm", "k_norm")
            partial += [f"{at}.{part}" for part in (*norms, "value_mix")]
        for i, positions in enumerate(stack.schemes):
            become(positions, SplitPositions, mesh=mesh)
            if not cast(Positions, positions).scheme.reads_content():  # else a split layer reads its tables
                partial.append(f"{name}.schemes.{i}")
    _say_what_is_whole(model)
    columns = {name: module for name, module in model.named_modules() if isinstance(module, ColumnLinear)}
    partial += [f"{name}.lora.a" for name in columns]
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    become(
        model,
        SplitTransformer,
        tensor_mesh=mesh,
        row_orders={
            f"{name}.{part}": module.order
            for name, module in columns.items()
            if module.order is not None
            for part in ("weight", "bias", "lora.b")
        },
        whole_weights={name: any(within(name, part) for part in partial) for name in whole},
    )


def _say_what_is_whole(model: Transformer) -> None:
    """Name the sublayers of which every process computes all."""
    inners = [sublayer.inner for sublayer in model.modules() if isinstance(sublayer, Sublayer)]
    weights = [(type(inner).__name__, list(inner.parameters())) for inner in inners]
    whole = dict.fromkeys(name for name, some in weights if some and not any(isinstance(x, DTensor) for x in some))
    if whole:
        warnings.warn(
            f"every process computes all of {', '.join(whole)}: parallel.tensor does not split it", Note, stacklevel=2
        )


def in_model_order(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """Return a whole weight of a split model, or a tensor with its rows, in the order of checkpoints."""
    order = model.row_orders.get(name) if isinstance(model, SplitTransformer) else None
    return x if order is None or x.shape[:1] != order.shape else x[order.argsort().to(x.device)]


def in_split_order(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """Return a tensor of a checkpoint with its rows in the order of a split model."""
    order = model.row_orders.get(name) if isinstance(model, SplitTransformer) else None
    return x if order is None or x.shape[:1] != order.shape else x[order.to(x.device)]


@torch.no_grad()
def sum_whole_gradients(model: nn.Module) -> None:
    """Complete the gradients of weights that every process of a group has, after the backward pass.

    Some are sums of the parts that the processes computed. The others are equal but for rounding: their mean keeps the
    weights of all processes equal.
    """
    if not isinstance(model, SplitTransformer):
        return
    size, gradients, shares = model.tensor_mesh.size(), list[Tensor](), list[Tensor]()
    for name, parameter in model.named_parameters():
        if name in model.whole_weights and parameter.grad is not None:
            gradients.append(local(parameter.grad))  # of FSDP's shards, each process of the group has the same one
            shares.append(gradients[-1].flatten() / (1 if model.whole_weights[name] else size))
    if not gradients:
        return
    together = torch.cat(shares)
    all_reduce(together, group=model.tensor_mesh.get_group())
    for gradient, total in zip(gradients, together.split([share.numel() for share in shares]), strict=True):
        gradient.copy_(total.view_as(gradient))
